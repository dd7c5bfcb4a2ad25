#!/bin/sh
# Trains the drafter of a run file for SmolLM2 and measures it: speed and memory of each stage, then tau.
#
#   scripts/compare_smollm2.sh DATA TARGET OUT [RUN_FILE]        RUN_FILE is configs/smollm2-eagle3.toml if left out
#
# DATA holds smollm2_train.jsonl, smollm2_train.ids.jsonl and the prompt files gsm8k_test.jsonl, humaneval.jsonl and
# mt_bench.jsonl; TARGET is the imported SmolLM2 (see the head of the run file); OUT is the run folder. Two cores need
# about an hour and a half; a second call goes on where the first one ended.
set -eu
[ $# = 3 ] || [ $# = 4 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
data=$(cd "$1" && pwd) target=$2 out=$3 config=${4:-configs/smollm2-eagle3.toml}
draftsmith=target/release/draftsmith
[ -x $draftsmith ] || cargo build --release --workspace

mkdir -p "$out/prompts"
# Every second MT-Bench prompt, so that 40 of them cover all categories.
awk 'NR % 2 == 1' "$data/mt_bench.jsonl" > "$out/prompts/mt_bench.jsonl"

stage() {
    python3 - "$@" <<'PY'
import resource, subprocess, sys, time
start = time.time()
code = subprocess.run(sys.argv[1:]).returncode
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(f"== {sys.argv[2]}: {time.time() - start:.1f} s wall, {usage.ru_utime + usage.ru_stime:.1f} CPU-s, "
      f"peak memory {usage.ru_maxrss / 1024:.0f} MiB", flush=True)
sys.exit(code)
PY
}

for name in prepare capture train eval export; do
    stage $draftsmith $name "$config" --out "$out" \
        --set target.path="$target" \
        --set data.files="[\"$data/smollm2_train.jsonl\"]" \
        --set data.ids_files="[\"$data/smollm2_train.ids.jsonl\"]" \
        --set eval.suites="[
            { name = \"gsm8k\", file = \"$data/gsm8k_test.jsonl\", limit = 40 },
            { name = \"humaneval\", file = \"$data/humaneval.jsonl\", limit = 40 },
            { name = \"mt-bench\", file = \"$out/prompts/mt_bench.jsonl\" }]"
done
