"""Golden values and gradients of DFlash blocks, written from the description alone.

Usage: python make_golden.py        (torch 2.13.0, safetensors 0.8.0)

The context of position j is rms_norm(fc @ captured states). The block of anchor a holds the embeddings of
token a and of B - 1 masks at rotary positions a .. a+B-1. In each layer, a block token's keys are the
layer's own projections (key norm, rotary position j) of the context of every j < a, then those of all B
block tokens; values likewise without norm and rotation; queries with their own norm. Nothing else is
seen. With a window W the token at position p sees of the context only p - W < j. Block position k predicts token a+k (`anchor_as_bonus`, k >= 1: depth k-1) or token a+k+1
(`anchor_predicts`, k >= 0: depth k), taught by the target's distribution one position before that token.
"""

import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from reference import *  # noqa: F403

LAYERS, BLOCK, MASK = 2, 4, 47


def keys_and_values(w, layer, x, position, frequencies):
    k = head_norm((w[layer + "k_proj"] @ x).reshape(KV_HEADS, D), w[layer + "k_norm"])
    return rotate(k, position, frequencies), (w[layer + "v_proj"] @ x).reshape(KV_HEADS, D)


def block_outputs(w, document, anchor, frequencies, window=None):
    """Normed outputs of the B positions of one block."""
    context = [rms_norm(w["fc"] @ aux, w["context_norm"]) for aux in document["aux"][:anchor]]
    ids = [document["ids"][anchor]] + [MASK] * (BLOCK - 1)
    hidden = [document["embedding"][id] for id in ids]
    for index in range(LAYERS):
        layer = f"layers.{index}."
        normed = [rms_norm(x, w[layer + "input_norm"]) for x in hidden]
        past = [keys_and_values(w, layer, c, j, frequencies) for j, c in enumerate(context)]
        own = [keys_and_values(w, layer, x, anchor + i, frequencies) for i, x in enumerate(normed)]
        for i, x in enumerate(normed):
            q = head_norm((w[layer + "q_proj"] @ x).reshape(HEADS, D), w[layer + "q_norm"])
            q = rotate(q, anchor + i, frequencies)
            first = 0 if window is None else max(0, anchor + i - window + 1)
            seen = past[first:] + own
            mixed = attention(q, [k for k, _ in seen], [v for _, v in seen])
            out = hidden[i] + w[layer + "o_proj"] @ mixed
            hidden[i] = out + gated_mlp(w, rms_norm(out, w[layer + "mlp_norm"]), layer)
    return [rms_norm(x, w["norm"]) for x in hidden]


def outputs(w, document, first, window):
    frequencies = inverse_frequencies()
    anchors = {a for a, _ in valid_slots(document["turns"], 1)}
    rows = {}
    for a in anchors:
        block = block_outputs(w, document, a, frequencies, window)
        rows |= {(a, k - first): block[k] for k in range(first, BLOCK)}
    return rows


def weights(generator, draft_vocab):
    m, g = (lambda *size: matrix(generator, *size)), (lambda *size: gain(generator, *size))
    w = dict(fc=m(H, TAPS * H), context_norm=g(), norm=g(), head=m(draft_vocab, H) * 2)
    for index in range(LAYERS):
        layer = dict(
            input_norm=g(), q_proj=m(HEADS * D, H), k_proj=m(KV_HEADS * D, H), v_proj=m(KV_HEADS * D, H),
            q_norm=g(D), k_norm=g(D), o_proj=m(H, HEADS * D), mlp_norm=g(),
            gate_proj=m(I, H), up_proj=m(I, H), down_proj=m(H, I),
        )  # fmt: skip
        w |= {f"layers.{index}.{name}": value for name, value in layer.items()}
    return w


def make(name, seed, first, keep, window=None):
    path = HERE / f"{name}.safetensors"
    make_case(path, seed, weights, lambda w, document: outputs(w, document, first, window), keep, BLOCK - first)


if __name__ == "__main__":
    make("anchor_as_bonus", 11, first=1, keep=list(range(V)))
    make("anchor_predicts", 12, first=0, keep=KEEP)
    make("window", 13, first=1, keep=KEEP, window=5)
