#!/usr/bin/env bash
# clang-format over every C, C++ and CUDA source that git knows.
#
#   scripts/format.sh -i                     in place
#   scripts/format.sh --dry-run --Werror     fail and show what differs
set -euo pipefail
cd "$(dirname "$0")/.."
# The version of requirements-format.txt, which scripts/setup.sh puts there; else the system's.
clang_format=.venv/bin/clang-format
[ -x "$clang_format" ] || clang_format=clang-format
sources=$(git ls-files '*.[ch]' '*.[ch]pp' '*.cu' '*.cuh')
# shellcheck disable=SC2086  # words on purpose: no source has a space in its name
if ! "$clang_format" "$@" $sources; then
  printf 'Sources are not formatted: run `make format`.\n' >&2
  exit 1
fi
