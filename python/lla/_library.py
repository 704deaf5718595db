"""Finds and loads the operator library (liblla_torch), which needs liblla beside it."""
import os
from pathlib import Path

import torch

_NAME = "liblla_torch.so"
MINIMUM_TORCH = (2, 11)


def _candidates():
    """The library named by LLA_TORCH_LIBRARY, or else the one installed with this package."""
    named = os.environ.get("LLA_TORCH_LIBRARY")
    if named:
        return [Path(named)]
    return [Path(__file__).parent / "lib" / _NAME]


def load():
    """Registers torch.ops.lla; raises ImportError with the remedy when that is not possible."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MINIMUM_TORCH:
        raise ImportError(f"lla needs torch >= 2.11 (its stable ABI); this is torch {torch.__version__}")
    tried = _candidates()
    for path in tried:
        if path.exists():
            try:
                torch.ops.load_library(str(path.resolve()))
            except OSError as error:
                raise ImportError(f"lla: cannot load {path}: {error}") from error
            return path
    raise ImportError(
        f"lla: {_NAME} was not found at {', '.join(map(str, tried))}. Install the package (pip install .), or build it "
        "with cmake -DLLA_BUILD_TORCH=ON and set LLA_TORCH_LIBRARY to the library's path."
    )
