#!/usr/bin/env bash
# Every GPU test, on a machine with one CUDA device or more; with two, those that need them, too. The first part has 4
# minutes, then the others as many and a half, beside one another:
#
#   bash tests/functional/run_gpu.sh [FOLDER]     # for the output; logs/gpu_tests if not given
#
# FOLDER gets logs.tar.xz with NAME.log of each part and the logs of all engines and trainer ranks.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${1:-logs/gpu_tests}
mkdir -p "$out"
work=$(mktemp -d "${TMPDIR:-/tmp}/gpu_tests.XXXXXX")
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE
# One machine: nobody has to look for a network.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
export NCCL_IB_DISABLE=${NCCL_IB_DISABLE:-1}
start=$SECONDS
names=() pids=() failed=0

say() { printf '[%3d s] %s\n' $((SECONDS - start)) "$*"; }

part() { # NAME SECONDS TEST...
  local name=$1 limit=$2
  shift 2
  say "$name begins, at most $limit s"
  timeout --kill-after=15 "$limit" python3 -m pytest -q -m gpu --timeout=$((limit - 30)) -p no:cacheprovider \
    --basetemp="$work/$name" "$@" > "$work/$name.log" 2>&1 &
  names+=("$name") pids+=($!)
}

await() {
  local i status
  for i in "${!pids[@]}"; do
    while kill -0 "${pids[i]}" 2> /dev/null; do
      sleep 5
      [ $(((SECONDS - start) % 20)) -lt 5 ] && progress
    done
    wait "${pids[i]}" && status=0 || status=$?
    say "${names[i]}: exit status $status; $(tail -n 1 "$work/${names[i]}.log")"
    [ $status = 0 ] || { failed=1; tail -n 60 "$work/${names[i]}.log"; }
  done
  names=() pids=()
}

progress() { # the last line of the log that was written last
  local last
  last=$(find "$work" -name '*.log' -printf '%T@ %p\n' 2> /dev/null | sort -n | tail -n 1 | cut -d' ' -f2-)
  [ -z "$last" ] || say "${last#"$work"/}: $(tail -n 1 "$last" | cut -c1-160)"
}

finish() {
  (cd "$work" && find . \( -name '*.log' -o -name '*.jsonl' -o -name 'config.yaml' -o -name '*.png' \) -size -4M -print0 \
    | tar --null -T - -cJf - ) > "$out/logs.tar.xz"
  rm -rf "$work"
}
trap finish EXIT

tests=tests/functional/gpu
# The first one compiles kernels, and makes the model, which the others then find.
part run 240 $tests/test_gpu_run.py -k three_steps
await
part refit 220 $tests/test_gpu_refit.py
sleep 3
part offload 260 $tests/test_gpu_run.py $tests/test_gpu_offload.py -k host_memory
sleep 3
part experts 220 $tests/test_gpu_families.py -k experts
sleep 3
part vision 220 $tests/test_gpu_families.py -k vision
sleep 3
part wire_gloo 260 $tests/test_gpu_two.py -k one_gpu_gloo
sleep 3
part wire_nccl 260 $tests/test_gpu_two.py -k one_gpu_nccl
if [ "$(python3 -c 'import torch; print(torch.cuda.device_count())')" -ge 2 ]; then
  sleep 3
  part two 260 $tests/test_gpu_two.py $tests/test_gpu_group.py -k 'two_gpus or bound'
fi
await
say "$([ $failed = 0 ] && echo 'all passed' || echo 'some failed'); logs in $out"
exit $failed
