#!/usr/bin/env python3
"""What a call from Python costs beside the kernels, for a small problem.

    python bench/python_overhead.py [--device cuda]

On a GPU: time of a call on the host (nothing waits), latency of a call followed by a synchronisation, and the latency
of the same kernels replayed as a CUDA graph; "added" is the difference of the two latencies."""
import argparse
import time

import torch
import torch.nn.functional as F

import lla


def per_call(function, repeats, synchronise):
    """Median over batches of the microseconds a call takes."""
    for _ in range(20):
        function()
    synchronise()
    batches = []
    for _ in range(15):
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        batches.append((time.perf_counter() - start) / repeats * 1e6)
        synchronise()
    return sorted(batches)[len(batches) // 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    cuda = device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    synchronise = torch.cuda.synchronize if cuda else lambda: None
    q, k, v = (torch.randn(1, 16, 2, 64, device=device, dtype=dtype) for _ in range(3))
    ridge = torch.rand(1, 16, 2, device=device)
    trained = [t.clone().requires_grad_() for t in (q, k, v, ridge)]
    bhld = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    calls = {
        "lla_attention": lambda: lla.lla_attention(q, k, v, ridge),
        "lla_attention, ridge a number": lambda: lla.lla_attention(q, k, v, 0.1),
        "lla_attention, gradients wanted": lambda: lla.lla_attention(*trained),
        "parallax_attention": lambda: lla.parallax_attention(q, k, v, q),
        "torch scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(*bhld, is_causal=True),
    }
    name = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"{name}, torch {torch.__version__}, q {tuple(q.shape)} {dtype}; us per call")
    if cuda:
        _, info = lla.lla_attention(q, k, v, ridge, return_info=True)
        print(info.plan.splitlines()[0])
    print(f"{'':36}{'host':>8}" + (f"{'latency':>10}{'as graph':>10}{'added':>8}" if cuda else ""))
    for name, call in calls.items():
        line = f"{name:36}{per_call(call, 50, synchronise):8.1f}"
        if cuda and "gradients" not in name:
            latency = per_call(lambda: (call(), synchronise()), 50, synchronise)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            replay = per_call(lambda: (graph.replay(), synchronise()), 50, synchronise)
            line += f"{latency:10.1f}{replay:10.1f}{latency - replay:8.1f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
