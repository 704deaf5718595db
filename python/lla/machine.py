"""What this build can do and what it found on this machine."""
import torch

from . import _ops
from ._errors import call
from .functional import _allows_tf32, _options, _ridge_tensor


def implementations():
    """{name: description} of this build, in order of preference."""
    return dict(line.split(": ", 1) for line in torch.ops.lla.implementations().splitlines())


def machine():
    """The library's description of this machine: SIMD target, threads, CUDA device or why there is none."""
    return torch.ops.lla.machine()


def version():
    return torch.ops.lla.version()


def explain(q, k, v, ridge, *, scale=None, causal=True, window_size=(-1, -1), tol=None, max_iterations=None,
            solver="auto", implementation=None, precision=None, batch_invariant=False):
    """{name: None or the reason of refusal}: which implementations take this problem (see `lla_attention`)."""
    options = _options(scale, causal, window_size, tol, max_iterations, solver, implementation)
    text = call(_ops.plan, q, k, v, _ridge_tensor(ridge, q), None, None, None, 0, 0, *options,
                _allows_tf32(precision, q), batch_invariant, *_ops.NO_CACHE, True)
    lines = bytes(text.tolist()).rstrip(b"\0").decode().splitlines()
    answers = dict(line.split(": ", 1) for line in lines)
    return {name: None if answer == "yes" else answer.removeprefix("no, ") for name, answer in answers.items()}
