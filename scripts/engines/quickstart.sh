#!/bin/sh
# The drafter of a finished quick start inside vLLM: captured states, and the logits of four chained depths.
# Usage: PYTHON=V/bin/python quickstart.sh RUN_FOLDER WORK_FOLDER      (RUN_FOLDER is runs/quickstart)
# Prints one line of JSON a layout and fails if one fails. The states come from the embedded target.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
examples=${EXAMPLES:-$root/target/release/examples}
python=${PYTHON:-python3}
drafter=$(cd "$1/eagle3" && pwd)
work=$(mkdir -p "$2" && cd "$2" && pwd)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

target=$root/assets/tiny-target
prompt=1,342,203,49,599,381,225,23,1333,392,225,21,24,285,1174,318,87,18,225,2,203,1,346,203
failed=0
for layout in native speculators; do
    "$examples/chain_logits" "$target" "$drafter/export/$layout" $prompt 4 "$work/chain-$layout.safetensors"
    "$python" "$here/vllm_drafter.py" "$target" "$drafter/export/$layout" "$work/chain-$layout.safetensors" \
        2>"$work/$layout.log" || { failed=1; tail -20 "$work/$layout.log" >&2; }
done
exit $failed
