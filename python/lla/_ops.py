"""What torch needs to know about the operators besides their kernels: shapes (fake), gradients, autocast.

The order of the arguments is that of the schemas in bindings/torch/ops.cpp: q, k, v, ridge, x, the options (cu_seqlens_q
to batch_invariant), what makes k and v a cache (seqlens_k to max_total_k), and what the operator alone takes."""
import contextlib
import functools

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from . import _library
from ._errors import raise_ours

LIBRARY_PATH = _library.load()

forward = torch.ops.lla.forward.default
inference = torch.ops.lla.inference.default
backward = torch.ops.lla.backward.default
plan = torch.ops.lla.plan.default
check_call = torch.ops.lla.check_call.default
cache_append = torch.ops.lla.cache_append.default
append_inference = torch.ops.lla.append_inference.default

NO_CACHE = (None, None, None, 0)  # seqlens_k, page_table, first_key, max_total_k
_OPTIONS = 14  # from cu_seqlens_q to batch_invariant
_DEVICE_TYPES = ("cpu", "cuda")
# What a call that leaves out everything behind x means: the operator's own defaults.
_DEFAULTS = tuple(argument.default_value for argument in torch.ops.lla.inference.default._schema.arguments[5:])
PLAN_BYTES = 4096

# Skips the (Python) autograd kernel where no gradient is wanted. Torch's own operator registration uses this guard; a
# torch without it only loses the shortcut.
_below_autograd = getattr(torch._C, "_AutoDispatchBelowAutograd", contextlib.nullcontext)


# ---- shapes ----------------------------------------------------------------------------------------------------------

_DTYPES = {torch.float32: 1, torch.float64: 2, torch.bfloat16: 3, torch.float16: 4, torch.int32: 5, torch.int64: 6}


def _hint(number):
    """A size as this trace has it, without making it a constant of the graph; None where a trace cannot know."""
    if isinstance(number, int):
        return number
    return number.node.hint if number.node.has_hint() else None


def _check_devices(names, tensors):
    """The dispatcher takes a call with one traced or meta tensor for a traced one, wherever the others are."""
    for name, t in zip(names, tensors):
        if t is not None and t.device != tensors[0].device:
            raise ValueError(f"{name}: is on {t.device}, but {names[0]} is on {tensors[0].device}")


def _describe(names, tensors):
    """The tensors as lla::check_shapes reads them."""
    _check_devices(names, tensors)
    described = []
    for name, t in zip(names, tensors):
        if t is None:
            described.append(0)
            continue
        if t.dtype not in _DTYPES:
            raise ValueError(f"{name}: dtype is {t.dtype}, which lla does not know")
        described += [_DTYPES[t.dtype], int(t.device.type == "cuda"), t.dim()]
        described += [_hint(n) for n in (*t.shape, *t.stride())]
    return described


