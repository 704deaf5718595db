#!/usr/bin/env python3
"""Chunks, several queries and mixed batches over caches: the tables of docs/benchmarks/h200-cache.md.

    python bench/chunks_over_caches.py                       # all of them, about half a minute on an H200
    python bench/chunks_over_caches.py --parts crossing      # where decode and the forward cross

bf16, 8 key heads, one query head each, token-major caches, ridge 0.1, randn. A time is that of one replayed CUDA graph
of one call, the median of the replays.

Parts: mixed (31 decoders beside a chunk of 512), queries (of one sequence and of a batch, as the plan takes them),
crossing (the same rows by each of the two kernels), packed (prompts dense, packed and in caches), bound (a graph
captured for more keys than there are), portable (one query by cuda-portable)."""
import argparse

import torch

import lla
from timing import median_microseconds

REPLAYS, KEY_HEADS = 10, 8


def microseconds(call):
    """Of one call in a graph; nan where the call is refused."""
    stream = torch.cuda.Stream()
    try:
        with torch.cuda.stream(stream):
            call()
    except (RuntimeError, ValueError, NotImplementedError) as reason:
        print(f"  refused: {reason}")
        return float("nan")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    return median_microseconds(graph.replay, REPLAYS)


def normal(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def integers(values):
    return torch.tensor(values, device="cuda", dtype=torch.int32)


class Cache:
    """Full caches of `batch` sequences, contiguous or in shuffled pages."""

    def __init__(self, batch, length, dim, page_size=0, capacity=None):
        self.batch, self.length, self.dim = batch, length, dim
        capacity = capacity or length
        self.k, self.v = (normal(batch, capacity, KEY_HEADS, dim) for _ in range(2))
        self.table = None
        if page_size:
            pages = batch * capacity // page_size
            self.table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(batch, -1)
            self.k, self.v = (t.view(pages, page_size, KEY_HEADS, dim) for t in (self.k, self.v))

    def part(self, first, count):
        """Some of the sequences, as a cache of their own."""
        other = object.__new__(Cache)
        other.__dict__.update(self.__dict__, batch=count)
        if self.table is None:
            other.k, other.v = self.k[first:first + count], self.v[first:first + count]
        else:
            other.table = self.table[first:first + count]
        return other

    def call(self, queries, given_x=False, packed=None, bound=None, **options):
        """A call with `queries` new queries of each sequence, or with packed ones of these numbers."""
        shape = (sum(packed),) if packed else (self.batch, queries)
        q = normal(*shape, KEY_HEADS, self.dim)
        last = 0.1 * normal(*shape, KEY_HEADS, self.dim) if given_x else 0.1
        if packed:
            options.update(cu_seqlens_q=integers([sum(packed[:i]) for i in range(len(packed) + 1)]), max_seqlen_q=max(packed))
        attend = lla.parallax_attention_with_kvcache if given_x else lla.lla_attention_with_kvcache
        lengths = integers([self.length] * self.batch)
        return lambda: attend(q, self.k, self.v, last, cache_seqlens=lengths, page_table=self.table,
                              max_seqlen_k=bound or self.length, **options)

    def time(self, *args, **options):
        return microseconds(self.call(*args, **options))


def line(name, *cells):
    print(f"| {name} | " + " | ".join(c if isinstance(c, str) else f"{c:.0f}" for c in cells) + " |", flush=True)


def head(name, *columns):
    print()
    line(name, *columns)
    line("---", *["---"] * len(columns))


def mixed():
    head("31 decoders and a chunk of 512, D = 128", "decoders, µs", "chunk, µs", "both, µs", "both / sum")
    for length in (4096, 16384):
        for page_size in (0, 16):
            cache = Cache(32, length, 128, page_size)
            decoders = cache.part(0, 31).time(1)
            chunk = cache.part(31, 1).time(512)
            both = cache.time(None, packed=[1] * 31 + [512], max_total_k=length)
            line(f"n = {length}, {f'pages of {page_size}' if page_size else 'contiguous'}", decoders, chunk, both,
                 f"{both / (decoders + chunk):.2f}")


QUERIES = (1, 2, 4, 8, 16, 17, 32, 33, 64, 128, 129, 256, 512)


def queries():
    head("queries of a sequence, D = 128, µs", *map(str, QUERIES))
    for batch, length in ((1, 65536), (32, 4096)):
        cache = Cache(batch, length, 128)
        for given_x in (False, True):
            line(f"{'x given' if given_x else 'solved'}, B = {batch}, n = {length}",
                 *(cache.time(count, given_x) for count in QUERIES))


ROWS = (4, 8, 12, 16, 24, 32)


def crossing():
    """Decode takes rows one by one, so its time is nearly proportional to them; the forward, called here without a
    cache on the same keys, takes 64 as it takes one."""
    for given_x in (False, True):
        head(f"{'x given' if given_x else 'solved'}, µs", *(f"decode, {rows} rows" for rows in ROWS), "forward, 32 rows",
             "forward, 64", "rows where they cross")
        for dim in (64, 128):
            for batch, length in ((1, 1024), (1, 4096), (1, 16384), (1, 65536), (4, 16384), (32, 1024), (32, 4096), (32, 16384)):
                cache = Cache(batch, length, dim)
                decode = [cache.time(rows, given_x) for rows in ROWS]
                forward = []
                for rows in (32, 64):
                    q = normal(batch, rows, KEY_HEADS, dim)
                    x = 0.1 * normal(batch, rows, KEY_HEADS, dim)
                    forward.append(microseconds(lambda: lla.parallax_attention(q, cache.k, cache.v, x) if given_x else
                                                lla.lla_attention(q, cache.k, cache.v, 0.1)))
                slope = (decode[-1] - decode[0]) / (ROWS[-1] - ROWS[0])
                line(f"D = {dim}, B = {batch}, n = {length}", *decode, *forward,
                     ROWS[0] + (forward[1] - decode[0]) / max(slope, 1e-3))


def packed():
    head("8 sequences of 2048 queries and keys, µs", "D = 64", "D = 128", "x given, D = 64", "x given, D = 128")
    lengths = integers(range(0, 8 * 2048 + 1, 2048))

    def dense(dim, given_x, is_packed, **options):
        q, k, v = (normal(*((8 * 2048,) if is_packed else (8, 2048)), KEY_HEADS, dim) for _ in range(3))
        x = 0.1 * normal(*q.shape)
        if not is_packed:
            return microseconds(lambda: lla.parallax_attention(q, k, v, x, **options) if given_x else
                                lla.lla_attention(q, k, v, 0.1, **options))
        if given_x:  # the package has no packed form with x given: the operator itself
            flags = options.get("batch_invariant", False)
            return microseconds(lambda: torch.ops.lla.inference(q, k, v, None, x, lengths, lengths, 2048, 2048,
                                                                batch_invariant=flags))
        return microseconds(lambda: lla.lla_attention_varlen(q, k, v, 0.1, lengths, lengths, 2048, 2048, **options))

    forms = [(64, False), (128, False), (64, True), (128, True)]
    line("dense", *(dense(*form, False) for form in forms))
    line("packed", *(dense(*form, True) for form in forms))
    line("packed, `batch_invariant`", *(dense(*form, True, batch_invariant=True) for form in forms))
    for name, page_size in (("contiguous cache", 0), ("pages of 16", 16), ("pages of 1", 1)):
        line(name, *(Cache(8, 2048, dim, page_size).time(2048, given_x) for dim, given_x in forms))


def bound():
    head("a chunk of 512 over 1024 keys, D = 128", "µs")
    roomy = Cache(1, 1024, 128, capacity=131072)
    for most in (1024, 8192, 131072):
        line(f"graph captured for {most} keys", roomy.time(512, bound=most))
    line("for 131072 keys, max_total_k = 1024", roomy.time(512, bound=131072, max_total_k=1024))


def portable():
    head("cuda-portable, one query, ms", "solved", "x given")
    for dim in (64, 128):
        for batch, length in ((1, 65536), (32, 4096)):
            cache = Cache(batch, length, dim)
            line(f"D = {dim}, B = {batch}, n = {length}",
                 *(f"{cache.time(1, given_x, implementation='cuda-portable') / 1e3:.2f}" for given_x in (False, True)))


PARTS = {f.__name__: f for f in (mixed, queries, crossing, packed, bound, portable)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parts = parser.parse_args().parts
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, lla {lla.version()}")
    with torch.no_grad():
        for part in parts:
            torch.manual_seed(1)
            PARTS[part]()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
