#!/usr/bin/env bash
# Runs the Python tests against a built operator library.
#
#   scripts/test-python.sh LIBRARY [pytest arguments; files are relative to tests/python]
#
#   LIBRARY   liblla_torch.so of a build with LLA_BUILD_TORCH, or "installed" for the installed package
set -euo pipefail
library=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
if [ "$library" != installed ]; then
  LLA_TORCH_LIBRARY=$(realpath "$library")
  export LLA_TORCH_LIBRARY
  export PYTHONPATH=$root/python${PYTHONPATH:+:$PYTHONPATH}
  # Compiled graphs name the arguments of our operators: a cache that several builds share would hold another's.
  export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$(dirname "$LLA_TORCH_LIBRARY")/inductor-cache}
fi
# Some virtual machines show AMX but do not let it run; torch's own bf16 products then end the process.
export ONEDNN_MAX_CPU_ISA=${ONEDNN_MAX_CPU_ISA:-AVX512_CORE}
# ctest runs several files at once: one torch thread each, unless the caller says otherwise.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-python3}
[ -x "$root/.venv/bin/python" ] && python=$root/.venv/bin/python
cd "$root/tests/python"
exec "$python" -m pytest -q -p no:cacheprovider "$@"