def _check_shapes(q, k, v, ridge, x, options, cache=NO_CACHE):
    """Asks the library's own checks about a traced call. When the graph runs, the library checks the real one."""
    names = ("q", "k", "v", "ridge", "x", "cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "page_table", "first_key")
    described = _describe(names, (q, k, v, ridge, x, *options[:2], *cache[:3]))
    numbers = [_hint(n) if isinstance(n, torch.SymInt) else n for n in (*options[2:], cache[3])]
    sizes_known = None not in described and None not in (numbers[0], numbers[1], numbers[4], numbers[5], numbers[-1])
    if not sizes_known:
        return
    try:
        with _disable_current_modes():  # the question has no tensors: nothing of it belongs into the trace
            torch.ops.lla.check_shapes(described, *numbers)
    except RuntimeError as error:
        raise_ours(error)


@functools.cache
def _saved_row_elements(dim, value_dim):
    """What a row takes of the saved vector: lla.h describes it, the library knows it."""
    return torch.ops.lla.saved_row_elements(dim, value_dim)


def _rows(q):
    return q.numel() // q.shape[-1]


def _fake_output(q, v):
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@torch.library.register_fake("lla::forward")
def _(q, k, v, ridge, x, *rest):
    options, cache, (save, info) = rest[:_OPTIONS], rest[_OPTIONS:-2], rest[-2:]
    _check_shapes(q, k, v, ridge, x, options, cache)
    saved_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    saved = _rows(q) * _saved_row_elements(int(q.shape[-1]), int(v.shape[-1])) if save else 0
    return (_fake_output(q, v), q.new_empty((saved,), dtype=saved_dtype),
            q.new_empty((3, _rows(q)) if info else (0,), dtype=torch.int32))


@torch.library.register_fake("lla::inference")
def _(q, k, v, ridge, x, *given):
    rest = (*given, *_DEFAULTS[len(given):])
    _check_shapes(q, k, v, ridge, x, rest[:_OPTIONS], rest[_OPTIONS:])
    return _fake_output(q, v)


@torch.library.register_fake("lla::backward")
def _(grad_o, q, k, v, ridge, x, saved, *rest):
    options, (need_dq, need_dk, need_dv, need_dridge, info) = rest[:_OPTIONS], rest[_OPTIONS:]
    _check_shapes(q, k, v, ridge, x, options)
    inputs = ((need_dq, q), (need_dk, k), (need_dv, v), (need_dridge, x if ridge is None else ridge))
    gradients = tuple(t.new_empty(t.shape if needed else (0,)) for needed, t in inputs)
    return *gradients, q.new_empty((3, _rows(q)) if info else (0,), dtype=torch.int32)


@torch.library.register_fake("lla::cache_append")
def _(k, v, k_cache, v_cache, *rest):
    names = ("k", "v", "k_cache", "v_cache", "seqlens", "slots", "page_table", "cu_seqlens")
    _check_devices(names, (k, v, k_cache, v_cache, *rest))


@torch.library.register_fake("lla::append_inference")
def _(new_k, new_v, seqlens, q, k, v, ridge, x, *given):
    rest = (*given, *_DEFAULTS[len(given):])
    _check_devices(("q", "k", "v", "seqlens"), (q, new_k, new_v, seqlens))
    _check_shapes(q, k, v, ridge, x, rest[:_OPTIONS], (seqlens, *rest[_OPTIONS + 1:]))
    return _fake_output(q, v)


@torch.library.register_fake("lla::check_call")
def _(*args):
    return None


@torch.library.register_fake("lla::plan")
def _(q, *args):
    return torch.empty(PLAN_BYTES, dtype=torch.uint8)


# ---- gradients -------------------------------------------------------------------------------------------------------
#
# Three rules for one gradient, because torch asks in three ways: register_autograd for graphs that the dispatcher runs
# (torch.compile, autocast, and callers of torch.ops.lla.forward), one autograd.Function for eager code, which would
# otherwise spend 0.1 ms a call on the schema, and one for the backward pass inside torch.func, which differentiates it.

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
    """What the backward pass needs. tensors: q, k, v, ridge, x, cu_seqlens_q, cu_seqlens_k; options: those behind them;
    report: called with the backward pass's row information, if given."""
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
    tensors, rest = inputs[:5], inputs[5:]
    _, saved, row_info = output
    _keep(ctx, (*tensors, *rest[:2]), saved, rest[2:_OPTIONS])
    ctx.has_saved = rest[-2]
    ctx.mark_non_differentiable(saved, row_info)


def _forward_backward(ctx, grad_o, *_):
    if grad_o is not None and not ctx.has_saved:
        raise RuntimeError("lla::forward was called with save=False: nothing was kept for the backward pass")
    return _gradients(ctx, grad_o) + (None,) * (_OPTIONS + len(NO_CACHE) + 2)


torch.library.register_autograd("lla::forward", _forward_backward, setup_context=_setup_context)


class _Attend(torch.autograd.Function):
    """lla::forward with gradients, for eager code and torch.func. `rest` are the operator's arguments after x in one:
    torch looks at each argument of `apply` several times."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, ridge, x, rest, info, report):
        with contextlib.nullcontext() if torch._C._are_functorch_transforms_active() else _below_autograd():
            return forward(q, k, v, ridge, x, *rest, True, info)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, ridge, x, rest, _, report = inputs
        _, saved, row_info = output
        _keep(ctx, (q, k, v, ridge, x, *rest[:2]), saved, rest[2:_OPTIONS], report)
        ctx.mark_non_differentiable(saved, row_info)

    @staticmethod
    def backward(ctx, grad_o, *_):
        return _gradients(ctx, grad_o) + (None, None, None)


# Function.apply without its search for torch.func's wrappers and for default arguments, which run_forward has ruled out.
_apply_eagerly = super(torch.autograd.Function, _Attend).apply


# ---- the way to the operator -----------------------------------------------------------------------------------------

def _is_dispatched(q):
    """Whether a call must go by the dispatcher's rules: traced and autocast code."""
    device_type = "cuda" if q.is_cuda else "cpu" if q.is_cpu else q.device.type
    return torch.compiler.is_compiling() or device_type not in _DEVICE_TYPES or torch.is_autocast_enabled(device_type)


def is_eager(q):
    """Whether run_forward's backward pass reports."""
    return not _is_dispatched(q) and not torch._C._are_functorch_transforms_active()


def is_plain(q):
    """Whether a call without gradients may go straight to the operator: nothing traces, transforms or converts it."""
    return is_eager(q) and forward_ad._current_level < 0


def run_forward(args, save, info, report=None):
    """(o, row information or None). args: what lla::inference takes, all of it. report: called by an eager call's
    backward pass with its row information. Three routes: by the dispatcher's rules where code is traced or autocast,
    through an autograd.Function where gradients are wanted, and straight to the operator otherwise."""
    q = args[0]
    if _is_dispatched(q):
        o, _, row_info = forward(*args, save, info)
        return o, row_info
    try:
        transformed = torch._C._are_functorch_transforms_active()
        # A level of forward-mode differentiation is there for torch's error: there is no forward derivative.
        if transformed or save or forward_ad._current_level >= 0:
            apply = _Attend.apply if transformed else _apply_eagerly
            o, _, row_info = apply(*args[:5], args[5:], info, report)
            return o, row_info
        if info:
            with _below_autograd():
                o, _, row_info = forward(*args, save, info)
            return o, row_info
        # inference has no autograd kernel to skip, and each argument left out saves 0.1 us.
        # (The tensors first: to compare one with None takes 10 us.)
        plain = args[5] is None and args[5 + _OPTIONS] is None and args[5:] == _DEFAULTS
        return inference(*(args[:5] if plain else args)), None
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
