#!/bin/sh
# Runs every engine check on tiny random models; prints one line of JSON a check and fails if one fails.
# Usage: PYTHON=V/bin/python run_all.sh WORK_FOLDER [case ..]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
examples=${EXAMPLES:-$root/target/release/examples}
python=${PYTHON:-python3}
work=$(mkdir -p "$1" && cd "$1" && pwd)
shift
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

prompt=5,17,301,44,9,120,7,7,88,410,23,256
row=$prompt,31,77,402,18,18,260,99,350,3,64,211,140
turns=0,0,0,0,0,0,0,0,0,0,1,1,1,1,1,1,1,0,0,2,2,2,2,2
steps=4
failed=0

check() { # script, arguments ...
    name=$1
    shift
    "$python" "$here/$name" "$@" 2>"$work/$name.log" || {
        failed=1
        tail -20 "$work/$name.log" >&2
    }
}

block_case() { # name, target options, checkpoint options: DFlash
    echo "case $1" >&2
    folder=$work/$1
    rm -rf "$folder"
    # shellcheck disable=SC2086
    "$python" "$here/make_target.py" "$folder/target" $2 2>/dev/null
    # shellcheck disable=SC2086
    "$examples/random_checkpoint" "$folder/target" "$folder" family=dflash steps=$steps $3
    "$examples/chain_logits" "$folder/target" "$folder/checkpoint" $prompt $steps "$folder/chain.safetensors"
    for layout in native speculators; do
        check vllm_drafter.py "$folder/target" "$folder/export/$layout" "$folder/chain.safetensors"
    done
    # With a window the package's own forward differs from vLLM's (logits by 2.8), see docs/experiments.md.
    case $3 in
        *window=*) ;;
        *) check speculators_blocks.py "$folder/export/speculators" "$folder/chain.safetensors" ;;
    esac
}

markov_case() { # name, target options, checkpoint options: DSpark, which vLLM drafts with on a card only
    echo "case $1" >&2
    folder=$work/$1
    rm -rf "$folder"
    # shellcheck disable=SC2086
    "$python" "$here/make_target.py" "$folder/target" $2 2>/dev/null
    # shellcheck disable=SC2086
    "$examples/random_checkpoint" "$folder/target" "$folder" family=dspark steps=$steps $3
    "$examples/chain_logits" "$folder/target" "$folder/checkpoint" $prompt $steps "$folder/chain.safetensors"
    check speculators_blocks.py "$folder/export/speculators" "$folder/chain.safetensors"
}

head_case() { # name, target options: MTP, which only vLLM serves
    echo "case $1" >&2
    folder=$work/$1
    rm -rf "$folder"
    # shellcheck disable=SC2086
    "$python" "$here/make_target.py" "$folder/target" $2 2>/dev/null
    "$examples/random_checkpoint" "$folder/target" "$folder" family=mtp steps=$steps
    "$examples/chain_logits" "$folder/target" "$folder/checkpoint" $prompt $steps "$folder/chain.safetensors"
    check vllm_drafter.py "$folder/target" "$folder/export/native" "$folder/chain.safetensors"
}

one_case() { # name, target options, checkpoint options
    echo "case $1" >&2
    folder=$work/$1
    rm -rf "$folder"
    # shellcheck disable=SC2086
    "$python" "$here/make_target.py" "$folder/target" $2 2>/dev/null
    # shellcheck disable=SC2086
    "$examples/random_checkpoint" "$folder/target" "$folder" steps=$steps $3
    for layout in native speculators; do
        out=$folder/export/$layout
        "$examples/chain_logits" "$folder/target" "$folder/checkpoint" $prompt $steps \
            "$folder/chain.safetensors"
        "$examples/chain_logits" "$folder/target" "$out" $prompt $steps \
            "$folder/chain-$layout.safetensors"
        cmp "$folder/chain.safetensors" "$folder/chain-$layout.safetensors" || failed=1
        check vllm_drafter.py "$folder/target" "$out" "$folder/chain-$layout.safetensors"
    done
    check speculators_eagle3.py "$folder/export/speculators" "$folder/chain.safetensors"
    "$examples/unroll_logits" "$folder/target" "$folder/checkpoint" $row $turns \
        "$folder/unroll.safetensors"
    check speculators_unroll.py "$folder/export/speculators" "$folder/unroll.safetensors"
}

selected() { # name, wanted names ...
    name=$1
    shift
    [ $# -eq 0 ] && return 0
    for wanted in "$@"; do [ "$wanted" = "$name" ] && return 0; done
    return 1
}

run() { # name, target options, checkpoint options, wanted names ...
    name=$1 target=$2 checkpoint=$3
    shift 3
    if selected "$name" "$@"; then one_case "$name" "$target" "$checkpoint"; fi
}

run reduced "" "vocab=128" "$@"
run layers "" "layers=0,3,5 vocab=128" "$@"
run full "" "" "$@"
run last-layer "" "layers=1,4,7 vocab=128 residual=normed" "$@"
run llama3-rope "--rope-scaling llama3" "vocab=200" "$@"
run tied "--tied" "vocab=128" "$@"
run qwen3 "--qwen3" "vocab=128" "$@"
run norms "" "vocab=128 norms=all" "$@"
run norm-each "" "vocab=128 norms=each" "$@"
if selected dflash "$@"; then block_case dflash "" ""; fi
if selected dflash-reduced "$@"; then block_case dflash-reduced "" "vocab=128 layers=0,3,5"; fi
if selected dflash-window "$@"; then block_case dflash-window "" "vocab=128 window=6"; fi
if selected dspark "$@"; then markov_case dspark "" ""; fi
if selected dspark-reduced "$@"; then markov_case dspark-reduced "" "vocab=128"; fi
if selected mtp "$@"; then head_case mtp ""; fi
if selected mtp-qwen3 "$@"; then head_case mtp-qwen3 "--qwen3"; fi
exit $failed
