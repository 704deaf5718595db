#!/usr/bin/env bash
# Exit codes and sentences of the lla command.   usage.sh LLA
set -uo pipefail
lla=$1
cases=$(dirname "$0")/../golden/cases.bin
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0

# expect CODE PATTERN arguments...   The command returns CODE and prints PATTERN (extended regex), on either stream.
expect() {
  local code=$1 pattern=$2 output status
  shift 2
  output=$("$lla" "$@" 2>&1 </dev/null)
  status=$?
  if [ $status -ne "$code" ] || ! grep -qE -- "$pattern" <<<"$output"; then
    printf 'lla %s: returned %d, expected %d and /%s/; it printed:\n%s\n\n' "$*" $status "$code" "$pattern" "$output"
    failures=$((failures + 1))
  fi
}

expect 0 '^lla [0-9]+\.[0-9]+\.[0-9]+$' --version
expect 0 'Usage: lla' --help
expect 2 'Subcommands:'                                          # nothing asked for: the help
expect 2 'not expected: sing' sing
expect 0 'reference' info
expect 0 '"implementations"' info --json
expect 2 'not expected: --jason' info --jason

expect 0 'gates' check --help
expect 2 'this build has no "gpu"; it has .*reference' check --quick --implementation gpu
expect 2 'reference is what the others are compared with' check --quick --implementation reference
expect 2 'tpu.* not in' check --quick --device tpu

expect 0 'repeated_tokens: bf16.*' check --replay "$cases"
expect 0 'cpu +ok ' check --replay "$cases" --implementation cpu
expect 1 'not a file of saved inputs' check --replay "$0"
expect 1 'no-such-file: cannot be read' check --replay no-such-file
expect 2 'excludes' check --quick --replay "$cases"

expect 2 'table is for --device cuda' bench forward --table
expect 2 'has its own shapes and weights, --dim' bench backward --table --dim 64
expect 0 'GFLOP/s' bench forward --length 64 --dim 8 --seconds 0.01
expect 0 'their own, from 0.038' bench forward --data "$cases" --seconds 0.01
expect 0 ' 64 +384 ' bench backward --data "$cases" --dtype bf16 --seconds 0.01
expect 2 'its own shapes and ridges, --dim' bench forward --data "$cases" --dim 64
expect 1 'no head in' bench forward --data "$(dirname "$0")"
expect 0 'GB/s' bench decode --length 64 --dim 8 --batch 2 --heads 2 --seconds 0.01
expect 0 ' 3 +4 +2 +5 +64 +7 ' bench decode --length 64 --dim 8 --batch 3 --heads 4 --group 2 --queries 5 --page-size 7 --dtype bf16 --seconds 0.01
expect 0 'reference' bench decode --length 64 --dim 8 --given-x --head-major --batch-invariant --implementation reference --seconds 0.01
expect 1 'shorter than the 5 queries' bench decode --length 4 --dim 8 --queries 5
expect 2 'not expected: .*--kind' bench decode --kind randn

# Machine-readable output is valid and complete.
python3 - "$lla" <<'PYTHON' || failures=$((failures + 1))
import json, subprocess, sys
info = json.loads(subprocess.run([sys.argv[1], "info", "--json"], check=True, capture_output=True).stdout)
assert [i["name"] for i in info["implementations"]][-1] == "reference", info
PYTHON

exit $((failures > 0))
