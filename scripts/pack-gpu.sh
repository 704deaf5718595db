#!/usr/bin/env bash
# Collects what a machine with a GPU but without this build needs into one folder: the GPU tests and the lla command,
# where they were built, their shared libraries, the golden data, and the Python package with the training soak.
#   scripts/pack-gpu.sh [build folder] [target folder] [second build folder]
# The second build (default: build-racecheck, if it is there) has -DLLA_RACECHECK=ON: its GPU tests are for racecheck.
# There: FOLDER/check-gpu.sh FOLDER, or LLA_TEST_DATA=FOLDER FOLDER/gpu_test   (LLA_TEST_REDUCED=1 for a short list)
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
target=${2:-$build/gpu-pack}
racecheck=${3:-build-racecheck}
mkdir -p "$target"
packed=0
pack() {  # binary, name there
  [ -x "$1" ] || return 0
  install -m 755 "$1" "$target/$2"
  strip "$target/$2"
  # The C and C++ runtimes are everywhere; the rest travels and is found through the binaries' $ORIGIN.
  ldd "$1" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' |
    grep -vE '/(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s)\.so' |
    while read -r library; do install -m 644 "$library" "$target/"; done
  packed=$((packed + 1))
}
pack "$build/bin/gpu_test" gpu_test
pack "$build/bin/lla" lla
[ "$packed" -gt 0 ] || { echo "nothing to pack: build gpu_test or lla in $build first" >&2; exit 1; }
pack "$racecheck/bin/gpu_test" gpu_test_racecheck
install -m 644 tests/golden/golden.bin tests/golden/cases.bin "$target/"
install -m 755 scripts/check-gpu.sh scripts/reproduce-gpu.sh "$target/"
if [ -f "$build/bindings/torch/liblla_torch.so" ]; then  # for the training soak: the package and its operators
  library=$(ldd "$build/bindings/torch/liblla_torch.so" | awk '$1 ~ /^liblla\.so/ { print $3 }')
  install -m 644 "$build/bindings/torch/liblla_torch.so" "$library" "$target/"
  strip "$target/liblla_torch.so" "$target/$(basename "$library")"
  install -d "$target/python/lla"
  install -m 644 python/lla/*.py "$target/python/lla/"
  install -m 755 scripts/train_soak.py "$target/"
  if [ -x "$build/bin/lla_train" ]; then  # it reads the soak's text; torch's libraries are those of the machine there
    install -m 755 "$build/bin/lla_train" "$target/"
    strip "$target/lla_train"
    ldd "$build/bin/lla_train" | awk '$1 ~ /^lib(fmt|hwy)\.so/ { print $3 }' |
      while read -r library; do install -m 644 "$library" "$target/"; done
  fi
fi
echo "$target: $(ls "$target" | tr '\n' ' ')"
