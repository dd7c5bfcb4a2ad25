"""Predicted against measured speed-up on the machine at hand, from a report over several numbers of drafts.

Usage: draftsmith eval RUN.toml --set 'eval.gamma=[1,3,5,7]'
       python3 scripts/speed_check.py RUN_FOLDER/eval/report.json

For every suite, temperature, rule and trained drafter: the times of drafting and verifying a round are taken from the smallest
and the largest number of drafts and drawn as straight lines; together with the exact tau they predict the speed-up at the
numbers in between, which these times do not know. A prediction is tau_exact * time of a plain token / time of a round.
"""

import json
import sys
from collections import defaultdict

report = json.load(open(sys.argv[1]))
plain, groups = {}, defaultdict(dict)
for entry in report["entries"]:
    time, rounds = entry["time"], max(entry["counts"]["rounds"], 1)
    per_round = {part: time[part] / rounds for part in ("draft", "verify", "sample", "other")}
    if entry["gamma"] == 0:
        plain[entry["suite"], entry["temperature"], entry["rule"]] = sum(per_round.values())
    elif entry["exact"]:
        key = (entry["suite"], entry["temperature"], entry["rule"], entry["proposer"])
        groups[key][entry["gamma"]] = (entry, per_round)

print(f"{'suite':8} {'T':>3} {'rule':12} {'proposer':18} {'drafts':>6} {'measured':>9} {'predicted':>9} {'ratio':>6}")
ratios = []
for (suite, temperature, rule, proposer), entries in groups.items():
    gammas = sorted(entries)
    # Rules that draw alike share one plain decoding, which stands under `sampling`.
    alone = plain.get((suite, temperature, rule), plain.get((suite, temperature, "sampling")))
    if len(gammas) < 3 or alone is None:
        continue
    first, last = gammas[0], gammas[-1]
    for gamma in gammas[1:-1]:
        share = (gamma - first) / (last - first)
        line = lambda part: (1 - share) * entries[first][1][part] + share * entries[last][1][part]
        entry = entries[gamma][0]
        predicted = entry["exact"]["tau"] * alone / sum(map(line, ("draft", "verify", "sample", "other")))
        ratios.append(predicted / entry["speed_up"])
        print(
            f"{suite:8} {temperature:>3} {rule:12} {proposer:18} {gamma:>6} {entry['speed_up']:>8.2f}x "
            f"{predicted:>8.2f}x {ratios[-1]:>6.2f}"
        )
if not ratios:
    sys.exit("no drafter with three numbers of drafts beside plain decoding; see the head of this file")
ratios.sort()
print(f"predicted / measured: median {ratios[len(ratios) // 2]:.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} cases")
