"""Golden values and gradients of DSpark, written from the description alone.

Usage: python make_golden.py        (torch 2.13.0, safetensors 0.8.0)

The block is that of DFlash (`../dflash/make_golden.py`) with `anchor_predicts`: position k predicts token
a+k+1. Its logits are head @ h + W2 @ W1[x_{a+k}], where x_{a+k} is the token in front of the predicted one.
The logit of the confidence is proj @ [h; W1[x_{a+k}]] + bias, taught by the overlap alpha.
"""

import importlib.util
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from reference import *  # noqa: F403

spec = importlib.util.spec_from_file_location("dflash_golden", HERE.parent / "dflash" / "make_golden.py")
dflash = importlib.util.module_from_spec(spec)
spec.loader.exec_module(dflash)

RANK = 5


def outputs(w, document):
    core = {name.removeprefix("core."): value for name, value in w.items()}
    rows = dflash.outputs(core, document, first=0)
    ids = document["ids"]
    # Rows past the end of the document belong to no valid slot.
    return {(a, d): torch.cat([h, w["markov_in"][ids[a + d]]]) for (a, d), h in rows.items() if a + d < len(ids)}


def weights(generator, draft_vocab):
    w = {f"core.{name}": value for name, value in dflash.weights(generator, draft_vocab).items()}
    w["markov_in"] = matrix(generator, V, RANK)
    w["markov_out"] = matrix(generator, draft_vocab, RANK)
    w["confidence_proj"] = matrix(generator, 1, H + RANK)
    w["confidence_bias"] = draw(generator, 1)
    return w


def make(name, seed, keep):
    make_case(
        HERE / f"{name}.safetensors",
        seed,
        weights,
        outputs,
        keep,
        dflash.BLOCK,
        head=lambda w: torch.cat([w["core.head"], w["markov_out"]], dim=1),
        confidence=lambda w, row: (w["confidence_proj"] @ row + w["confidence_bias"])[0],
    )


if __name__ == "__main__":
    make("full_vocab", 31, keep=list(range(V)))
    make("reduced", 32, keep=KEEP)
