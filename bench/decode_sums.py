#!/usr/bin/env python3
"""What the tensor cores' sums cost Hopper's decode in accuracy, emulated without a GPU.

    python bench/decode_sums.py [--dim 64 128] [--keys 8192] [--kind qk_norm queries6] [--ridge 0.1 0.01] [--sums 1024 2048]

One part of a row, as src/cuda/sm90/decode makes it: r, K'' and V'' in fp16, the heaviest key apart, a reference key from
the first 128. Of every sixteen keys the products and the sum so far are aligned to the largest of them and cut to 25
fraction bits, their sum to fp32 (which is what was found on an H200); after --sums keys it is added to another in fp32 and
begins anew, 0 never. Prints the worst error of a few rows against fp64, a column for each --sums. Kinds are those of the
library's data and `distinct40`, forty different keys."""
import argparse
import pathlib
import runpy

import numpy as np

STEP, FIRST, ALIGNED_BITS = 16, 128, 25
ROOT = pathlib.Path(__file__).resolve().parent.parent
make_data = runpy.run_path(str(ROOT / "python" / "lla" / "_data.py"))["make"]  # without the package, which wants its library


def half(x):
    return np.asarray(x, np.float16).astype(np.float64)


def bfloat(x):
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000).astype(np.uint32).view(np.float32).astype(np.float64)


def power_of_two(largest):
    """A scale that brings it to [2^-4, 2^-3)."""
    return 2.0 ** -(np.floor(np.log2(largest)) + 4)


def add_step(sums, products):
    """sums + Σ products over the first axis, as the tensor cores add them."""
    _, exponent = np.frexp(np.maximum(np.abs(sums), np.abs(products).max(0)))
    unit = np.ldexp(1.0, exponent - ALIGNED_BITS)
    total = (np.trunc(sums / unit) + np.trunc(products / unit).sum(0)) * unit
    mantissa, exponent = np.frexp(total)
    return np.ldexp(np.trunc(np.ldexp(mantissa, 24)), exponent - 24)


def row(kind, seed, keys, dim):
    q, k, v = (t[0, :, 0] for t in make_data("randn" if kind == "distinct40" else kind, seed, 1, 1, keys, 1, 1, dim, dim))
    if kind == "distinct40":
        k = k[np.random.default_rng(seed).integers(min(40, keys), size=keys)]
    return bfloat(q[0]), bfloat(k), bfloat(v)


def exact(q, k, v, ridges):
    logits = k @ q / np.sqrt(len(q))
    p = np.exp(logits - logits.max())
    p /= p.sum()
    k_mean, v_mean = p @ k, p @ v
    centred = k - k_mean
    a, c = centred.T @ (p[:, None] * centred), (v - v_mean).T @ (p[:, None] * centred)
    return [v_mean + c @ np.linalg.solve(a + ridge * np.eye(len(q)), q - k_mean) for ridge in ridges]


def emulated(q, k, v, ridges, lengths):
    """For each length of a sum, the output for each ridge."""
    dim = len(q)
    logits = k @ q * (0.5 / np.sqrt(dim) * np.log2(np.e))
    root, top = half(np.exp2(logits - np.ceil(logits.max()) + 8)), logits.argmax()
    first = np.exp2(2 * (logits[:FIRST] - logits[:FIRST].max()))
    first[first.argmax()] = 0
    centre = bfloat(first @ k[:FIRST] / max(first.sum(), 1e-300))
    k_scale, v_scale = power_of_two(np.abs(k[:FIRST]).max()), power_of_two(np.abs(v[:FIRST]).max())
    apart_key = half(half((k[top] - centre) * k_scale) * root[top]) / root[top] / k_scale
    apart = root[top] ** 2
    root = np.where(np.arange(len(k)) == top, 0, root)
    left = half(np.concatenate([half((k - centre) * k_scale) * root[:, None], v * (root * v_scale)[:, None]], 1))
    right = np.concatenate([left[:, :dim], root[:, None]], 1)
    running = {n: np.zeros((2 * dim, dim + 1)) for n in lengths}
    total = {n: np.zeros((2 * dim, dim + 1), np.float32) for n in lengths}
    for at in range(0, len(k), STEP):
        products = left[at:at + STEP, :, None] * right[at:at + STEP, None, :]
        for n in lengths:
            running[n] = add_step(running[n], products)
            if n and (at + STEP) % n == 0:
                total[n] += running[n].astype(np.float32)
                running[n][:] = 0
    omega = (root ** 2).sum() + apart
    outputs = []
    for n in lengths:
        sums = total[n] + running[n]
        k_mean = (sums[:dim, dim] / k_scale + apart * apart_key) / omega
        v_mean = (sums[dim:, dim] / v_scale + apart * v[top]) / omega
        a = (sums[:dim, :dim] / k_scale**2 + apart * np.outer(apart_key, apart_key)) / omega - np.outer(k_mean, k_mean)
        c = (sums[dim:, :dim] / (k_scale * v_scale) + apart * np.outer(v[top], apart_key)) / omega - np.outer(v_mean, k_mean)
        a = np.tril(a) + np.tril(a, -1).T
        outputs.append([v_mean + c @ np.linalg.solve(a + ridge * np.eye(dim), q - centre - k_mean) for ridge in ridges])
    return outputs


def errors(kind, dim, keys, ridges, lengths, rows):
    """(lengths, ridges): the worst over the rows."""
    worst = np.zeros((len(lengths), len(ridges)))
    for seed in range(rows):
        q, k, v = row(kind, seed, keys, dim)
        want = exact(q, k, v, ridges)
        for i, outputs in enumerate(emulated(q, k, v, ridges, lengths)):
            for j, o in enumerate(outputs):
                worst[i, j] = max(worst[i, j], np.linalg.norm(o - want[j]) / np.linalg.norm(want[j]))
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--keys", type=int, default=8192, help="of the part")
    parser.add_argument("--kind", nargs="+", default=["randn", "cluster", "qk_norm", "queries6", "long_both", "distinct40"])
    parser.add_argument("--ridge", type=float, nargs="+", default=[0.1, 0.01, 1e-3])
    parser.add_argument("--sums", type=int, nargs="+", default=[1024, 2048, 4096], help="keys of a sum, multiples of 16; 0: all")
    parser.add_argument("--rows", type=int, default=2)
    options = parser.parse_args()
    print("| kind, D | " + " | ".join(f"ridge {ridge:g}: sums of " + " / ".join(map(str, options.sums)) for ridge in options.ridge) + " |")
    print("|---" * (1 + len(options.ridge)) + "|")
    for kind in options.kind:
        for dim in options.dim:
            worst = errors(kind, dim, options.keys, options.ridge, options.sums, options.rows)
            print(f"| {kind}, {dim} | " + " | ".join(" / ".join(f"{e:.1e}" for e in column) for column in worst.T) + " |", flush=True)


if __name__ == "__main__":
    main()
