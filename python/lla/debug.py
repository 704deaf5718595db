"""Finding out which call went wrong: `check="warn"` or `"raise"` of the attention functions, and counting row statuses.

A checked call looks at its output (or gradients) and at how each row's solve ended. The first that is not finite or did
not end well is named, and the inputs of its head go to a file that `lla check --replay FILE` runs again on every
implementation against the fp64 reference. Checking waits for the device in every call; without it nothing here runs.

Inside torch.compile a checked call is a graph break (an error with fullgraph=True), in a CUDA graph capture an error."""
import contextlib
import itertools
import os
import sys
import warnings

import numpy as np
import torch
from torch import Tensor

from . import _case, _ops
from ._errors import raise_ours

STATUS_NAMES = ("ok", "max_iterations", "breakdown", "nan", "precision", "invalid")
_SOLVERS = ("auto", "cg", "direct")


class CheckError(RuntimeError):
    """What check="raise" raises. `path` names the file with the inputs (None where it could not be written), `where` the
    place as a dictionary."""

    def __init__(self, message, path, where):
        super().__init__(message)
        self.path, self.where = path, where


class CheckWarning(UserWarning):
    """What check="warn" warns with, once a process."""


def check_mode(value):
    if value is None or value in ("warn", "raise"):
        return value
    raise ValueError(f'check must be "raise", "warn" or None, not {value!r}')


def _from_environment():
    value = os.environ.get("LLA_CHECK", "")
    if value not in ("", "warn", "raise"):
        raise ValueError(f'LLA_CHECK must be "raise" or "warn", not {value!r}')
    return value or None


default_check = _from_environment()
active_counts = None  # of the innermost count_rows()
_calls = itertools.count(1)
_warned = False


def looks(check):
    """Whether a call with this `check` is to be looked at, or its rows counted."""
    return check is not None or default_check is not None or active_counts is not None


class RowCounts:
    """How many rows ended how, forward and backward; counted on the device, read when asked."""

    def __init__(self):
        self._counts, self._names = {}, {}  # by device

    def add(self, direction, status):
        if status.device not in self._counts:
            self._counts[status.device] = torch.zeros(2, len(STATUS_NAMES), dtype=torch.int64, device=status.device)
            self._names[status.device] = torch.arange(len(STATUS_NAMES), device=status.device)[:, None]
        # Comparing and adding, for bincount would wait for the device.
        found = (status == self._names[status.device]).sum(1)
        self._counts[status.device][("forward", "backward").index(direction)] += found

    def read(self):
        """{"forward": {"ok": n, …}, "backward": {…}}; waits for the device."""
        total = sum((counts.cpu() for counts in self._counts.values()), torch.zeros(2, len(STATUS_NAMES), dtype=torch.int64))
        return {name: dict(zip(STATUS_NAMES, row.tolist())) for name, row in zip(("forward", "backward"), total)}

    def clear(self):
        for counts in self._counts.values():
            counts.zero_()


@contextlib.contextmanager
def count_rows():
    """Within it every call of this process, and the backward pass of every such call, adds its rows to a `RowCounts`:

        with lla.debug.count_rows() as rows:
            loss = model(batch); loss.backward()
        print(rows.read())"""
    global active_counts
    before, active_counts = active_counts, RowCounts()
    try:
        yield active_counts
    finally:
        active_counts = before


class _Watch:
    """Who looks at the rows of one call and of its backward pass."""

    def __init__(self, check):
        self.mode, self.counts = check_mode(check) or default_check, active_counts
        self.number = next(_calls) if self.mode else 0

    def look(self, direction, call, results, row_info, inputs_finite=True):
        if call.packed:  # rows behind the last sequence belong to nobody and hold anything
            row_info = call.within_sequences(row_info.unflatten(1, (call.q.shape[1], -1)), 2).flatten(1)
            sides = {"dk": 1, "dv": 1}
            results = {name: call.within_sequences(t, 0, sides.get(name, 0)) if t.dim() > 1 else t
                       for name, t in results.items()}
        if self.counts is not None:
            self.counts.add(direction, row_info[2])
        if self.mode is None or not inputs_finite:
            return
        found = _first_bad(call, results, row_info)
        if found is not None:
            _report(self, direction, call, found, row_info)


