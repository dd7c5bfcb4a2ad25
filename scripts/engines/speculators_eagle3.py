"""Load the speculators layout of a drafter with the package it is named after and compare logits.

    speculators_eagle3.py DRAFTER REFERENCE

REFERENCE is written by `chain_logits TARGET DRAFTER PROMPT K REFERENCE`; the verifier path in DRAFTER's
configuration must exist. The first draft is one step of the package's forward over the prompt; the
chained ones are compared by `speculators_unroll.py` and in vLLM.

Environment: README.md in this folder. Checked with speculators 0.9.0, torch 2.13.0, transformers 5.19.0.
"""

import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from common import difference, our_result, verdict
from speculators_model import load, logits_of_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("drafter")
    parser.add_argument("reference")
    arguments = parser.parse_args()
    ours = our_result(arguments.reference)
    model = load(arguments.drafter)
    # Entry i holds the token after position i; the last one is the token the target sampled.
    shifted = torch.cat([ours["prompt"][1:], ours["first"]])
    (logits,) = logits_of_steps(model, ours["aux"], shifted, steps=1)
    vocabulary = torch.arange(logits.shape[-1])
    if model.d2t is not None:
        vocabulary = vocabulary + model.d2t
    verdict(
        "speculators_eagle3",
        {
            "logits": difference(logits[-1], ours["logits"][0]),
            "vocabulary_equal": torch.equal(vocabulary, ours["vocab"]),
        },
        {"drafter": arguments.drafter, "logit_scale": float(ours["logits"][0].abs().max())},
    )


if __name__ == "__main__":
    main()
