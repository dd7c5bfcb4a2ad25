"""Compare our training slots with the speculators package's own EAGLE-3 training forward.

    speculators_unroll.py DRAFTER REFERENCE

DRAFTER has the speculators layout; REFERENCE is written by
`unroll_logits TARGET DRAFTER IDS TURNS REFERENCE`. Slot (anchor a, depth d) is row a-1 of step d there.
The package masks its loss by another rule, so only the slots that are valid by ours are compared; the
logits of all other rows are computed by both sides but mean nothing.

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
    steps = int(ours["steps"][0])
    shifted = torch.cat([ours["ids"][1:], torch.zeros(1, dtype=torch.long)])
    theirs = torch.stack(logits_of_steps(load(arguments.drafter), ours["aux"], shifted, steps))
    anchors, depths = ours["anchors"], ours["depths"]
    selected = theirs[depths, anchors - 1]
    off_by_one = theirs[depths, anchors.clamp(max=theirs.shape[1] - 1)]
    by_depth = [
        difference(selected[depths == depth], ours["logits"][depths == depth])
        for depth in range(steps)
        if (depths == depth).any()
    ]
    control = difference(off_by_one, ours["logits"])
    verdict(
        "speculators_unroll",
        {
            "logits": max(by_depth),
            # Guards the comparison itself: neighbouring rows must be far apart.
            "neighbouring_rows_differ": control > 1e-2,
        },
        {
            "drafter": arguments.drafter,
            "slots": len(anchors),
            "by_depth": by_depth,
            "neighbouring_rows": control,
        },
    )


if __name__ == "__main__":
    main()
