#!/usr/bin/env bash
# On a machine with a GPU: all of gpu_test, its short list under compute-sanitizer, then the benchmark tables.
#   scripts/check-gpu.sh [folder with gpu_test and lla]      (default: build/release/bin; else what pack-gpu.sh made)
# With TRAIN=1 also the training soak (train_soak.py, which see; TRAIN_OPTIONS are its options, PYTHON a Python with
# torch). It goes on where it stopped: FOLDER/soak holds its checkpoints.
# Logs go to FOLDER/gpu-logs. SANITIZE=0 leaves compute-sanitizer out, BENCH=0 the tables, JOBS=N sets how many
# processes share the tests. Exit code: 0 when every test passed and every tool that ended found nothing,
# 2 when there was nothing to run.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$here/../build/release/bin}
cd "$folder" || exit 2
[ -x gpu_test ] || { echo "no gpu_test in $PWD" >&2; exit 2; }
[ -f golden.bin ] && export LLA_TEST_DATA=$PWD
export LD_LIBRARY_PATH=$PWD${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
logs=gpu-logs
jobs=${JOBS:-$(nproc)}
failed=0
rm -rf "$logs" && mkdir "$logs"

# One test takes all of the device's memory: it runs when the others have ended. The CPU's implementations are left out,
# as gpu_test does where it is given no filter.
alone='*ADeviceWithoutMemory*'
cpu='*/cpu:*/cpu_*:*/reference*'
shard() {
  GTEST_TOTAL_SHARDS=$jobs GTEST_SHARD_INDEX=$1 ./gpu_test --gtest_filter="-$alone:$cpu" > "$logs/test.$1.log" 2>&1
}
for ((i = 0; i < jobs; ++i)); do shard "$i" & done
for ((i = 0; i < jobs; ++i)); do wait -n || failed=1; done
./gpu_test --gtest_filter="$alone:-$cpu" > "$logs/test.alone.log" 2>&1 || failed=1
ran=$(grep -h '^\[==========\].*ran' "$logs"/test.*.log | awk '{ n += $2 } END { print n + 0 }')
echo "gpu_test: $ran tests run, $(grep -hE '^\[  SKIPPED \].*\)$' "$logs"/test.*.log | wc -l) skipped"
[ "$ran" -gt 0 ] || failed=1
if grep -qhm1 'no CUDA device' "$logs"/test.*.log; then
  echo "no CUDA device here: nothing was tested" >&2
  exit 2
fi
grep -hE '^\[  FAILED  \] [A-Z].*\)$' "$logs"/test.*.log | sort -u

sanitize() {  # tool, binary, tests
  timeout "${SECONDS_PER_TOOL:-300}" compute-sanitizer --tool "$1" "./$2" --gtest_filter="$3" > "$logs/$1.log" 2>&1
  local code=$? summary tests
  summary=$(grep -hE '(ERROR|RACECHECK) SUMMARY' "$logs/$1.log" | tail -1)
  tests=$(grep -c '^\[       OK \]' "$logs/$1.log")
  if [ $code = 124 ]; then
    echo "$1: not ended after ${SECONDS_PER_TOOL:-300} s, $(grep -c 'Error:' "$logs/$1.log") reports so far"
  else
    echo "$1: ${summary:-exit code $code}, $tests tests passed"
    [ $code = 0 ] && grep -qE ' 0 (errors|hazards)' <<< "$summary" || failed=1
  fi
}
if [ "${SANITIZE:-1}" != 0 ] && command -v compute-sanitizer > /dev/null; then
  for tool in memcheck synccheck initcheck; do sanitize $tool gpu_test 'Gpu/Sanitize*'; done
  # Of the Hopper kernels racecheck can follow only a build made for it (LLA_RACECHECK).
  if [ -x gpu_test_racecheck ]; then
    sanitize racecheck gpu_test_racecheck 'Gpu/Sanitize.*/sm90'
  else
    echo "racecheck: left out, no gpu_test_racecheck here (gpu_test of a build with -DLLA_RACECHECK=ON)"
  fi
fi

if [ "${BENCH:-1}" != 0 ] && [ -x lla ]; then
  for pass in forward backward; do
    ./lla bench $pass --device cuda --table --seconds 0.06 --json "$logs/$pass.json" | tee "$logs/$pass.md" || failed=1
  done
fi
if [ "${TRAIN:-0}" = 1 ]; then
  packages=$here/../python library=$PWD/../bindings/torch/liblla_torch.so  # of a checkout
  [ -f "$here/liblla_torch.so" ] && packages=$here/python library=$here/liblla_torch.so  # of what pack-gpu.sh made
  PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH} LLA_TORCH_LIBRARY=${LLA_TORCH_LIBRARY:-$library} \
    "${PYTHON:-python3}" "$here/train_soak.py" --out soak ${TRAIN_OPTIONS:-} 2>&1 | tee "$logs/train.log"
  code=${PIPESTATUS[0]}
  [ "$code" = 0 ] || [ "$code" = 3 ] || failed=1
fi
exit $failed
