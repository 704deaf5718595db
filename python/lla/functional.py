"""Local Linear Attention on torch tensors. Layout (batch, length, heads, dim), as in flash-attention."""
import numbers
from typing import NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from . import _ops, debug
from ._errors import call, need_tensor
from .debug import STATUS_NAMES  # noqa: F401

Ridge = Union[float, Tensor]


class BackwardInfo:
    """How the solve of a call's (last) backward pass went: iterations, residual and status as in `AttentionInfo`, None
    before there was one."""

    iterations: Optional[Tensor] = None
    residual: Optional[Tensor] = None
    status: Optional[Tensor] = None


class AttentionInfo(NamedTuple):
    """How a call was solved. iterations, residual and status are (B, Hq, Lq), packed (Hq, total_q); iterations and
    residual are -1 where a row was solved directly; status holds indices into `lla.STATUS_NAMES`. backward is None for
    calls without gradients and in code that is traced or transformed (torch.compile, torch.func, autocast)."""

    iterations: Tensor
    residual: Tensor
    status: Tensor
    plan_bytes: Tensor
    backward: Optional[BackwardInfo] = None

    @property
    def plan(self) -> str:
        """The plan as text: implementation, solver, tile sizes, workspace."""
        return bytes(self.plan_bytes.tolist()).rstrip(b"\0").decode()


# Also numpy's, which are neither int nor float. (The first two are found without asking the third, which takes longer.)
REAL = (int, float, numbers.Real)


def _as_float(name, number):
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{name} is an integer beyond what a float holds") from None


def _ridge_tensor(ridge, q):
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if isinstance(ridge, Tensor):
        if ridge.dtype == torch.bool or ridge.dtype.is_complex:
            raise TypeError(f"ridge must hold real numbers, not {ridge.dtype}")
        return ridge if ridge.dtype == dtype else ridge.to(dtype)
    if isinstance(ridge, bool) or not isinstance(ridge, REAL):
        raise TypeError(f"ridge must be a number or a torch.Tensor, not {type(ridge).__name__}")
    if not ridge >= 0:
        raise ValueError(f"ridge must be at least 0, not {ridge}")
    return torch.full((), _as_float("ridge", ridge), dtype=dtype, device=q.device)


def _window(window_size):
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be a pair (left, right), not {window_size!r}") from None
    for side in (left, right):
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)):
            raise TypeError(f"window_size must hold integers, not {type(side).__name__}")
    if left < -1 or right < -1:
        raise ValueError(f"window_size must be at least -1 (unbounded) on each side, not {tuple(window_size)}")
    # The operator takes 64 bits; more than that is as unbounded.
    return tuple(min(side, 2**63 - 1) if isinstance(side, int) else side for side in (left, right))


@torch.compiler.assume_constant_result
def _torch_allows_tf32():
    """What torch was told of its own float32 products. The newer setting answers for both ways of setting it."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _allows_tf32(precision, q):
    """Whether float32 tensors may be rounded to TF32: precision if given, else as torch's own products."""
    if precision is None:
        return q.dtype == torch.float32 and q.is_cuda and _torch_allows_tf32()
    if precision not in ("full", "tf32"):
        raise ValueError(f'precision must be "full", "tf32" or None, not {precision!r}')
    return precision == "tf32"


DEFAULT_OPTIONS = (None, True, -1, -1, None, 0, "auto", None)


