#!/usr/bin/env python3
"""Rewrites tests/golden/golden.npz as golden.bin, which the C++ tests read without a zip library.

    python3 tools/convert_golden.py [golden.npz [golden.bin]]

golden.bin: the 8 bytes "LLAGOLD1", then one record per array until the end of the file, little-endian:
uint32 length of the name, the name (CASE/ARRAY), uint32 number of dimensions, int64 each size, float64 each element.
"""
import pathlib
import struct
import sys

import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden"


def main():
    source = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER / "golden.npz"
    target = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else source.with_suffix(".bin")
    arrays = np.load(source)
    with open(target, "wb") as out:
        out.write(b"LLAGOLD1")
        for name in arrays.files:
            values = np.asarray(arrays[name], dtype="<f8")
            label = name.encode()
            out.write(struct.pack("<I", len(label)) + label)
            out.write(struct.pack(f"<I{values.ndim}q", values.ndim, *values.shape))
            out.write(np.ascontiguousarray(values).tobytes())
    print(f"{target}: {len(arrays.files)} arrays, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
