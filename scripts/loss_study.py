"""Table of the exact tau of each loss, from the folders that scripts/loss_study.sh leaves.

Usage: python3 scripts/loss_study.py OUT

One row for each temperature and loss: mean over seeds of tau with the largest gamma, smallest and largest seed, and the
mean half width of the 95 % bootstrap interval over validation rows.
"""

import json
import pathlib
import sys

out = pathlib.Path(sys.argv[1])
print("| T | loss | seeds | tau | of the seeds | interval | acceptance by depth |")
print("|---|---|---|---|---|---|---|")
for temperature in sorted(p.name for p in out.iterdir() if p.is_dir() and p.name[0].isdigit()):
    rows = []
    for loss in (out / temperature).iterdir():
        taus, widths, depths = [], [], []
        for path in sorted(loss.glob("*/eval/report.json")):
            (entry,) = json.loads(path.read_text())["exact"]
            report = entry["report"]
            assert report["text_matches_rule"], f"{path}: the text was not drawn as it is measured"
            best = report["by_gamma"][-1]
            taus.append(best["tau"])
            widths.append((best["interval"]["high"] - best["interval"]["low"]) / 2)
            depths.append(report["acceptance_by_depth"])
        if taus:
            mean = sum(taus) / len(taus)
            by_depth = " ".join(f"{sum(d) / len(d):.3f}" for d in zip(*depths))
            rows.append((mean, loss.name, taus, sum(widths) / len(widths), by_depth))
    for mean, loss, taus, width, by_depth in sorted(rows, reverse=True):
        spread = f"{min(taus):.3f}-{max(taus):.3f}"
        print(f"| {temperature} | {loss} | {len(taus)} | {mean:.3f} | {spread} | +-{width:.3f} | {by_depth} |")
