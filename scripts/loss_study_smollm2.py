"""Table of the exact tau of each loss, from the folders that scripts/loss_study_smollm2.sh leaves.

Usage: python3 scripts/loss_study_smollm2.py OUT

One row for each loss: mean of the seeds, smallest and largest, and the mean half width of the 95 % bootstrap interval over
prompts, on validation rows and on the text of each suite and temperature.
"""

import json
import pathlib
import sys


def figures(path):
    """Exact tau with the most drafts by text, with its interval."""
    report = json.loads(path.read_text())
    (validation,) = (entry["report"]["by_gamma"][-1] for entry in report["exact"])
    found = {"validation T=0.7": validation}
    for entry in report["entries"]:
        if entry["exact"]:
            found[f"{entry['suite']} T={entry['temperature']:g}"] = entry["exact"]
    return found


out = pathlib.Path(sys.argv[1])
losses = {}
for path in sorted(out.glob("*/*/eval/report.json")):
    losses.setdefault(path.parts[-4], []).append(figures(path))
texts = list(next(iter(losses.values()))[0])
print("| loss | seeds | " + " | ".join(texts) + " |")
print("|---" * (len(texts) + 2) + "|")
for loss, seeds in losses.items():
    cells = []
    for text in texts:
        taus = [seed[text]["tau"] for seed in seeds]
        width = sum(seed[text]["interval"]["high"] - seed[text]["interval"]["low"] for seed in seeds) / len(seeds) / 2
        cells.append(f"{sum(taus) / len(taus):.3f} ({min(taus):.3f}-{max(taus):.3f}) +-{width:.3f}")
    print(f"| {loss} | {len(seeds)} | " + " | ".join(cells) + " |")
