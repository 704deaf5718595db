#!/usr/bin/env bash
# Everything `make test` checks, stage by stage, stopping at the first failure. Called by the Makefile.
#
#   scripts/test.sh [format] [release] [asan] [tsan] [emulated]     default: all five
#
#   format       every source is as `make format` leaves it: seconds, before anything is built
#   release      every test, with CUDA compiled where nvcc is present
#   asan, tsan   the CPU suite again under AddressSanitizer + UBSan and ThreadSanitizer: one SIMD target, reduced lists
#   emulated     the CUDA kernels' source on a GPU emulated on the CPU, under AddressSanitizer + UBSan
set -euo pipefail
cd "$(dirname "$0")/.."

jobs=${JOBS:-$(nproc)}
logs=build/test-logs
mkdir -p "$logs"
names=()
seconds=()

stage() {
  local name=$1 start=$SECONDS
  shift
  printf '\n=== %s\n' "$name"
  if ! "$@"; then
    printf '\n=== %s FAILED after %d s\n' "$name" $((SECONDS - start)) >&2
    exit 1
  fi
  names+=("$name")
  seconds+=($((SECONDS - start)))
}

configure_and_build() {
  local log=$logs/build-$1.txt
  cmake --preset "$1" && cmake --build --preset "$1" -j "$jobs" 2>&1 | tee "$log" || return 1
  # ptxas only remarks on it when it lets no tensor-core product overlap anything: right results, several times slower.
  if grep -q 'wgmma.*serialized' "$log"; then
    printf 'ptxas serialises the products of a kernel (C75.. above).\n' >&2
    return 1
  fi
}

run_tests() {  # preset, then a command prefix
  local preset=$1
  shift
  "$@" ctest --preset "$preset" -j "$jobs" 2>&1 | tee "$logs/$preset.txt"
}

# ThreadSanitizer needs the address layout it was built for; newer kernels randomise more bits than it expects.
fixed_layout=()
if setarch "$(uname -m)" -R true 2>/dev/null; then fixed_layout=(setarch "$(uname -m)" -R); fi

command -v nvcc >/dev/null || printf 'No nvcc on this machine: the CUDA kernels are not compiled, everything else is tested.\n'

wanted=("$@")
[ $# -gt 0 ] || wanted=(format release asan tsan emulated)
presets=()
for preset in "${wanted[@]}"; do
  if [ "$preset" = format ]; then
    stage format scripts/format.sh --dry-run --Werror
    continue
  fi
  presets+=("$preset")
  prefix=()
  [ "$preset" = tsan ] && prefix=("${fixed_layout[@]}")
  stage "build $preset" configure_and_build "$preset"
  stage "test $preset" run_tests "$preset" "${prefix[@]}"
done

printf '\n=== stages\n'
for i in "${!names[@]}"; do printf '%-16s %5d s\n' "${names[$i]}" "${seconds[$i]}"; done
printf '%-16s %5d s\n' total "$SECONDS"
# The first preset's closing lines come last: in `make test` that is the whole suite.
for ((i = ${#presets[@]} - 1; i >= 0; --i)); do
  printf '\n=== %s\n%s\n' "${presets[$i]}" "$(sed -n '/tests passed/,$p' "$logs/${presets[$i]}.txt")"
done
