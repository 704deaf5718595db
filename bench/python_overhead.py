#!/usr/bin/env python3
"""What a call from Python costs beside the kernels, for a small problem.

    python bench/python_overhead.py [--device cuda]

"host" is the time of a call on the host (on a GPU nothing waits), "C call" that of lla_forward alone with the same
tensors and a workspace at hand, "over C" the difference. On a GPU "loop" is what a call takes when many follow one
another, waiting for the last; "kernels" what the device is busy for (a CUDA graph of 20 calls), "over kernels" the
difference: what calling from Python adds."""
import argparse
import ctypes
import time

import torch
import torch.nn.functional as F

import lla

CALLS = 50
GRAPH_CALLS = 20


def median(values):
    return sorted(values)[len(values) // 2]


def per_call(functions, synchronise):
    """Microseconds a call of each takes on the host, and with what it started: medians over batches of calls. The
    functions take turns, for a host's speed changes while one measures."""
    for function in functions:
        for _ in range(20):
            function()
    synchronise()
    host, loop = ([[] for _ in functions] for _ in range(2))
    for _ in range(31):
        for function, its_host, its_loop in zip(functions, host, loop):
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            its_host.append((time.perf_counter() - start) / CALLS * 1e6)
            synchronise()
            its_loop.append((time.perf_counter() - start) / CALLS * 1e6)
    return [(median(h), median(l)) for h, l in zip(host, loop)]


def kernel_time(function):
    """Microseconds the device is busy with a call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            function()
    graph.replay()
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / GRAPH_CALLS * 1e3)
    return median(times)


class View(ctypes.Structure):
    """lla_tensor"""
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("device_type", ctypes.c_int32),
                ("device_index", ctypes.c_int32), ("ndim", ctypes.c_int32), ("size", ctypes.c_int64 * 4),
                ("stride", ctypes.c_int64 * 4)]

    @classmethod
    def of(cls, tensor):
        dtype = {torch.float32: 1, torch.bfloat16: 3, torch.int32: 5}[tensor.dtype]
        view = cls(tensor.data_ptr(), dtype, int(tensor.is_cuda), 0, tensor.dim())
        view.size[:tensor.dim()], view.stride[:tensor.dim()] = tensor.shape, tensor.stride()
        return view


class ForwardSizes(ctypes.Structure):
    """The beginning of lla_forward_sizes"""
    _fields_ = [("struct_size", ctypes.c_size_t), ("workspace_bytes", ctypes.c_size_t)]


class ForwardArgs(ctypes.Structure):
    """lla_forward_args up to a cache's lengths; without options it means their defaults"""
    _fields_ = [("struct_size", ctypes.c_size_t), ("options", ctypes.c_void_p)] + [
        (name, View) for name in ("q", "k", "v", "ridge", "x", "o", "cu_seqlens_q", "cu_seqlens_k")] + [
        ("max_seqlen_q", ctypes.c_int64), ("max_seqlen_k", ctypes.c_int64)] + [
        (name, View) for name in ("saved", "iterations", "residual", "row_status")] + [
        ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_size_t), ("stream", ctypes.c_void_p), ("seqlens_k", View)]


class AppendArgs(ctypes.Structure):
    """lla_cache_append_args"""
    _fields_ = [("struct_size", ctypes.c_size_t)] + [
        (name, View) for name in ("k", "v", "k_cache", "v_cache", "seqlens", "slots", "page_table", "cu_seqlens", "status")] + [
        ("stream", ctypes.c_void_p)]


def c_append(k, v, k_cache, v_cache, seqlens):
    """lla_cache_append on the default stream, ready to run."""
    library = ctypes.CDLL("liblla.so.0.1")
    args = AppendArgs(ctypes.sizeof(AppendArgs))
    args.k, args.v, args.k_cache, args.v_cache, args.seqlens = map(View.of, (k, v, k_cache, v_cache, seqlens))
    reference, kept = ctypes.byref(args), args

    def run():
        assert library.lla_cache_append(reference) == 0, kept

    return run


