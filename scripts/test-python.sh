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
fi
# ctest runs several files at once: one torch thread each, unless the caller says otherwise.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-python3}
[ -x "$root/.venv/bin/python" ] && python=$root/.venv/bin/python
cd "$root/tests/python"
exec "$python" -m pytest -q -p no:cacheprovider "$@"
