#!/usr/bin/env bash
# On a machine with a GPU: everything docs/reproduce.md publishes from one, in a few minutes.
#   scripts/reproduce-gpu.sh [folder with lla] [folder for the results]
# Default: build/release/bin (or this script's own folder, where pack-gpu.sh put both) and out/gpu. Two archives come out of it,
# regression.tar.gz and studies.tar.gz; unpacked side by side they are a folder for `lla report`. The paper's run is
# interrupted after LIMIT seconds (default 270) and then holds what is done; started again it goes on from there.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$here}
[ -x "$folder/lla" ] || folder=$here/../build/release/bin
out=${2:-out/gpu}
lla=$(realpath "$folder/lla") || exit 2
export LD_LIBRARY_PATH=$(dirname "$lla")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
mkdir -p "$out" && cd "$out" || exit 2
failed=0

run() {  # name of the log, then the arguments of `lla reproduce`
  local name=$1 start=$SECONDS code=0
  shift
  timeout --signal=INT "${LIMIT:-270}" "$lla" reproduce "$@" > "$name.log" 2>&1 || code=$?
  [ $code = 0 ] || failed=1
  echo "$name: exit code $code after $((SECONDS - start)) s"
  [ $code = 0 ] || tail -3 "$name.log"
}

"$lla" info > info.log 2>&1
# The GPU against the CPU on the same sequences: the means must agree to about four digits.
sample=(regression --d 8 --d 64 --segment 64 --segment 1024 --sequences 32)
run check-cpu "${sample[@]}" --out check-cpu
run check-cuda "${sample[@]}" --device cuda --out check-cuda
LIMIT=${LIMIT:-270} run regression regression --paper --device cuda --out regression
run memory memory --paper --device cuda --seconds 0.15 --out memory
run regression-ridges regression --study ridges --sequences "${SEQUENCES:-1000}" --device cuda --out regression-ridges
run regression-queries regression --study queries --sequences "${SEQUENCES:-1000}" --device cuda --out regression-queries
run regression-kernels regression --study kernels --sequences "${SEQUENCES:-1000}" --device cuda --out regression-kernels
# Accuracy by data kind, for docs/benchmarks/peers.md (n = 2048, bf16).
mkdir -p accuracy
for kind in randn aniso self cluster; do
  for ridge in 10 1 0.1 0.01; do
    "$lla" bench forward --device cuda --dim 64 --dim 128 --length 2048 --heads 8 --kind $kind --ridge $ridge --seconds 0.01 \
      --json "accuracy/$kind-$ridge.json" >> accuracy.log 2>&1 || failed=1
  done
done

rm -f ./*/curves.csv  # results.json holds the same numbers
tar czf regression.tar.gz regression regression.log info.log
tar czf studies.tar.gz accuracy memory regression-ridges regression-queries regression-kernels check-cpu check-cuda ./*.log
ls -l regression.tar.gz studies.tar.gz
exit $failed