def _options(scale, causal, window_size, tol, max_iterations, solver, implementation):
    """The option arguments of the operators but for TF32, checked for type."""
    if (tol is max_iterations is implementation is None and causal is True and window_size == (-1, -1)
            and solver == "auto" and (scale is None or type(scale) is float)):
        # What nearly every call gives, without the questions.
        return DEFAULT_OPTIONS if scale is None else (scale, *DEFAULT_OPTIONS[1:])
    if scale is not None and (isinstance(scale, (bool, Tensor)) or not isinstance(scale, REAL)):
        raise TypeError(f"scale must be a number or None, not {type(scale).__name__}")
    scale = scale if scale is None or isinstance(scale, float) else _as_float("scale", scale)
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, not {type(causal).__name__}")
    if tol is not None and (isinstance(tol, bool) or not isinstance(tol, REAL)):
        raise TypeError(f"tol must be a number or None, not {type(tol).__name__}")
    tol = tol if tol is None or isinstance(tol, float) else _as_float("tol", tol)
    if max_iterations is not None:
        if isinstance(max_iterations, bool) or not isinstance(max_iterations, int):
            raise TypeError(f"max_iterations must be an integer or None, not {type(max_iterations).__name__}")
        if not 1 <= max_iterations < 2**31:
            raise ValueError(f"max_iterations must be between 1 and 2**31 - 1, not {max_iterations}")
    if not isinstance(solver, str):
        raise TypeError(f"solver must be a string, not {type(solver).__name__}")
    if implementation is not None and not isinstance(implementation, str):
        raise TypeError(f"implementation must be a string or None, not {type(implementation).__name__}")
    return scale, causal, *_window(window_size), tol, max_iterations or 0, solver, implementation


def _row_tensors(rows, shape):
    """iterations, residual and status from the operators' one tensor."""
    iterations, residual, status = rows.unflatten(1, shape).unbind(0)
    return iterations, residual.view(torch.float32), status


def attend(q, k, v, ridge, x, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options, return_info,
           check=None, precision=None, batch_invariant=False, cache=_ops.NO_CACHE):
    """The one way to the operator: (o, AttentionInfo or None). `options` comes from `_options`; check, precision and
    batch_invariant as in `lla_attention`; cache: (seqlens_k, page_table, first_key, max_total_k) where k and v are one."""
    need_tensor("q", q)
    need_tensor("k", k)
    need_tensor("v", v)
    if x is None:
        ridge = _ridge_tensor(ridge, q)
    else:
        need_tensor("x", x)
    save = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (ridge if x is None else x).requires_grad)
    args = (q, k, v, ridge, x, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options,
            _allows_tf32(precision, q), batch_invariant, *cache)
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    backward = None
    if not debug.looks(check):
        report = None
        if return_info and save and _ops.is_eager(q):
            backward = BackwardInfo()

            def report(rows):
                backward.iterations, backward.residual, backward.status = _row_tensors(rows, shape)

        o, row_info = _ops.run_forward(args, save, return_info, report)
    else:
        o, row_info = debug.attend(args, save, check)
    if not return_info:
        return o, None
    return o, AttentionInfo(*_row_tensors(row_info, shape), call(_ops.plan, *args, False), backward)


def lla_attention(
    q: Tensor, k: Tensor, v: Tensor, ridge: Ridge, *, scale: Optional[float] = None, causal: bool = True,
    window_size: Tuple[int, int] = (-1, -1), tol: Optional[float] = None, max_iterations: Optional[int] = None,
    solver: str = "auto", implementation: Optional[str] = None, return_info: bool = False, check: Optional[str] = None,
    precision: Optional[str] = None, batch_invariant: bool = False,
):
    """Local Linear Attention: each query's output is a ridge regression of values on keys, weighted by softmax.

    q (B, Lq, Hq, D), k (B, Lk, Hkv, D), v (B, Lk, Hkv, Dv); Hq a multiple of Hkv; returns (B, Lq, Hq, Dv).
    ridge: a number, or a float32 tensor (), (Hq,), (B, Lq, Hq) or (B, Lq, Hq, D); gradients reach a tensor. Infinity
    gives softmax attention, 0 the unregularised local linear fit.
    scale of the logits, 1/sqrt(D) by default. causal masks are aligned bottom-right when Lq != Lk. window_size
    (left, right) counts visible keys on each side of the diagonal, -1 for all.
    solver "auto", "cg" (stops at a relative residual of tol, or after max_iterations) or "direct". tol is 1e-3 for 16-bit
    tensors, 1e-4 for float32 and 1e-9 for float64 unless given; max_iterations max(64, 8 D).
    implementation: name one of `lla.implementations()` instead of the first that takes the problem.
    precision of float32 tensors on their way into products: "full", or "tf32" for the tensor cores' eleven bits (outputs
    stay float32; tol is then 1e-3 unless given). None: as torch.backends.cuda.matmul.fp32_precision says.
    return_info: return (o, AttentionInfo).
    batch_invariant: a sequence's bits do not depend on what else is in the batch.
    check: "raise" or "warn" at the first output or gradient that is not finite and the first solve that did not end
    well, saving its inputs (see `lla.debug`; it waits for the device). None: as the environment's LLA_CHECK says."""
    options = _options(scale, causal, window_size, tol, max_iterations, solver, implementation)
    o, info = attend(q, k, v, ridge, None, None, None, 0, 0, options, return_info, check, precision,
                     batch_invariant)
    return (o, info) if return_info else o


