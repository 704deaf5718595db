"""Inputs and error measures shared by the tests."""
import os
import sys

import torch

# What the result may be off by, as worst (batch, head) of |o - ref| / |ref|: rounding of the output type, and tol.
FORWARD_ERROR = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 2e-3}


def make_inputs(batch=2, length_q=33, length_k=None, heads=4, heads_kv=None, dim=16, value_dim=None, *,
                dtype=torch.float64, device="cpu", ridge="token", low=0.1):
    """q, k, v and a ridge, exact in dtype. ridge: "number", "scalar", "head", "token" or "dimension"."""
    length_k = length_q if length_k is None else length_k
    heads_kv = heads if heads_kv is None else heads_kv
    value_dim = dim if value_dim is None else value_dim

    def normal(*size):
        return torch.randn(*size, device="cpu", dtype=torch.float32).to(device, dtype)

    q, k = normal(batch, length_q, heads, dim), normal(batch, length_k, heads_kv, dim)
    v = normal(batch, length_k, heads_kv, value_dim)
    if ridge == "number":
        return q, k, v, 0.25
    size = {"scalar": (), "head": (heads,), "token": (batch, length_q, heads),
            "dimension": (batch, length_q, heads, dim)}[ridge]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return q, k, v, (torch.rand(size) * 0.9 + low).to(device, wide)


def head_error(o, ref):
    """The worst (batch, head) of |o - ref| / |ref| for (..., L, H, D)."""
    o, ref = o.detach().double().cpu(), ref.detach().double().cpu()
    assert o.shape == ref.shape
    if o.numel() == 0:
        return 0.0
    difference = torch.linalg.vector_norm(o - ref, dim=(-3, -1))
    size = torch.linalg.vector_norm(ref, dim=(-3, -1)).clamp_min(1e-30)
    return float((difference / size).max())


def assert_close(o, ref, dtype=None, factor=1.0):
    limit = FORWARD_ERROR[dtype or o.dtype] * factor
    error = head_error(o, ref)
    assert error <= limit, f"error {error:.3g}, at most {limit:.3g} allowed"


def relative(a, b):
    """|a - b| / |b| of whole tensors."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b).clamp_min(1e-30))


def exact_tol(dtype):
    """Solver tolerance tight enough not to show beside the rounding of dtype."""
    return {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 1e-4)


def leave_together(message):
    """The end of a process of a distributed test: when all are there, the first says so, and all go at once. Gloo's own
    teardown now and then aborts a process ("terminate called without an active exception") when others go first."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        print(message)
    sys.stdout.flush()
    os._exit(0)
