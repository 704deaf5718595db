#!/usr/bin/env python3
"""Writes tests/golden/cases.bin: heads of a language model in training, exact in bfloat16.

    python3 tools/make_cases.py repeated_tokens.npz language_model_layers.npz

repeated_tokens: the head whose backward pass was NaN, whole (96 rows; a row sees five equal tokens). layer*_head*: heads of the
trained model, their first ROWS rows. Names in the file: CASE/ARRAY with q, k, v, grad_o in bf16 and ridge (by token) in f32.
"""
import pathlib
import runpy
import sys
import types

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = 384
HEADS = ["layer0_head0", "layer2_head0", "layer4_head3", "layer5_head3"]


def main():
    writer = types.SimpleNamespace(**runpy.run_path(str(ROOT / "python" / "lla" / "_case.py")))
    repeated, layers = (np.load(path) for path in sys.argv[1:3])
    heads = {"repeated_tokens": {name: repeated[name] for name in ("q", "k", "v", "grad_o", "ridge")}}
    for head in HEADS:
        heads[head] = {"grad_o" if name == "g" else name: layers[f"{head}_{name}"][:ROWS] for name in ("q", "k", "v", "g", "ridge")}
    arrays = {}
    for head, tensors in heads.items():
        for name, values in tensors.items():
            values = values.astype(np.float32)
            arrays[f"{head}/{name}"] = values if name == "ridge" else writer.bf16_bits(values)
    target = ROOT / "tests" / "golden" / "cases.bin"
    writer.write(target, arrays)
    print(f"{target}: {len(heads)} heads, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
