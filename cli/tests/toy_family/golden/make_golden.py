"""Golden values and gradients of the toy family, written from its description alone.

Usage: python make_golden.py        (torch 2.13.0, safetensors 0.8.0; with ../reference.py)

Anchor a, depth d reads the target's final state of position a-1 after the final norm and the embedding of token
a+d; their concatenation goes through one matrix and a norm.
"""

import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from reference import *  # noqa: F403

K = 3


def row_outputs(w, document):
    ids, embedding = document["ids"], document["embedding"]
    outputs = {}
    for a in range(1, len(ids)):
        state = rms_norm(document["final_hidden"][a - 1], document["final_norm"])
        for d in range(min(K, len(ids) - a)):
            both = torch.cat([state, embedding[ids[a + d]]])
            outputs[a, d] = rms_norm(w["proj"] @ both, w["norm"])
    return outputs


def weights(generator, draft_vocab):
    return dict(
        proj=matrix(generator, H, 2 * H), norm=gain(generator), head=matrix(generator, draft_vocab, H) * 2
    )


if __name__ == "__main__":
    make_case(HERE / "linear.safetensors", 51, weights, row_outputs, KEEP, K)
