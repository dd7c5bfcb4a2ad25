#!/usr/bin/env bash
# What a machine with an NVIDIA card and a CUDA 13 driver must show, in at most three minutes.
#
#   scripts/gpu-check.sh [BINARY] [OUTPUT FOLDER]
#
# The binary is built elsewhere, without a card or a CUDA toolkit:
#   CUDARC_CUDA_VERSION=13000 cargo build --profile cuda --features cuda -p draftsmith
# Checked: the card is found, NVRTC compiles kernels, loss and every gradient agree with the processor
# (`doctor`), 20 training steps of the quick start run, and the drafter's tau is measured on the card.
# Results: OUTPUT/{doctor.json, run/}, and the last line of the output, which is PASSED or FAILED.
set -euo pipefail
cd "$(dirname "$0")/.."
binary="${1:-target/cuda/draftsmith}"
out="${2:-${OUT:-runs/gpu-check}}"
limit_mb=60
mkdir -p "$out"
stage="start"
trap 'status=$?; [ "$status" -eq 0 ] && echo PASSED || echo "FAILED in: $stage (status $status)"' EXIT

stage="binary"
[ -x "$binary" ] || { echo "no executable at $binary; see the head of this script" >&2; exit 2; }
size_mb=$(( $(stat -c %s "$binary") / 1000000 ))
echo "binary: ${size_mb} MB (limit ${limit_mb} MB)"
[ "$size_mb" -lt "$limit_mb" ]

stage="card"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader

stage="doctor: kernels and gradients against the processor"
timeout 80 "$binary" doctor configs/quickstart.toml --device cuda:0 --json > "$out/doctor.json" ||
    { cat "$out/doctor.json"; exit 1; }
cat "$out/doctor.json"

stage="20 training steps and tau"
time timeout 95 "$binary" run configs/quickstart.toml --device cuda:0 --out "$out/run" \
    --set train.max_steps=20 --set regenerate.max_new_tokens=48 --set eval.max_new_tokens=32
