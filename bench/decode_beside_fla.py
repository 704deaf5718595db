#!/usr/bin/env python3
"""Decode with x given beside fla's parallax_decode_one_step (its r is -x) in the same run: a table of
docs/benchmarks/h200-decode.md. Needs the package flash-linear-attention.

    python bench/decode_beside_fla.py [--dim 64 128]

Inputs and times as in decode_beside_softmax.py; "difference" is that of both outputs, over their size."""
import argparse

import torch
from fla.ops.parallax.decode import parallax_decode_one_step

import lla
from decode_beside_softmax import Inputs, microseconds, row

SHAPES = [(32, 1024), (32, 4096), (32, 16384), (1, 65536), (256, 1024)]


def compare(dim, batch, length):
    inputs = Inputs(dim, batch, length)
    r = [-x for x in inputs.x]

    def theirs(i):
        q, k, v = inputs.arguments(i)
        return parallax_decode_one_step(q, r[i % inputs.count], k, v)

    ours = inputs.output_given_x(0).float()
    difference = (ours - theirs(0).float()).norm() / ours.norm()
    time, its = inputs.given_x(), microseconds(theirs)
    row(f"{dim}, {batch}, {length}", time, its, f"{its / time:.2f}", f"{difference.item():.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, nargs="+", default=[64, 128])
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, lla {lla.version()}\n")
    row("D, B, n", "x given, µs", "fla, µs", "fla / ours", "difference")
    row(*["---"] * 5)
    for dim in options.dim:
        for batch, length in SHAPES:
            compare(dim, batch, length)


if __name__ == "__main__":
    main()
