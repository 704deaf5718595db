#!/usr/bin/env bash
# The CPU backend's NEON code, compiled for 64-bit ARM by a cross compiler and tested under qemu: right results, not speed.
# Called by `make neon`. The arm64 libraries come from Debian's (or Ubuntu's) own packages, unpacked below build/neon:
# nothing of another architecture is installed into the system.
#
#   scripts/neon.sh [TEST ...]     default: cpu_test convert_test
set -euo pipefail
cd "$(dirname "$0")/.."

tests=("$@")
[ $# -gt 0 ] || tests=(cpu_test convert_test)
build=$PWD/build/neon
export SYSROOT=$build/sysroot

if [ ! -e "$SYSROOT/complete" ]; then
  apt=$build/apt
  rm -rf "$SYSROOT" "$apt"
  mkdir -p "$SYSROOT" "$apt/state/lists/partial" "$apt/cache/archives/partial" "$apt/packages"
  touch "$apt/status"
  options=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User= -o Dir::State="$apt/state"
    -o Dir::State::status="$apt/status" -o Dir::Cache="$apt/cache")
  apt-get "${options[@]}" update
  packages=(libhwy-dev libfmt-dev libgtest-dev libgmock-dev nlohmann-json3-dev)
  # And the shared libraries behind the first two, whose packages carry a version in their names.
  shared=$(apt-cache "${options[@]}" depends libhwy-dev libfmt-dev | sed -n 's/^ *Depends: \(lib\(hwy\|fmt\)[0-9].*\)$/\1/p')
  # shellcheck disable=SC2086  # words on purpose
  (cd "$apt/packages" && apt-get "${options[@]}" download "${packages[@]}" $shared)
  for package in "$apt"/packages/*.deb; do dpkg -x "$package" "$SYSROOT"; done
  touch "$SYSROOT/complete"
fi

cmake --preset neon
cmake --build --preset neon -j "${JOBS:-$(nproc)}" -t "${tests[@]}"
expression=$(IFS='|'; echo "${tests[*]}")
ctest --preset neon -R "^($expression)\$"