def _check_cu_seqlens(name, value):
    need_tensor(name, value)
    if value.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, not {value.dtype}")


def _check_max_seqlen(name, value):
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    if isinstance(value, int) and not 0 <= value < 2**63:
        raise ValueError(f"{name} must be a length, not {value}")


def lla_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, ridge: Ridge, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, *, scale: Optional[float] = None, causal: bool = True, window_size: Tuple[int, int] = (-1, -1),
    tol: Optional[float] = None, max_iterations: Optional[int] = None, solver: str = "auto",
    implementation: Optional[str] = None, return_info: bool = False, check: Optional[str] = None,
    precision: Optional[str] = None, batch_invariant: bool = False,
):
    """`lla_attention` of sequences packed one after the other: q (total_q, Hq, D), k (total_k, Hkv, D), and so on.

    cu_seqlens_q and cu_seqlens_k: int32 (sequences + 1,), starting at 0, on q's device. ridge: a number, (), (Hq,),
    (total_q, Hq) or (total_q, Hq, D). The info's row tensors are (Hq, total_q).
    The tensors may be longer than the last sequence; output and gradients are zero behind it."""
    _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q)
    _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k)
    _check_max_seqlen("max_seqlen_q", max_seqlen_q)
    _check_max_seqlen("max_seqlen_k", max_seqlen_k)
    options = _options(scale, causal, window_size, tol, max_iterations, solver, implementation)
    o, info = attend(q, k, v, ridge, None, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options, return_info,
                     check, precision, batch_invariant)
    return (o, info) if return_info else o


def parallax_attention(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, scale: Optional[float] = None, causal: bool = True,
    window_size: Tuple[int, int] = (-1, -1), implementation: Optional[str] = None, check: Optional[str] = None,
    precision: Optional[str] = None, batch_invariant: bool = False,
):
    """Attention with a given correction x (B, Lq, Hq, D) instead of a solve: o = sum_j p_j (1 + (k_j - mean k).x) v_j.
    x = 0 is softmax attention. check and precision as in `lla_attention`."""
    options = _options(scale, causal, window_size, None, None, "auto", implementation)
    return attend(q, k, v, None, x, None, None, 0, 0, options, False, check, precision, batch_invariant)[0]


def lla_attention_bhld(q: Tensor, k: Tensor, v: Tensor, ridge: Ridge, **options):
    """`lla_attention` for tensors laid out (B, H, L, D), as scaled_dot_product_attention takes them; a ridge by token
    is (B, Hq, Lq) or (B, Hq, Lq, D). Nothing is copied: the views are transposed. Returns (B, Hq, Lq, Dv)."""
    need_tensor("q", q)
    need_tensor("k", k)
    need_tensor("v", v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has {tensor.dim()} dimensions, not (batch, heads, length, dim)")
    if isinstance(ridge, Tensor) and ridge.dim() >= 3:
        ridge = ridge.transpose(1, 2)
    result = lla_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), ridge, **options)
    if isinstance(result, tuple):
        return result[0].transpose(1, 2), result[1]
    return result.transpose(1, 2)