class _Call:
    """The arguments of one call; rest as in `_ops.run_forward`."""

    def __init__(self, q, k, v, ridge, x, rest):
        self.q, self.k, self.v, self.ridge, self.x, self.rest = q, k, v, ridge, x, rest
        self.grad_o = None

    @property
    def cache(self):
        return self.rest[_ops._OPTIONS:] or _ops.NO_CACHE

    @property
    def packed(self):
        return self.rest[0] is not None

    def within_sequences(self, tensor, dim, side=0):
        """Zero at the positions along `dim` behind the last sequence; side 0 for queries, 1 for keys."""
        inside = torch.arange(tensor.shape[dim], device=tensor.device) < self.rest[side][-1]
        return tensor.where(inside.view(-1, *[1] * (tensor.dim() - dim - 1)), 0)


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ridge, x, rest, looker):
        with _ops._below_autograd():
            o, saved, row_info = _ops.forward(q, k, v, ridge, x, *rest, True, True)
        looker.look("forward", _Call(q, k, v, ridge, x, rest), {"o": o}, row_info)
        _ops._keep(ctx, (q, k, v, ridge, x, rest[0], rest[1]), saved, rest[2:_ops._OPTIONS])
        ctx.looker = looker
        ctx.mark_non_differentiable(row_info)
        return o, row_info

    @staticmethod
    def backward(ctx, grad_o, *_):
        if grad_o is None:
            return (None,) * 7
        q, k, v, ridge, x, cu_seqlens_q, cu_seqlens_k, saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[:5]
        grad_o = grad_o.contiguous()
        with _ops._below_autograd():
            *gradients, row_info = _ops.backward(grad_o, q, k, v, ridge, x, saved, cu_seqlens_q, cu_seqlens_k, *ctx.options,
                                                 *needed[:3], needed[3] or needed[4], True)
        call = _Call(q, k, v, ridge, x, (cu_seqlens_q, cu_seqlens_k, *ctx.options))
        call.grad_o = grad_o
        names = ("dq", "dk", "dv", "dridge" if x is None else "dx")
        wanted = (*needed[:3], needed[3] or needed[4])
        results = {name: gradient for name, gradient, want in zip(names, gradients, wanted) if want}
        # A gradient that comes in as Inf or NaN, as GradScaler provokes, is none of this call's doing.
        given = ctx.looker.mode is None or bool(torch.isfinite(grad_o).all())
        ctx.looker.look("backward", call, results, row_info, given)
        dq, dk, dv, dlast = gradients
        return (dq if needed[0] else None, dk if needed[1] else None, dv if needed[2] else None,
                dlast if needed[3] else None, dlast if needed[4] else None, None, None)


