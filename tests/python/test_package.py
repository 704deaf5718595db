"""What is shipped: an operator library without Python, an installable package, a C++ header that compiles."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

import lla
from lla import _library, _ops

pytestmark = pytest.mark.cpu_only


def run(command, **options):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def launcher():
    return ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []


def test_library_needs_no_python_and_no_torch_cpp_abi():
    undefined = run(["nm", "-DC", "--undefined-only", _ops.LIBRARY_PATH])
    symbols = [line.split(maxsplit=1)[-1] for line in undefined.splitlines()]
    assert not [s for s in symbols if s.startswith(("Py", "_Py"))]
    assert not [s for s in symbols if s.startswith(("c10::", "at::", "torch::"))], "only the C shim is stable"
    needed = run(["readelf", "-d", _ops.LIBRARY_PATH])
    assert "libpython" not in needed and "libtorch_python" not in needed


def test_old_torch_is_refused(monkeypatch):
    monkeypatch.setattr(_library.torch, "__version__", "2.10.1+cu130")
    with pytest.raises(ImportError, match="torch >= 2.11"):
        _library.load()


def test_missing_library_says_what_to_do(tmp_path):
    environment = {**os.environ, "LLA_TORCH_LIBRARY": str(tmp_path / "none.so"),
                   "PYTHONPATH": str(Path(lla.__file__).parents[1])}
    script = "import lla\ntry:\n  lla.lla_attention\nexcept ImportError as e:\n  print(e)\nimport lla.reference"
    assert "pip install" in run([sys.executable, "-c", script], env=environment)


def test_cpp_example(tmp_path):
    """The autograd header compiled against this torch, and a small training run with it."""
    run(["cmake", "-S", REPOSITORY / "examples/cpp_torch", "-B", tmp_path, "-G", "Ninja", *launcher(),
         f"-DPython_EXECUTABLE={sys.executable}", f"-Dlla_torch_library={_ops.LIBRARY_PATH.resolve()}"])
    run(["cmake", "--build", tmp_path])
    assert "by backward" in run([tmp_path / "lla_cpp_torch"])


def test_pip_install(tmp_path):
    """pip install of this checkout, without nvcc, used from the place pip put it."""
    pytest.importorskip("scikit_build_core")
    define = [f"-Ccmake.define.{d[2:]}" for d in ("-DLLA_CUDA=OFF", "-DLLA_SIMD_TARGETS=NATIVE", *launcher())]
    run([sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--target", tmp_path / "site",
         *define, f"-Cbuild-dir={tmp_path / 'build'}", REPOSITORY])
    environment = {name: value for name, value in os.environ.items() if name not in ("LLA_TORCH_LIBRARY", "PYTHONPATH")}
    script = ("import torch, lla; q = torch.randn(1, 5, 2, 8, requires_grad=True); o = lla.lla_attention(q, q, q, 0.1);"
              "o.sum().backward(); print(lla.__file__, lla.version(), float(q.grad.isfinite().all()))")
    environment["PYTHONPATH"] = str(tmp_path / "site")
    output = run([sys.executable, "-c", script], env=environment, cwd=tmp_path)
    assert str(tmp_path) in output and lla.version() in output and output.split()[-1] == "1.0"