def c_call(q, k, v, ridge=None, x=None, seqlens=None):
    """lla_forward on the default stream, ready to run."""
    library = ctypes.CDLL("liblla.so.0.1")  # loaded already, by the operators
    args = ForwardArgs()
    library.lla_forward_args_init_size(ctypes.byref(args), ctypes.c_size_t(ctypes.sizeof(args)))
    o = torch.empty_like(q)
    args.q, args.k, args.v, args.o = map(View.of, (q, k, v, o))
    if ridge is not None:
        args.ridge = View.of(ridge)
    if x is not None:
        args.x = View.of(x)
    if seqlens is not None:
        args.seqlens_k = View.of(seqlens)
    sizes = ForwardSizes(ctypes.sizeof(ForwardSizes))
    assert library.lla_forward_query(ctypes.byref(args), ctypes.byref(sizes)) == 0
    workspace = torch.empty(sizes.workspace_bytes + 256, dtype=torch.uint8, device=q.device)
    args.workspace, args.workspace_bytes = -(-workspace.data_ptr() // 256) * 256, sizes.workspace_bytes
    reference, kept = ctypes.byref(args), (args, o, workspace)

    def run():
        assert library.lla_forward(reference) == 0, kept

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    cuda = device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    torch.manual_seed(1)
    synchronise = torch.cuda.synchronize if cuda else lambda: None
    q, k, v = (torch.randn(1, 16, 2, 64, device=device, dtype=dtype) for _ in range(3))
    ridge, x = torch.rand(1, 16, 2, device=device), torch.zeros_like(q)
    trained = [t.clone().requires_grad_() for t in (q, k, v, ridge)]
    bhld = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    trained_bhld = [t.clone().requires_grad_() for t in bhld]
    g = torch.ones_like(q)
    cache = [torch.randn(1, 256, 2, 64, device=device, dtype=dtype) for _ in range(2)]
    filled = torch.full((1,), 128, dtype=torch.int32, device=device)
    q1, k1, v1, ridge1, x1 = (t[:, :1].contiguous() for t in (q, k, v, ridge, x))
    lengths = filled + 1
    append = c_append(k1, v1, *cache, filled)
    steps = c_call(q1, *cache, ridge1, seqlens=lengths), c_call(q1, *cache, x=x1, seqlens=lengths)
    cached = [torch.randn(1, 2, n, 64, device=device, dtype=dtype) for n in (1, 128, 128)]
    calls = {
        "lla_attention": (lambda: lla.lla_attention(q, k, v, ridge), c_call(q, k, v, ridge)),
        "  ridge a number": (lambda: lla.lla_attention(q, k, v, 0.1), None),
        "  gradients wanted": (lambda: lla.lla_attention(*trained), None),
        "  and taken": (lambda: torch.autograd.grad(lla.lla_attention(*trained), trained, g), None),
        "parallax_attention": (lambda: lla.parallax_attention(q, k, v, x), c_call(q, k, v, x=x)),
        "lla_attention_with_kvcache": (
            lambda: lla.lla_attention_with_kvcache(q1, *cache, ridge1, cache_seqlens=filled), steps[0]),
        "  appending": (
            lambda: lla.lla_attention_with_kvcache(q1, *cache, ridge1, k1, v1, cache_seqlens=filled),
            lambda: (append(), steps[0]())),
        "  x given, appending": (
            lambda: lla.parallax_attention_with_kvcache(q1, *cache, x1, k1, v1, cache_seqlens=filled),
            lambda: (append(), steps[1]())),
        "  sdpa over as many keys": (lambda: F.scaled_dot_product_attention(*cached), None),
        "scaled_dot_product_attention": (lambda: F.scaled_dot_product_attention(*bhld, is_causal=True), None),
        "  gradients wanted and taken": (lambda: torch.autograd.grad(
            F.scaled_dot_product_attention(*trained_bhld, is_causal=True), trained_bhld, torch.ones_like(bhld[0])), None),
    }
    name = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"{name}, torch {torch.__version__}, q {tuple(q.shape)} {dtype}; us per call")
    if cuda:
        _, info = lla.lla_attention(q, k, v, ridge, return_info=True)
        print(info.plan.splitlines()[0])
    print(f"{'':30}{'host':>8}{'C call':>8}{'over C':>8}" + (f"{'loop':>8}{'kernels':>9}{'over kernels':>14}" if cuda else ""))
    for name, (call, direct) in calls.items():
        (host, loop), *alone = per_call([call, direct] if direct else [call], synchronise)
        line = f"{name:30}{host:8.1f}"
        if direct:
            line += f"{alone[0][0]:8.1f}{host - alone[0][0]:8.1f}"
        else:
            line += " " * 16
        if cuda:
            kernels = kernel_time(call)
            line += f"{loop:8.1f}{kernels:9.1f}{loop - kernels:14.1f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
