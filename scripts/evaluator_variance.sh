#!/bin/sh
# Variance of tau over seeds: real decoding against the exact evaluator on the text that it produced, same prompts.
#
#   scripts/evaluator_variance.sh RUN_FOLDER OUT [SEEDS] [ARGUMENTS]     for example: scripts/evaluator_variance.sh runs/quickstart runs/variance 20
#
# RUN_FOLDER is a finished run; its drafters decode its suites at temperature 1 once for each seed. A minute a seed for the quick
# start on two cores; a second call goes on behind the last finished seed. ARGUMENTS are given to `draftsmith eval`, for example
# --set eval.max_new_tokens=48.
set -eu
[ $# -ge 2 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
run=$1 out=$2 seeds=${3:-20}
[ $# -lt 3 ] || shift
shift 2
draftsmith=${DRAFTSMITH:-target/release/draftsmith}
[ -x "$draftsmith" ] || cargo build --release --workspace
mkdir -p "$out"
for seed in $(seq 1 "$seeds"); do
    [ ! -e "$out/$seed.json" ] || continue
    "$draftsmith" eval "$run/resolved.toml" --quiet --set eval.seed="$seed" --set eval.temperatures='[1.0]' \
        --set eval.baselines='[]' "$@" > "$out/$seed.txt"
    cp "$run/eval/report.json" "$out/$seed.json"
done
python3 - "$out" <<'PY'
import glob, json, statistics, sys
from collections import defaultdict
taus = defaultdict(list)
for path in glob.glob(sys.argv[1] + "/*.json"):
    for entry in json.load(open(path))["entries"]:
        if entry["exact"]:
            taus[entry["suite"], entry["proposer"]].append((entry["tau"], entry["exact"]["tau"]))
print(f"{'suite':8} {'proposer':12} {'seeds':>5} {'tau':>7} {'exact':>7} {'sd of tau':>10} {'sd of exact':>11} {'variance ratio':>14}")
for (suite, proposer), pairs in sorted(taus.items()):
    tau, exact = zip(*pairs)
    sds = statistics.stdev(tau), statistics.stdev(exact)
    print(f"{suite:8} {proposer:12} {len(pairs):>5} {statistics.mean(tau):>7.3f} {statistics.mean(exact):>7.3f} "
          f"{sds[0]:>10.4f} {sds[1]:>11.4f} {(sds[0] / sds[1]) ** 2:>14.1f}")
PY
