"""Table of the drafters that scripts/compare_families.sh trained.

Usage: python3 scripts/compare_families.py OUT FAMILY...
"""

import json
import pathlib
import statistics
import sys



def lookup(report):
    cells = {(e["suite"], e["temperature"]): e["tau"] for e in report["entries"] if e["proposer"] == "prompt_lookup"}
    for suite in dict.fromkeys(suite for suite, _ in cells):
        print(f"| prompt_lookup | {suite} | {cells[suite, 0.0]:.3f} | {cells[suite, 1.0]:.3f} | | |")


out = pathlib.Path(sys.argv[1])
print("| drafter | suite | T=0: tau, 95 % | T=1: tau, exact, 95 % | s for 1,000 training tokens | peak memory, MB |")
print("|---|---|---|---|---|---|")
for family in sys.argv[2:]:
    report = json.loads((out / family / "eval" / "report.json").read_text())
    steps = [json.loads(line) for line in open(out / family / family / "metrics.jsonl")]
    # Of the median step, so that what else the machine did for a while does not count.
    step = statistics.median(step["seconds"]["step"] for step in steps)
    seconds = 1000 * step * len(steps) / steps[-1]["tokens"]
    memory = json.loads((out / f"train.{family}.json").read_text())["megabytes"]
    if family == sys.argv[2]:
        lookup(report)
    cells = {(e["suite"], e["temperature"]): e for e in report["entries"] if e["proposer"] == family}
    for suite in dict.fromkeys(suite for suite, _ in cells):
        interval = lambda e: f"{e['tau_interval']['low']:.2f}-{e['tau_interval']['high']:.2f}"
        greedy, drawn = cells[suite, 0.0], cells[suite, 1.0]
        print(
            f"| {family} | {suite} | {greedy['tau']:.3f}, {interval(greedy)} | {drawn['tau']:.3f}, "
            f"{drawn['exact']['tau']:.3f}, {interval(drawn)} | {seconds:.2f} | {memory:.0f} |"
        )
