"""Load the speculators layout of a DFlash or DSpark drafter with the package it is named after; compare logits.

    speculators_blocks.py DRAFTER REFERENCE

REFERENCE is written by `chain_logits TARGET DRAFTER PROMPT K REFERENCE`; the verifier path in DRAFTER's
configuration must exist. The package's own training pass opens one block at the only supervised position,
which stands right behind the prompt; DSpark's bias is that of the tokens our chain drafted.

Environment: README.md in this folder. Checked with speculators 0.9.0, torch 2.13.0, transformers 5.19.0.
"""

import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from common import difference, our_result, verdict
from speculators_model import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("drafter")
    parser.add_argument("reference")
    arguments = parser.parse_args()
    ours = our_result(arguments.reference)
    model = load(arguments.drafter)
    anchor, block = len(ours["prompt"]), model.config.block_size
    # The anchor is the token the target sampled; what follows it is masked in the block.
    room = 2 * block
    ids = torch.cat([ours["prompt"], ours["first"], torch.zeros(room, dtype=torch.long)])
    hidden = torch.cat([ours["aux"], torch.zeros(room + 1, ours["aux"].shape[1])])
    mask = torch.zeros(len(ids), dtype=torch.long)
    mask[anchor] = 1
    last = torch.zeros(1, len(ids), model.config.transformer_layer_config.hidden_size)
    documents = torch.zeros(1, len(ids), dtype=torch.long)
    with torch.no_grad():
        outputs, logits, *_ = model._backbone_forward(
            hidden[None], ids[None], mask[None], last, documents, None, max_anchors=1
        )
        if getattr(model, "markov_head", None) is not None:
            previous = torch.cat([ours["first"], ours["drafted"][:-1]])[None]
            logits = logits + model.markov_head.block_bias(prev_token_ids=previous, hidden_states=outputs)
    first = 0 if model.config.sample_from_anchor else 1
    vocabulary = torch.arange(logits.shape[-1])
    if getattr(model, "d2t", None) is not None:
        vocabulary = vocabulary + model.d2t
    verdict(
        "speculators_blocks",
        {
            "logits": difference(logits[0, first:], ours["logits"]),
            "vocabulary_equal": torch.equal(vocabulary, ours["vocab"]),
        },
        {"drafter": arguments.drafter, "logit_scale": float(ours["logits"].abs().max())},
    )


if __name__ == "__main__":
    main()
