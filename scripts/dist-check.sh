#!/usr/bin/env bash
# What somebody gets who installs the wheel: it is built without CUDA, may need nothing but torch, and takes a training
# step in an environment that has nothing else of this checkout. Called by `make dist-check`; before a release.
#
#   scripts/dist-check.sh                  with the torch of .venv (the oldest supported)
#   TORCH=2.15.0 scripts/dist-check.sh     with that one, from the package index (gigabytes)
#   scripts/dist-check.sh -DNAME=VALUE     ... further CMake options of the build
set -euo pipefail
cd "$(dirname "$0")/.."

python=$PWD/.venv/bin/python
dist=$PWD/build/dist
fail() { printf 'dist-check: %s\n' "$*" >&2; exit 1; }

options=(-Ccmake.define.LLA_CUDA=OFF)
for option in "$@"; do options+=("-Ccmake.define.${option#-D}"); done
rm -rf "$dist"
mkdir -p "$dist/files"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps \
  -Cbuild-dir="$dist/build" -w "$dist/wheel" "${options[@]}" .
wheel=$(echo "$dist"/wheel/*.whl)
printf 'built %s\n' "${wheel#"$PWD"/}"

# --- Every library it asks for is in it, torch's, or the C++ runtime that torch asks for as well -----------------------
"$python" -m zipfile -e "$wheel" "$dist/files"
libraries=$(find "$dist/files" -name '*.so*')
[ -n "$libraries" ] || fail "there is no library in the wheel"
for library in $libraries; do
  for needed in $(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'); do
    case $needed in
      libc.so.* | libm.so.* | libstdc++.so.* | libgcc_s.so.* | libpthread.so.* | libdl.so.* | librt.so.* | ld-linux*) ;;
      libtorch*.so | libc10*.so) ;;
      *) [ -e "$(dirname "$library")/$needed" ] || fail "$(basename "$library") needs $needed, which the wheel does not have" ;;
    esac
  done
done

# --- Used from a clean environment --------------------------------------------------------------------------------------
"$python" -m venv "$dist/venv"
clean=$dist/venv/bin/python
if [ -n "${TORCH:-}" ]; then
  "$clean" -m pip install --quiet --disable-pip-version-check numpy "torch==$TORCH"
else
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$("$clean" -c '
import sysconfig; print(sysconfig.get_path("purelib"))')/torch_of_checkout.pth"
fi
"$clean" -m pip install --quiet --disable-pip-version-check --no-deps "$wheel"
cd "$dist/venv"
env -u LD_LIBRARY_PATH -u PYTHONPATH -u LLA_TORCH_LIBRARY "$clean" -I - <<'PYTHON'
import pathlib, sys
import torch, lla

package = pathlib.Path(lla.__file__).parent
assert package.is_relative_to(sys.prefix), f"lla was imported from {package}"
torch.manual_seed(0)
layer = lla.LocalLinearAttention(32, num_heads=2)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
x, target = torch.randn(2, 24, 32), torch.randn(2, 24, 32)
losses = []
for _ in range(2):
    loss = (layer(x) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    optimizer.step()
    losses.append(loss.item())
assert losses[1] < losses[0], losses
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "liblla" in line or "libhwy" in line}
assert loaded and all(pathlib.Path(path).is_relative_to(package.resolve()) for path in loaded), loaded
print(f"lla {lla.version()} with torch {torch.__version__}: loss {losses[0]:.4f}, {losses[1]:.4f} after a step; "
      f"libraries: {', '.join(sorted(pathlib.Path(path).name for path in loaded))}")
PYTHON
