#!/bin/sh
# Trains one EAGLE-3 drafter of SmolLM2 for each loss and seed, under one budget and on the same states, and measures each by the exact
# evaluator: on validation rows (text at T=0.7) and on the text that decoding with it wrote for prompts of GSM8K and MT-Bench.
#
#   scripts/loss_study_smollm2.sh DATA TARGET OUT [SEEDS] [STEPS]       SEEDS "0 1 2" and STEPS 100 if left out
#
# DATA and TARGET as for scripts/compare_smollm2.sh. About four minutes a training on two cores; a second call goes on behind the last
# finished one. Ends with the table of scripts/loss_study_smollm2.py.
set -eu
[ $# -ge 3 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2; }
data=$(cd "$1" && pwd) target=$2 out=$3 seeds=${4:-0 1 2} steps=${5:-100}
draftsmith=${DRAFTSMITH:-target/release/draftsmith}
[ -x "$draftsmith" ] || cargo build --release --workspace
mkdir -p "$out"

stage() {
    name=$1 into=$2
    shift 2
    "$draftsmith" "$name" configs/smollm2-eagle3.toml --quiet --out "$into" \
        --set target.path="$target" \
        --set data.files="[\"$data/smollm2_train.jsonl\"]" \
        --set data.ids_files="[\"$data/smollm2_train.ids.jsonl\"]" \
        --set train.max_steps="$steps" --set train.validate_every=0 --set eval.baselines='[]' --set eval.max_new_tokens=64 \
        --set eval.suites="[
            { name = \"gsm8k\", file = \"$data/gsm8k_test.jsonl\", limit = 20 },
            { name = \"mt-bench\", file = \"$data/mt_bench.jsonl\", limit = 20 }]" "$@"
}

study() {
    name=$1
    shift
    for seed in $seeds; do
        folder=$out/$name/$seed
        [ ! -e "$folder/eval/report.json" ] || continue
        # The states are large: links to one copy of them, which no stage writes to.
        [ -e "$folder" ] || { mkdir -p "$out/$name" && cp -al "$out/base" "$folder"; }
        stage train "$folder" --set train.seed="$seed" "$@"
        stage eval "$folder" --set train.seed="$seed" "$@" > "$folder/eval.txt"
    done
}

for name in prepare capture; do
    stage $name "$out/base"
done
study kl --set objective.losses='{ kl = 1.0 }'
study expected_length --set objective.losses='{ expected_length = 1.0 }'
study ce_dpace --set objective.losses='{ ce = 1.0 }' --set objective.slot_weight='{ dpace = 0.5 }'
study lk_hybrid --set objective.losses='{ lk_hybrid = 1.0 }'
python3 scripts/loss_study_smollm2.py "$out"
