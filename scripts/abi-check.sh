#!/usr/bin/env bash
# Compares the interface of liblla as this tree builds it with that of the last release, tests/abi/lla.abi: functions,
# their arguments, and the structs of include/lla/lla.h down to offsets. Called by `make abi-check`; before a release.
#
#   scripts/abi-check.sh            fails with abidiff's report where a caller of the last release could notice
#   scripts/abi-check.sh --update   makes this tree's interface the one to compare with: at a release, or where a
#                                   struct has grown at its end (older callers' are shorter, and stay valid)
#
# New functions are no difference: no caller of the last release knows them.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/abi known=tests/abi/lla.abi
# Debug information is what libabigail reads; the code need not be fast.
cmake -G Ninja -B $build --log-level=WARNING -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS='-O0 -g' -DLLA_CUDA=OFF \
  -DLLA_SIMD_TARGETS=NATIVE -DLLA_BUILD_TESTS=OFF -DLLA_BUILD_APPS=OFF
cmake --build $build -j "${JOBS:-$(nproc)}" -t lla >/dev/null
abidw --exported-interfaces-only --no-elf-needed --no-show-locs --no-corpus-path --no-comp-dir-path \
  --type-id-style hash --out-file $build/lla.abi "$(find $build/src -maxdepth 1 -name 'liblla.so.*' -type f)"

if [ "${1:-}" = --update ]; then
  cp $build/lla.abi $known
  echo "abi-check: $known is this tree's interface now"
elif abidiff --no-added-syms $known $build/lla.abi; then
  echo "abi-check: nothing a caller of the last release could notice"
else
  echo "abi-check: the interface differs from the last release's (above). If that is meant, say so in CHANGELOG.md and" \
    "run scripts/abi-check.sh --update" >&2
  exit 1
fi
