#!/bin/sh
# Trains one EAGLE-3 drafter of the embedded target for each loss, seed and temperature, under one budget, and measures each
# by the exact evaluator on validation text that the target wrote at that temperature.
#
#   scripts/loss_study.sh OUT [SEEDS] [TEMPERATURES]        for example: scripts/loss_study.sh runs/losses "0 1 2" "0.0 1.0"
#
# A minute for each training on two cores; a second call goes on behind the last finished one. Ends with the table of
# scripts/loss_study.py.
set -eu
[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
out=$1 seeds=${2:-0 1 2} temperatures=${3:-0.0 1.0}
draftsmith=${DRAFTSMITH:-target/release/draftsmith}
[ -x "$draftsmith" ] || cargo build --release --workspace
mkdir -p "$out"

# The quick start with one drafter and no text to decode: one prompt of eight tokens is the least that `eval` takes.
config=$out/study.toml
awk '/^\[/ { skip = ($0 ~ /^\[drafter\.(mtp|dflash)/) } !skip' configs/quickstart.toml > "$config"

stage() {
    part=$1 into=$2
    shift 2
    "$draftsmith" "$part" "$config" --quiet --out "$into" --set capture.mode=cached \
        --set objective.slot_weight='{ step_decay = 0.9 }' \
        --set regenerate.sampling="{ temperature = $temperature }" --set eval.baselines='[]' --set eval.max_new_tokens=8 \
        --set eval.suites='[{ name = "one", file = "assets/prompts/eval-math.jsonl", limit = 1 }]' "$@"
}

study() {
    name=$1
    shift
    for temperature in $temperatures; do
        base=$out/text-$temperature
        for seed in $seeds; do
            folder=$out/$temperature/$name/$seed
            [ ! -e "$folder/eval/report.json" ] || continue
            for preparation in prepare regenerate capture; do
                stage $preparation "$base"
            done
            rm -rf "$folder"
            mkdir -p "$folder"
            cp -r "$base/." "$folder/"
            stage train "$folder" --set train.seed="$seed" "$@"
            stage eval "$folder" --set train.seed="$seed" "$@" > "$folder/eval.txt"
        done
    done
}

study kl --set objective.losses='{ kl = 1.0 }'
study lk_hybrid --set objective.losses='{ lk_hybrid = 1.0 }'
study tv --set objective.losses='{ tv = 1.0 }'
study ce_tv --set objective.losses='{ ce = 0.1, tv = 0.9 }'
study ce_dpace --set objective.losses='{ ce = 1.0 }' --set objective.slot_weight='{ dpace = 0.5 }'
study expected_length --set objective.losses='{ expected_length = 1.0 }'
study round_count --set objective.losses='{ round_count = 1.0 }' --set objective.slot_weight='"uniform"'
study kl_then_round_count --set objective.losses='{ round_count = 1.0 }' --set objective.slot_weight='"uniform"' \
    --set objective.stages='[{ until = 0.5, losses = { kl = 1.0 } }]'

python3 scripts/loss_study.py "$out"
