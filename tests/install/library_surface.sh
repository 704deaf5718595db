#!/usr/bin/env bash
# What the shared library shows to the world: every function of lla.h and nothing else; no CUDA library needed to load it.
#   library_surface.sh LIBRARY HEADER
set -euo pipefail
library=$1 header=$2

declared=$(grep -oE '^LLA_API .*\b(lla_[a-z_0-9]+)\(' "$header" | sed -E 's/.*\b(lla_[a-z_0-9]+)\($/\1/' | sort)
exported=$(nm -D --defined-only "$library" | awk '{print $3}' | sed 's/@.*//' | sort)
if ! diff <(echo "$declared") <(echo "$exported"); then
  echo "exported symbols (>) differ from what $header declares (<)" >&2
  exit 1
fi

if readelf -d "$library" | grep -E 'NEEDED.*(libcuda|libcudart|libnv|torch)'; then
  echo "the library must load on a machine without a CUDA driver" >&2
  exit 1
fi
