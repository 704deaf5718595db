#!/usr/bin/env python3
"""Decode beside cuDNN's softmax in the same run: the table of docs/benchmarks/h200-decode.md.

    python bench/decode_beside_softmax.py [--dim 64 128] [--quick]
    python bench/decode_beside_softmax.py --shape 128,1,8192,2 64,8,4096     # these alone: D, B, n and the group
    python bench/decode_beside_softmax.py --solver direct --quick            # every row eliminated

bf16, 8 key heads, token-major caches, f32 output, ridge 0.1. A time is that of one call inside a replayed CUDA graph of
20 calls over inputs that take turns (400 MB or more, so that L2 serves none), the median of the replays. Softmax is
torch's scaled_dot_product_attention with the cuDNN backend on the same caches, one query head per key head."""
import argparse

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import lla
from timing import median_microseconds

CALLS, REPLAYS, KEY_HEADS = 20, 15, 8
SHAPES = [(1, 1024), (1, 4096), (1, 16384), (1, 65536), (32, 1024), (32, 4096), (32, 16384), (256, 1024)]


def microseconds(call):
    """Of call(i), i counting the calls of a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    return median_microseconds(graph.replay, REPLAYS) / CALLS


class Inputs:
    def __init__(self, dim, batch, length, group=1, queries=1, page_size=0, solver="auto"):
        self.solver = solver
        size = 2 * 2 * batch * length * KEY_HEADS * dim
        self.count = max(1, min(CALLS, 400_000_000 // size))
        normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        self.q = [normal(batch, queries, KEY_HEADS * group, dim) for _ in range(self.count)]
        self.x = [0.1 * normal(batch, queries, KEY_HEADS * group, dim).float() for _ in range(self.count)]
        self.k, self.v = ([normal(batch, length, KEY_HEADS, dim) for _ in range(self.count)] for _ in range(2))
        self.lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        self.table = None
        self.shape = batch, length, KEY_HEADS, dim
        if page_size:
            pages = batch * length // page_size
            self.table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(batch, -1)
            self.k, self.v = ([t.view(pages, page_size, KEY_HEADS, dim) for t in ts] for ts in (self.k, self.v))

    def arguments(self, i):
        i %= self.count
        return self.q[i], self.k[i], self.v[i]

    def solved(self):
        return microseconds(lambda i: lla.lla_attention_with_kvcache(
            *self.arguments(i), 0.1, cache_seqlens=self.lengths, page_table=self.table, max_seqlen_k=self.shape[1],
            solver=self.solver))

    def output_given_x(self, i):
        return lla.parallax_attention_with_kvcache(*self.arguments(i), self.x[i % self.count], cache_seqlens=self.lengths,
                                                   page_table=self.table, max_seqlen_k=self.shape[1])

    def given_x(self):
        return microseconds(self.output_given_x)

    def softmax(self):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return microseconds(lambda i: F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in self.arguments(i))))


def row(*cells):
    print("| " + " | ".join(c if isinstance(c, str) else f"{c:.1f}" for c in cells) + " |", flush=True)


def beside(label, solved, given_x, softmax):
    row(label, solved, given_x, softmax, f"{solved / softmax:.2f}", solved - softmax, f"{given_x / softmax:.2f}")


def shape_of(text):
    try:
        dim, batch, length, group = (int(x) for x in (text if text.count(",") == 3 else text + ",1").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not D,B,N or D,B,N,GROUP") from None
    return dim, batch, length, group


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, nargs="+", help="of the table; default: 64 128")
    parser.add_argument("--quick", action="store_true", help="without pages, groups and several queries")
    parser.add_argument("--shape", type=shape_of, nargs="+", metavar="D,B,N[,GROUP]", help="these alone, instead of the table")
    parser.add_argument("--solver", choices=("auto", "direct"), default="auto", help="of the solved form; direct eliminates")
    options = parser.parse_args()
    solver = options.solver
    if options.shape and (options.dim or options.quick):
        parser.error("--shape is instead of the table that --dim and --quick are about")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, lla {lla.version()}\n")
    row("D, B, n", "solved, µs", "x given, µs", "cuDNN softmax, µs", "solved / softmax", "more, µs", "x given / softmax")
    row(*["---"] * 7)
    for dim, batch, length, group in options.shape or []:
        inputs = Inputs(dim, batch, length, group, solver=solver)
        beside(f"{dim}, {batch}, {length}, group of {group}", inputs.solved(), inputs.given_x(), Inputs(dim, batch, length).softmax())
    if options.shape:
        return
    softmax = {}
    for dim in options.dim or (64, 128):
        for batch, length in SHAPES:
            inputs = Inputs(dim, batch, length, solver=solver)
            solved, given_x, its = inputs.solved(), inputs.given_x(), inputs.softmax()
            softmax[dim, batch, length] = its
            beside(f"{dim}, {batch}, {length}", solved, given_x, its)
            if (batch, length) == (32, 16384) and not options.quick:
                for page_size in (16, 1):
                    paged = Inputs(dim, batch, length, page_size=page_size, solver=solver)
                    a, b = paged.solved(), paged.given_x()
                    row(f"pages of {page_size}", a, b, "", f"{a / solved:.2f} of contiguous", "",
                        f"{b / given_x:.2f} of contiguous")
        if not options.quick:
            its = softmax[dim, 32, 4096]
            for group, queries in ((4, 1), (8, 1), (1, 4)):
                time = Inputs(dim, 32, 4096, group, queries, solver=solver).solved()
                row(f"{dim}, 32, 4096: group {group}, {queries} queries", time, "", its, f"{time / its:.2f}", time - its, "")


if __name__ == "__main__":
    main()
