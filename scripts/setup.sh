#!/usr/bin/env bash
# Installs what a make target needs and nothing else; does nothing, quickly, when nothing is missing.
#
#   scripts/setup.sh run    build the CPU part, draw figures
#   scripts/setup.sh test   ... and run every test (GoogleTest, Boost.Context, PyTorch; CUTLASS headers where nvcc is present)
#   scripts/setup.sh bench | tidy | format | neon | abi | browser   ... and what that target needs beside `run`
#
# Libraries and tools come from the system's packages (Debian 12, Ubuntu 24.04). Where this user may not install them,
# the one command to run is printed and the script fails. Python packages go into .venv, never into the system.
# PYTHON, CC and CXX are honoured.
set -euo pipefail
cd "$(dirname "$0")/.."

purpose=${1:-run}
python=${PYTHON:-python3}
cxx=${CXX:-c++}
venv=$PWD/.venv
export PATH="$PATH:$venv/bin:/usr/local/cuda/bin"

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

case $purpose in
  run | test | bench | tidy | format | neon | abi | browser) ;;
  *) fail "unknown purpose '$purpose'; one of: run test bench tidy format neon abi browser" ;;
esac

# --- Already done? -------------------------------------------------------------------------------------------------
# The key holds everything the answer depends on: this script, the requirement lists, the tools it would use.
key=$(cat "$0" scripts/requirements-*.txt <(command -v "$python" "$cxx" cmake ninja nvcc || true) | sha256sum | cut -c1-16)
stamp=$venv/.setup-$purpose-$key
[ -e "$stamp" ] && exit 0

# --- What cannot be installed from here ----------------------------------------------------------------------------
have "$cxx" || fail "no C++ compiler: '$cxx' was not found. Install one (Debian: apt-get install g++), or set CXX."
have "$python" || fail "no Python: '$python' was not found. Install Python 3.11 or newer, or set PYTHON."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" --version) is too old: Python 3.11 or newer is needed. Set PYTHON to a newer one."

# --- System packages: look for the thing itself, name the package that brings it ------------------------------------
missing=()
need_command() { have "$1" || missing+=("$2"); }
need_header() { echo "#include <$1>" | "$cxx" -std=c++20 -E -x c++ - >/dev/null 2>&1 || missing+=("$2"); }

cmake_is_new() { have cmake && cmake --version | "$python" -c '
import re, sys
sys.exit(tuple(map(int, re.search(r"(\d+)\.(\d+)", sys.stdin.read()).groups())) < (3, 25))'; }

need_command pkg-config pkg-config
need_header hwy/highway.h libhwy-dev
need_header CLI/CLI.hpp libcli11-dev
need_header fmt/core.h libfmt-dev
need_header nlohmann/json.hpp nlohmann-json3-dev
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
if [ "$purpose" = test ] || [ "$purpose" = tidy ]; then
  need_header gtest/gtest.h libgtest-dev
fi
[ "$purpose" = test ] && need_header boost/context/fiber.hpp libboost-context-dev
if [ "$purpose" = test ] || [ "$purpose" = bench ]; then
  have pkg-config && pkg-config --exists openblas || missing+=(libopenblas-dev)
fi
[ "$purpose" = tidy ] && need_command clang-tidy clang-tidy
[ "$purpose" = abi ] && need_command abidiff abigail-tools
if [ "$purpose" = neon ]; then
  need_command aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
  need_command qemu-aarch64 qemu-user
fi
if [ "$purpose" = browser ] && ! have chromium && ! have google-chrome; then missing+=(chromium); fi

# CMake and Ninja come with the other packages, or else from PyPI.
tools=()
cmake_is_new || tools+=(cmake)
have ninja || tools+=(ninja-build)

as_root=
if [ "$(id -u)" = 0 ]; then
  as_root=env
elif have sudo && sudo -n true 2>/dev/null; then
  as_root='sudo -n env'
fi

if [ ${#missing[@]} -gt 0 ] || { [ ${#tools[@]} -gt 0 ] && [ -n "$as_root" ] && have apt-get; }; then
  command_line="apt-get install -y --no-install-recommends ${missing[*]} ${tools[*]}"
  have apt-get || fail "missing: ${missing[*]} (Debian's names). This system has no apt-get; install their counterparts."
  [ -n "$as_root" ] || fail "run this once, then try again:
    sudo $command_line"
  say "installing ${missing[*]} ${tools[*]}"
  $as_root DEBIAN_FRONTEND=noninteractive apt-get update -qq
  # shellcheck disable=SC2086  # words on purpose
  $as_root DEBIAN_FRONTEND=noninteractive $command_line -qq >/dev/null
fi

# --- Python packages: .venv -----------------------------------------------------------------------------------------
[ -x "$venv/bin/python" ] && "$venv/bin/python" -c 'import pip' 2>/dev/null || "$python" -m venv --clear "$venv"
install() { say "installing into .venv: $*"; "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

cmake_is_new || install 'cmake>=3.25'
have ninja || install ninja
install -r scripts/requirements-run.txt
if [ "$purpose" = test ] || [ "$purpose" = format ]; then install -r scripts/requirements-format.txt; fi
if [ "$purpose" = test ]; then
  install -r scripts/requirements-test.txt
  # Headers only: its own dependencies are a Python toolchain the build does not use.
  if have nvcc; then install --no-deps -r scripts/requirements-cuda.txt; fi
fi

rm -f "$venv/.setup-$purpose-"*
touch "$stamp"
say "ready for 'make $purpose'"
