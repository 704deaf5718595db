"""What torch needs to know about the operators besides their kernels: shapes (fake), gradients, autocast.

The order of the arguments is that of the schemas in bindings/torch/ops.cpp."""
import contextlib
import functools

import torch
from torch.autograd import forward_ad

from . import _library
from ._errors import raise_ours

LIBRARY_PATH = _library.load()

forward = torch.ops.lla.forward.default
inference = torch.ops.lla.inference.default
backward = torch.ops.lla.backward.default
plan = torch.ops.lla.plan.default

_DEVICE_TYPES = ("cpu", "cuda")
_DEFAULTS = (None, 0, 0, None, True, -1, -1, None, 0, "auto", None, False)  # of lla::inference after cu_seqlens_q
PLAN_BYTES = 4096

# Skips the (Python) autograd kernel where no gradient is wanted. Torch's own operator registration uses this guard; a
# torch without it only loses the shortcut.
_below_autograd = getattr(torch._C, "_AutoDispatchBelowAutograd", contextlib.nullcontext)


def _fail_unless(condition, message):
    if not condition:
        raise ValueError(message)


def _check_shapes(q, k, v, ridge, x, cu_seqlens_q, cu_seqlens_k):
    """The checks a traced graph relies on; the library repeats all of them, and more, when the graph runs."""
    packed = cu_seqlens_q is not None
    rank = 3 if packed else 4
    layout = "(total, heads, dim)" if packed else "(batch, length, heads, dim)"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _fail_unless(tensor.dim() == rank, f"{name} has {tensor.dim()} dimensions, not {layout}")
        _fail_unless(tensor.dtype == q.dtype, f"{name} is {tensor.dtype} but q is {q.dtype}")
        _fail_unless(tensor.device == q.device, f"{name} is on {tensor.device} but q is on {q.device}")
    _fail_unless(k.shape[-1] == q.shape[-1], f"k has head dimension {k.shape[-1]} but q has {q.shape[-1]}")
    _fail_unless(v.shape[:-1] == k.shape[:-1], f"v is {tuple(v.shape)} and does not go with k, {tuple(k.shape)}")
    _fail_unless(packed or k.shape[0] == q.shape[0], f"k has batch {k.shape[0]} but q has {q.shape[0]}")
    heads, heads_kv = q.shape[-2], k.shape[-2]
    _fail_unless(heads_kv > 0 and heads % heads_kv == 0, f"q has {heads} heads, not a multiple of k's {heads_kv}")
    _fail_unless((ridge is None) != (x is None), "give exactly one of ridge and x")
    _fail_unless((cu_seqlens_k is not None) == packed, "give both cu_seqlens_q and cu_seqlens_k or neither")
    if ridge is not None:
        good = [(), (heads,), tuple(q.shape[:-1]), tuple(q.shape)]
        _fail_unless(tuple(ridge.shape) in good, f"ridge is {tuple(ridge.shape)}, not one of {good}")
    if x is not None:
        _fail_unless(tuple(x.shape) == tuple(q.shape), f"x is {tuple(x.shape)} but q is {tuple(q.shape)}")


@functools.cache
def _saved_row_elements(dim, value_dim):
    """What a row takes of the saved vector: lla.h describes it, the library knows it."""
    return torch.ops.lla.saved_row_elements(dim, value_dim)


def _saved_elements(q, v):
    return q.numel() // q.shape[-1] * _saved_row_elements(int(q.shape[-1]), int(v.shape[-1]))


@torch.library.register_fake("lla::forward")
def _(q, k, v, ridge, x, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_left,
      window_right, tol, max_iterations, solver, implementation, tf32, save, info):
    _check_shapes(q, k, v, ridge, x, cu_seqlens_q, cu_seqlens_k)
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    saved_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    saved = q.new_empty((_saved_elements(q, v) if save else 0,), dtype=saved_dtype)
    rows = q.numel() // q.shape[-1]
    return o, saved, q.new_empty((3, rows) if info else (0,), dtype=torch.int32)


@torch.library.register_fake("lla::inference")
def _(q, k, v, ridge, x, cu_seqlens_q=None, cu_seqlens_k=None, *options):
    _check_shapes(q, k, v, ridge, x, cu_seqlens_q, cu_seqlens_k)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@torch.library.register_fake("lla::backward")
