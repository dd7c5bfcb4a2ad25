#!/bin/sh
# Trains every drafter of a run file for SmolLM2 in a process and a folder of its own, under one budget and on the same states, and
# measures each: tau on three suites at temperature 0 and 1, seconds for 1,000 training tokens, peak memory.
#
#   scripts/compare_families.sh DATA TARGET OUT [RUN_FILE]      RUN_FILE is configs/smollm2-families.toml if left out
#
# DATA and TARGET as for scripts/compare_smollm2.sh. FAMILIES="mtp dflash" takes some of the drafters, DRAFTSMITH another program.
# Two cores need about an hour a family; a second call goes on where the first one ended. Ends with the table of
# scripts/compare_families.py.
set -eu
[ $# = 3 ] || [ $# = 4 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2; }
data=$(cd "$1" && pwd) target=$2 out=$3 config=${4:-configs/smollm2-families.toml}
draftsmith=${DRAFTSMITH:-target/release/draftsmith}
[ -x "$draftsmith" ] || cargo build --release --workspace
mkdir -p "$out/prompts"
# Every second MT-Bench prompt, so that 40 of them cover all categories.
awk 'NR % 2 == 1' "$data/mt_bench.jsonl" > "$out/prompts/mt_bench.jsonl"

# stage NAME CONFIG FOLDER [ARGUMENTS]: runs a stage, notes its wall time and its peak resident memory.
stage() {
    name=$1 run_file=$2 into=$3
    shift 3
    python3 - "$out/$name.$(basename "$into").json" "$draftsmith" "$name" "$run_file" --out "$into" "$@" \
        --set target.path="$target" \
        --set data.files="[\"$data/smollm2_train.jsonl\"]" \
        --set data.ids_files="[\"$data/smollm2_train.ids.jsonl\"]" \
        --set eval.suites="[
            { name = \"gsm8k\", file = \"$data/gsm8k_test.jsonl\", limit = 40 },
            { name = \"humaneval\", file = \"$data/humaneval.jsonl\", limit = 40 },
            { name = \"mt-bench\", file = \"$out/prompts/mt_bench.jsonl\" }]" <<'PY'
import json, subprocess, sys, time
start, most = time.time(), 0  # VmHWM: the most that was ever resident
process = subprocess.Popen(sys.argv[2:])
while process.poll() is None:
    try:
        status = open(f"/proc/{process.pid}/status").read()
        most = max([most] + [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")])
    except OSError:
        pass
    time.sleep(0.5)
figures = {"seconds": time.time() - start, "megabytes": most / 1024}
print("==", sys.argv[3], figures, flush=True)
if process.returncode == 0 and figures["seconds"] > 60:  # a stage that was skipped keeps its figures
    json.dump(figures, open(sys.argv[1], "w"))
sys.exit(process.returncode)
PY
}

# only FAMILY: the run file with this drafter alone.
only() {
    awk -v family="$1" '
        /^\[/ { skip = ($0 ~ /^\[drafter\./ && $0 !~ "^\\[drafter\\." family "[].]") } !skip' "$config"
}

families=${FAMILIES:-$(sed -n 's/^\[drafter\.\([a-z0-9]*\)\].*/\1/p' "$config")}
for family in $families; do
    only "$family" > "$out/$family.toml"
done
base=$out/base
first=$(echo "$families" | awk '{ print $1 }')
for name in prepare capture; do
    stage $name "$out/$first.toml" "$base"
done
for family in $families; do
    folder=$out/$family
    # The states are large: links to one copy of them, which no stage writes to.
    [ -e "$folder" ] || cp -al "$base" "$folder"
    stage capture "$out/$family.toml" "$folder"
    stage train "$out/$family.toml" "$folder"
    # The baselines are the same beside every drafter: once is enough.
    if [ "$family" = "$first" ]; then
        stage eval "$out/$family.toml" "$folder"
    else
        stage eval "$out/$family.toml" "$folder" --set eval.baselines='[]'
    fi
done
python3 scripts/compare_families.py "$out" $families
