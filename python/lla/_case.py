"""Files of named arrays that `lla check --replay` and the tests read; src/data/case_file.hpp describes the format."""

import struct

import numpy as np

_MAGIC = b"LLACASE1"
_F32, _F64, _BF16, _F16 = 1, 2, 3, 4  # lla_dtype
_NUMPY = {np.dtype(np.float32): _F32, np.dtype(np.float64): _F64, np.dtype(np.float16): _F16}


def bf16_bits(values):
    """The upper halves of float32 numbers that bf16 holds exactly."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    if (bits & 0xFFFF).any():
        raise ValueError("values that bfloat16 does not hold")
    return (bits >> 16).astype("<u2")


def write(path, arrays):
    """arrays: name -> numpy array of float16, float32 or float64, or of uint16, the bits of bfloat16."""
    with open(path, "wb") as out:
        out.write(_MAGIC)
        for name, values in arrays.items():
            values = np.asarray(values)
            dtype = _BF16 if values.dtype == np.uint16 else _NUMPY[values.dtype]
            label = name.encode()
            out.write(struct.pack("<I", len(label)) + label)
            out.write(struct.pack(f"<II{values.ndim}q", dtype, values.ndim, *values.shape))
            out.write(values.astype(values.dtype.newbyteorder("<")).tobytes())