def _(grad_o, q, k, v, ridge, x, saved, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal,
      window_left, window_right, tol, max_iterations, solver, implementation, tf32, need_dq, need_dk, need_dv,
      need_dridge,
      info):
    _check_shapes(q, k, v, ridge, x, cu_seqlens_q, cu_seqlens_k)
    inputs = ((need_dq, q), (need_dk, k), (need_dv, v), (need_dridge, x if ridge is None else ridge))
    gradients = tuple(t.new_empty(t.shape if needed else (0,)) for needed, t in inputs)
    return *gradients, q.new_empty((3, q.numel() // q.shape[-1]) if info else (0,), dtype=torch.int32)


@torch.library.register_fake("lla::plan")
def _(q, *args):
    return torch.empty(PLAN_BYTES, dtype=torch.uint8)


def _no_double_backward(ctx, *_):
    raise RuntimeError("lla: second derivatives are not implemented (double backward through Local Linear Attention); "
                       "lla.reference.lla_attention is differentiable twice")


torch.library.register_autograd("lla::backward", _no_double_backward)


class _TransformedBackward(torch.autograd.Function):
    """lla::backward for torch.func, which has gradients on while it runs a backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args):
        return backward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(_no_double_backward)


def _keep(ctx, tensors, saved, options, report=None):
    """What the backward pass needs. tensors: q, k, v, ridge, x, cu_seqlens_q, cu_seqlens_k; report: called with the
    backward pass's row information, if given."""
    ctx.save_for_backward(*tensors, saved)
    ctx.options = options
    ctx.report = report
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad_o):
    """Of q, k, v, ridge and x; None where not wanted."""
    if grad_o is None:
        return (None,) * 5
    q, k, v, ridge, x, cu_seqlens_q, cu_seqlens_k, saved = ctx.saved_tensors
    need_q, need_k, need_v, need_ridge, need_x = ctx.needs_input_grad[:5]
    run = _TransformedBackward.apply if torch._C._are_functorch_transforms_active() else backward
    with contextlib.nullcontext() if torch.is_grad_enabled() else _below_autograd():
        dq, dk, dv, dlast, row_info = run(grad_o.contiguous(), q, k, v, ridge, x, saved, cu_seqlens_q, cu_seqlens_k,
                                          *ctx.options, need_q, need_k, need_v, need_ridge or need_x,
                                          ctx.report is not None)
    if ctx.report is not None:
        ctx.report(row_info)
    return (dq if need_q else None, dk if need_k else None, dv if need_v else None, dlast if need_ridge else None,
            dlast if need_x else None)


def _setup_context(ctx, inputs, output):
    *_, save, _ = inputs
    _, saved, row_info = output
    _keep(ctx, inputs[:7], saved, inputs[7:-2])
    ctx.has_saved = save
    ctx.mark_non_differentiable(saved, row_info)


def _forward_backward(ctx, grad_o, *_):
    if grad_o is not None and not ctx.has_saved:
        raise RuntimeError("lla::forward was called with save=False: nothing was kept for the backward pass")
    return _gradients(ctx, grad_o) + (None,) * 15


torch.library.register_autograd("lla::forward", _forward_backward, setup_context=_setup_context)


class _EagerForward(torch.autograd.Function):
    """What register_autograd makes of the same functions, without the 0.1 ms a call it spends on the schema. `rest` are
    the operator's arguments after x: torch looks at each argument of `apply` several times."""

    @staticmethod
    def forward(ctx, q, k, v, ridge, x, rest, info, report):
        with _below_autograd():
            o, saved, row_info = forward(q, k, v, ridge, x, *rest, True, info)
        _keep(ctx, (q, k, v, ridge, x, rest[0], rest[1]), saved, rest[2:], report)
        if not info:
            return o
        ctx.mark_non_differentiable(row_info)
        return o, row_info

    @staticmethod
    def backward(ctx, grad_o, *_):
        return _gradients(ctx, grad_o) + (None, None, None)


# Function.apply without its search for torch.func's wrappers, which run_forward has ruled out.
_apply_eagerly = super(torch.autograd.Function, _EagerForward).apply


class _TransformedForward(torch.autograd.Function):
    """The same once more in the form torch.func asks for, which is slower to call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, ridge, x, rest, info):
        return forward(q, k, v, ridge, x, *rest, True, info)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, rest, _ = inputs
        _, saved, row_info = output
        _keep(ctx, (*tensors, rest[0], rest[1]), saved, rest[2:])
        ctx.mark_non_differentiable(saved, row_info)

    @staticmethod
    def backward(ctx, grad_o, *_):
        return _gradients(ctx, grad_o) + (None, None)


def _is_dispatched(q):
    """Whether a call must go by the dispatcher's rules: traced and autocast code."""
    device_type = "cuda" if q.is_cuda else "cpu" if q.is_cpu else q.device.type
    return torch.compiler.is_compiling() or device_type not in _DEVICE_TYPES or torch.is_autocast_enabled(device_type)


def is_eager(q):
    """Whether run_forward's backward pass reports."""
    return not _is_dispatched(q) and not torch._C._are_functorch_transforms_active()


def run_forward(args, save, info, report=None):
    """(o, row information or None) by the shortest way: traced and autocast code by the dispatcher's rules, eager code
    past them. args: what lla::inference takes, all of it. report: called by an eager call's backward pass with its row
    information."""
    q = args[0]
    if _is_dispatched(q):
        o, _, row_info = forward(*args, save, info)
        return o, row_info
    try:
        if torch._C._are_functorch_transforms_active():
            o, _, row_info = _TransformedForward.apply(*args[:5], args[5:], info)
            return o, row_info
        if save or forward_ad._current_level >= 0:  # the latter for torch's error: there is no forward derivative
            result = _apply_eagerly(*args[:5], args[5:], info, report)
            return result if info else (result, None)
        if not info:  # has no autograd kernel to skip, and each argument left out saves 0.1 us
            plain = args[5] is None and args[6:] == _DEFAULTS
            return inference(*(args[:5] if plain else args)), None
        with _below_autograd():
            o, _, row_info = forward(*args, save, info)
        return o, row_info
    except RuntimeError as error:
        raise_ours(error)


def autocast_to(tensor, dtype):
    eligible = tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if eligible and tensor.dtype != dtype else tensor


def _register_autocast(library, device_type):
    """q, k, v and x go to autocast's type; the ridge stays in float32, where small values keep their digits."""

    def kernel(q, k, v, ridge, x, *rest):
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v, x = (autocast_to(t, dtype) for t in (q, k, v, x))
        with torch.autocast(device_type, enabled=False):
            return forward(q, k, v, autocast_to(ridge, torch.float32), x, *rest)

    library.impl("forward", kernel, f"Autocast{device_type.upper()}")


_autocast_library = torch.library.Library("lla", "IMPL")
for _device_type in _DEVICE_TYPES:
    _register_autocast(_autocast_library, _device_type)