@torch.compiler.disable
def attend(args, save, check):
    """(o, row information) of a watched call; args as in `_ops.run_forward`."""
    looker = _Watch(check)
    q, k, v, ridge, x, *rest = args
    if looker.mode and q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("check waits for the device, which a CUDA graph capture cannot: capture without it")
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError("check and count_rows do not work inside torch.func transforms")
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v, x = (_ops.autocast_to(t, dtype) for t in (q, k, v, x))
        ridge = _ops.autocast_to(ridge, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        try:
            if save:
                return _Watched.apply(q, k, v, ridge, x, tuple(rest), looker)
            with _ops._below_autograd():
                o, _, row_info = _ops.forward(q, k, v, ridge, x, *rest, False, True)
        except CheckError:
            raise
        except RuntimeError as error:
            raise_ours(error)
    looker.look("forward", _Call(q, k, v, ridge, x, tuple(rest)), {"o": o}, row_info)
    return o, row_info


# ---- looking ---------------------------------------------------------------------------------------------------------

def _first_bad(call, results, row_info):
    """None, or (what, position, head, batch) of the first element that is not finite or row that was not solved."""
    status = row_info[2]
    fine = torch.stack([torch.isfinite(t).all() for t in results.values() if t.numel()] + [(status == 0).all()]).all()
    if bool(fine):  # the one wait for the device
        return None
    for name, tensor in results.items():
        bad = ~torch.isfinite(tensor)
        if not bool(bad.any()):
            continue
        if tensor.dim() < 2:  # dridge of one number, or by head: the rows say more
            return name, None, int(bad.nonzero()[0][0]) if tensor.dim() else None, None
        index = bad.nonzero()[0].tolist()
        batch = None if call.packed else index.pop(0)
        return name, index[0], index[1], batch
    row = int((status != 0).nonzero()[0])
    length = call.q.shape[0 if call.packed else 1]
    heads = call.q.shape[-2]
    return "status", row % length, row // length % heads, None if call.packed else row // (length * heads)


def _row_index(call, position, head, batch):
    length, heads = call.q.shape[0 if call.packed else 1], call.q.shape[-2]
    return (0 if batch is None else batch) * heads * length + head * length + position


def _describe(call, found, row_info):
    what, position, head, batch = found
    by_key = what in ("dk", "dv")
    place = [] if batch is None else [f"batch entry {batch}"]
    place += [] if head is None else [f"{'key ' if by_key else ''}head {head}"]
    place += [] if position is None else [f"{'key' if by_key else 'row'} {position}"]
    text = ", ".join(place) or "all rows"
    if what == "status":
        return f"{text}: the solve did not end well"
    return f"{text}: {what} is not finite"


def _row_text(call, found, row_info):
    what, position, head, batch = found
    if position is None or what in ("dk", "dv"):
        return ""
    iterations, residual, status = row_info[:, _row_index(call, position, head, batch)].tolist()
    residual = float(np.array(residual, dtype=np.int32).view(np.float32))
    solved = "solved directly" if iterations < 0 else f"{iterations} iterations, residual {residual:.1e}"
    return f"; status {STATUS_NAMES[status]}, {solved}"


def _report(looker, direction, call, found, row_info):
    global _warned
    if looker.mode == "warn" and _warned:
        return
    _warned = looker.mode == "warn"
    path, head_inputs = _save(looker.number, direction, call, found)
    bad_inputs = [name for name, values in head_inputs.items() if not bool(torch.isfinite(values).all()) and name != "ridge"]
    unsolved = int((row_info[2] != 0).sum())
    message = (f"lla: call {looker.number} of this process, {direction}, {_describe(call, found, row_info)}"
               f"{_row_text(call, found, row_info)} ({unsolved} of {row_info.shape[1]} rows report no solution). ")
    if bad_inputs:
        message += f"Not finite before the call: {', '.join(bad_inputs)}. "
    if isinstance(path, OSError):
        message, path = message + f"The inputs of that head could not be saved: {path}; LLA_CHECK_DIR names a folder", None
    else:
        message += f"Inputs of that head: {path}; run it again with: lla check --replay {path}"
    where = dict(zip(("what", "position", "head", "batch"), found), call=looker.number, direction=direction)
    if looker.mode == "raise":
        raise CheckError(message, path, where)
    warnings.warn(message, CheckWarning, stacklevel=1 + _frames_of_ours())


def _frames_of_ours():
    """How many frames from the caller's on are this package's or torch's: behind them is the line that a warning is for."""
    folders = tuple(os.path.dirname(module.__file__) + os.sep for module in (_case, torch))
    count, frame = 0, sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(folders):
        count, frame = count + 1, frame.f_back
    return count


# ---- saving ----------------------------------------------------------------------------------------------------------

def _head_inputs(call, found):
    """The tensors of the head in question: (length, channels), the ridge (length,), (length, channels) or ()."""
    what, position, head, batch = found
    group = call.q.shape[-2] // call.k.shape[-2]
    head = 0 if head is None else head
    key_head = head if what in ("dk", "dv") else head // group
    head = key_head * group if what in ("dk", "dv") else head
    if call.cache[0] is not None:
        return _cached_inputs(call, position or 0, head, key_head, batch)
    if call.packed:
        rows, keys = _sequence(call, position or 0, what in ("dk", "dv"))
        q, k, v = call.q[rows, head], call.k[keys, key_head], call.v[keys, key_head]
        by_row = lambda t: t[rows, head]  # noqa: E731
    else:
        batch = 0 if batch is None else batch
        q, k, v = call.q[batch, :, head], call.k[batch, :, key_head], call.v[batch, :, key_head]
        by_row = lambda t: t[batch, :, head]  # noqa: E731
    inputs = {"q": q, "k": k, "v": v, **_given(call, head, by_row)}
    if call.grad_o is not None:
        inputs["grad_o"] = by_row(call.grad_o)
    return inputs


def _given(call, head, by_row):
    """x or the ridge of a head."""
    if call.x is not None:
        return {"x": by_row(call.x)}
    ridge = call.ridge
    return {"ridge": ridge if ridge.dim() == 0 else ridge[head] if ridge.dim() == 1 else by_row(ridge)}


def _cached_inputs(call, position, head, key_head, batch):
    """The same of a call over a cache: the keys that the sequence's rows may see."""
    lengths, table, first_key, _ = call.cache
    if call.packed:
        starts = call.rest[0].tolist()
        batch = max(i for i, start in enumerate(starts[:-1]) if start <= position)
        by_row = lambda t: t[starts[batch]:starts[batch + 1], head]  # noqa: E731
    else:
        batch = 0 if batch is None else batch
        by_row = lambda t: t[batch, :, head]  # noqa: E731
    length, first = int(lengths[batch]), 0 if first_key is None else int(first_key[batch])

    def keys(cache):
        if table is not None:
            pages = table[batch, :-(-length // cache.shape[1])].clamp(0, cache.shape[0] - 1).long()
            cache = cache[pages].flatten(0, 1)[None]
        return cache[batch if table is None else 0, first:length, key_head]

    return {"q": by_row(call.q), "k": keys(call.k), "v": keys(call.v), **_given(call, head, by_row)}


def _sequence(call, position, by_key):
    starts_q, starts_k = call.rest[0].tolist(), call.rest[1].tolist()
    starts = starts_k if by_key else starts_q
    index = max(i for i, start in enumerate(starts[:-1]) if start <= position)
    return slice(starts_q[index], starts_q[index + 1]), slice(starts_k[index], starts_k[index + 1])


def _as_numpy(tensor: Tensor):
    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _save(number, direction, call, found):
    inputs = _head_inputs(call, found)
    _, _, _, _, scale, causal, left, right, tol, max_iterations, solver, *_ = call.rest
    options = [np.nan if scale is None else scale, causal, left, right, np.nan if tol is None else tol,
               max_iterations, _SOLVERS.index(solver)]
    arrays = {name: _as_numpy(tensor) for name, tensor in inputs.items()}
    arrays["options"] = np.array(options, dtype=np.float64)
    folder = os.environ.get("LLA_CHECK_DIR", ".")
    path = os.path.join(folder, f"lla-check-{os.getpid()}-{number}-{direction}.bin")
    try:
        _case.write(path, arrays)
    except OSError as error:  # what was found is worth more than its file
        return error, inputs
    return path, inputs
