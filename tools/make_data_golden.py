#!/usr/bin/env python3
"""Writes tests/golden/data.txt: elements of every data kind, which the C++ generator and its Python twin must both reproduce.

    python3 tools/make_data_golden.py

A line: kind, tensor, batch, position, head, channel, value. Sizes are in the first line.
"""
import pathlib
import runpy
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent
SEED = 2026
SIZES = dict(batch=2, length_q=150, length_k=300, heads_q=4, heads_kv=2, dim=5, value_dim=3)


def main():
    data = types.SimpleNamespace(**runpy.run_path(str(ROOT / "python" / "lla" / "_data.py")))
    lines = [f"seed {SEED} " + " ".join(f"{k} {v}" for k, v in SIZES.items())]
    for kind in data.KINDS + data.PEAKED_KINDS + data.DEGENERATE_KINDS:
        for name, tensor in zip("qkv", data.make(kind, SEED, **SIZES)):
            batch, length, heads, width = tensor.shape
            for b, i, h, c in [(0, 0, 0, 0), (0, 1, 0, 1), (0, length // 2, 1, width - 1), (1, length - 1, heads - 1, 1), (1, 140, 0, 2)]:
                lines.append(f"{kind} {name} {b} {i} {h} {c} {float(tensor[b, i, h, c])!r}")
    target = ROOT / "tests" / "golden" / "data.txt"
    target.write_text("\n".join(lines) + "\n")
    print(f"{target}: {len(lines) - 1} values")


if __name__ == "__main__":
    main()
