"""Attention over key-value caches, contiguous or paged, and appending to them: thin calls on the forward operator, which
reads lengths and pages where they are. Nothing is gathered, and nothing waits for the device."""
import contextlib
from typing import Optional, Tuple, Union

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import _ops, debug
from ._errors import call, need_tensor, raise_ours
from .functional import DEFAULT_OPTIONS, Ridge, _allows_tf32, _check_cu_seqlens, _check_max_seqlen, _options, _ridge_tensor, attend


_NOTHING = contextlib.nullcontext()
_NAMES = {"seqlens": "cache_seqlens", "seqlens_k": "cache_seqlens"}  # the library's, and these functions'
_DEFAULTS = (*DEFAULT_OPTIONS, False, False)  # and neither TF32 nor batch_invariant


def _lengths(name, value, batch, device, bound_wanted=True):
    """(int32 (batch,) on the device, the longest where the host knows it and it is wanted, else None)."""
    if isinstance(value, Tensor):
        if value.shape != (batch,) or value.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be an int32 ({batch},) tensor, not {value.dtype} {tuple(value.shape)}")
        on_host = bound_wanted and value.is_cpu and batch > 0 and not torch.compiler.is_compiling()
        longest = int(value.max()) if on_host else None
        if value.dtype == torch.int64:  # what 32 bits cannot hold must not come out as another length
            value = value.clamp(-1, 2**31 - 1)
        return value if value.dtype == torch.int32 and value.device == device else value.to(device, torch.int32), longest
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer, a tensor or None, not {type(value).__name__}")
    if isinstance(value, int) and not 0 <= value < 2**31:
        raise ValueError(f"{name} must be a length, not {value}")
    return torch.full((batch,), value, dtype=torch.int32, device=device), value


def _page_table(page_table):
    if page_table is None:
        return None
    need_tensor("page_table", page_table)
    if page_table.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"page_table must be int32 or int64, not {page_table.dtype}")
    if page_table.dtype == torch.int64:  # what 32 bits cannot hold is no page either
        page_table = page_table.clamp(-1, 2**31 - 1)
    return page_table.to(torch.int32)


def _refuse_gradients(tensors):
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors if isinstance(t, Tensor)):
        raise ValueError("attention over a cache has no gradient: call it under torch.no_grad(), or use lla_attention")


def _note_writing(*caches):
    """Torch does not see what our operators write: a backward pass that saved the caches is to notice."""
    if not torch.compiler.is_compiling():
        increment_version(caches)


def cache_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *,
                 cache_seqlens: Optional[Union[int, Tensor]] = None, slots: Optional[Tensor] = None,
                 page_table: Optional[Tensor] = None, cu_seqlens: Optional[Tensor] = None):
    """Writes new keys and values into a cache in place: k (B, Lnew, Hkv, D) and v alike, or packed (total, Hkv, D) with
    cu_seqlens. cache_seqlens: how many positions of each sequence are filled; new token t of sequence b becomes key
    cache_seqlens[b] + t. Or slots (int64, one per token): page * page_size + offset, -1 to skip a token.
    On the CPU a call of which a token does not fit raises and writes nothing. On CUDA, where lengths and pages are read
    on the device, a sequence (with slots a token) that does not fit writes nothing and the others proceed."""
    for name, tensor in (("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        need_tensor(name, tensor)
    _refuse_gradients((k, v, k_cache, v_cache))
    packed = cu_seqlens is not None
    if packed:
        _check_cu_seqlens("cu_seqlens", cu_seqlens)
    lengths = None
    if cache_seqlens is not None:
        if k.dim() != (3 if packed else 4):
            raise ValueError(f"k has {k.dim()} dimensions, not {3 if packed else 4}")
        batch = cu_seqlens.shape[0] - 1 if packed else k.shape[0]
        lengths, _ = _lengths("cache_seqlens", cache_seqlens, batch, k.device)
    call(_ops.cache_append, k, v, k_cache, v_cache, lengths, slots, _page_table(page_table), cu_seqlens, names=_NAMES)
    _note_writing(k_cache, v_cache)


def _check_given(q, k_cache, v_cache, k, v, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, learned):
    """What must be known before anything is looked at."""
    need_tensor("q", q)
    need_tensor("k_cache", k_cache)
    need_tensor("v_cache", v_cache)
    if (k is None) != (v is None):
        raise ValueError("give both k and v or neither")
    if (cu_seqlens_q is None) != (max_seqlen_q is None):
        raise ValueError("give both cu_seqlens_q and max_seqlen_q or neither")
    if cu_seqlens_q is not None:
        _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q)
        _check_max_seqlen("max_seqlen_q", max_seqlen_q)
    if cache_seqlens is None and (k is not None or page_table is not None):
        raise ValueError("cache_seqlens is needed " + ("to append k and v: it says where they go" if k is not None
                                                       else "with a page_table"))
    if k is not None:
        need_tensor("k", k)
        need_tensor("v", v)
    rank = 4 if cu_seqlens_q is None else 3
    if q.dim() != rank:
        raise ValueError(f"q has {q.dim()} dimensions, not {rank}")
    if k_cache.dim() != 4:
        raise ValueError(f"k_cache has {k_cache.dim()} dimensions, not 4")
    _refuse_gradients((q, k_cache, v_cache, k, v, *learned))


def _check_cache(q, k_cache, v_cache, k, v, page_table, batch):
    """In these functions' words what the library refuses in its own; asked where it did, or cannot yet."""
    if v_cache.dim() != 4 or v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(f"v_cache is {tuple(v_cache.shape)} and does not go with k_cache, {tuple(k_cache.shape)}")
    if page_table is None and k_cache.shape[0] != batch:
        raise ValueError(f"k_cache has batch {k_cache.shape[0]}, but there are {batch} sequences")
    if page_table is not None and (page_table.dim() != 2 or page_table.shape[0] != batch):
        raise ValueError(f"page_table is {tuple(page_table.shape)}, not (batch {batch}, pages)")
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if tensor is None:
            continue
        if tensor.dim() != q.dim() or tensor.shape[-2:] != cache.shape[-2:]:
            raise ValueError(f"{name} is {tuple(tensor.shape)} and does not fit {name}_cache, {tuple(cache.shape)}")
        if tensor.dtype != cache.dtype:
            raise ValueError(f"{name} is {tensor.dtype} but {name}_cache is {cache.dtype}; make the cache with dtype="
                             f"{tensor.dtype}, or convert {name}")


def _step(q, k_cache, v_cache, ridge, x, k, v, lengths, cu_seqlens_q, max_seqlen_q, max_seqlen_k, options, return_info,
          check, precision, batch_invariant, pages):
    """(o, AttentionInfo or None) of queries whose keys and values, if any are new, are written first behind `lengths`. A
    plain call that writes is one operator, which counts the new ones itself; others are the operators it is made of.
    pages: page_table, first_key and max_total_k."""
    if k is not None:
        if ridge is not None:
            ridge = _ridge_tensor(ridge, q)
        arguments = (q, k_cache, v_cache, ridge, x, cu_seqlens_q, None, max_seqlen_q, max_seqlen_k)
        rest = (*options, _allows_tf32(precision, q), batch_invariant)
        if not return_info and not debug.looks(check) and _ops.is_plain(q):
            # Each argument left out saves 0.1 us. (The tensors first: to compare one with None takes 10.)
            if pages[0] is None and pages[1] is None and pages[2] == 0 and rest == _DEFAULTS:
                o = _ops.append_inference(k, v, lengths, *arguments)
            else:
                o = _ops.append_inference(k, v, lengths, *arguments, *rest, None, *pages)
            _note_writing(k_cache, v_cache)
            return o, None
        arguments += rest
        before = lengths
        lengths = before + (k.shape[1] if cu_seqlens_q is None else cu_seqlens_q[1:] - cu_seqlens_q[:-1])
        if not torch.compiler.is_compiling():  # what the attention would refuse is refused before anything is written
            _ops.check_call(*arguments, lengths, *pages)
        _ops.cache_append(k, v, k_cache, v_cache, before, None, pages[0], cu_seqlens_q)
        _note_writing(k_cache, v_cache)
    return attend(q, k_cache, v_cache, ridge, x, cu_seqlens_q, None, max_seqlen_q, max_seqlen_k, options, return_info,
                  check, precision, batch_invariant, (lengths, *pages))


def _attend_cache(q, k_cache, v_cache, ridge, x, k, v, cache_seqlens, page_table, first_key, cu_seqlens_q, max_seqlen_q,
                  max_seqlen_k, max_total_k, options, return_info, check, precision, batch_invariant):
    _check_given(q, k_cache, v_cache, k, v, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, (ridge, x))
    device = q.device
    autocast = torch.is_autocast_enabled(device.type)
    if autocast:
        # Layers in front give autocast's type whatever the cache has; converting the new tokens is less than the cache.
        q, k, v, x = (t.to(k_cache.dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
                      for t in (q, k, v, x))
    page_table = _page_table(page_table)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if torch.compiler.is_compiling():  # where an error of the library cannot be caught
        _check_cache(q, k_cache, v_cache, k, v, page_table, batch)
    capacity = k_cache.shape[1]
    if page_table is not None:
        capacity *= page_table.shape[-1]
    lengths, longest = _lengths("cache_seqlens", capacity if cache_seqlens is None else cache_seqlens, batch, device,
                                max_seqlen_k is None)
    if k is not None and longest is not None:
        longest = longest + k.shape[1] if cu_seqlens_q is None else None
    if isinstance(longest, int) and longest > capacity:
        raise ValueError(f"cache_seqlens: sequences of up to {longest} positions do not fit a cache of {capacity}")
    if max_seqlen_k is None:
        max_seqlen_k = 0 if longest is None else longest
    else:
        _check_max_seqlen("max_seqlen_k", max_seqlen_k)
    if first_key is not None:
        first_key = _lengths("first_key", first_key, batch, device, False)[0]
    if max_total_k is not None:
        _check_max_seqlen("max_total_k", max_total_k)
    try:
        with torch.autocast(device.type, enabled=False) if autocast else _NOTHING:
            o, info = _step(q, k_cache, v_cache, ridge, x, k, v, lengths, cu_seqlens_q, max_seqlen_q or 0, max_seqlen_k,
                            options, return_info, check, precision, batch_invariant,
                            (page_table, first_key, max_total_k or 0))
    except (RuntimeError, ValueError) as error:
        _check_cache(q, k_cache, v_cache, k, v, page_table, batch)
        raise_ours(error, _NAMES if k is not None else {**_NAMES, "k": "k_cache", "v": "v_cache"})
    if autocast and o.dtype != torch.float64:
        o = o.to(torch.get_autocast_dtype(device.type))
    return (o, info) if return_info else o


def lla_attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, ridge: Ridge, k: Optional[Tensor] = None, v: Optional[Tensor] = None,
    *, cache_seqlens: Optional[Union[int, Tensor]] = None, page_table: Optional[Tensor] = None,
    first_key: Optional[Union[int, Tensor]] = None, cu_seqlens_q: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None, max_total_k: Optional[int] = None,
    scale: Optional[float] = None, causal: bool = True, window_size: Tuple[int, int] = (-1, -1), tol: Optional[float] = None,
    max_iterations: Optional[int] = None, solver: str = "auto", implementation: Optional[str] = None,
    return_info: bool = False, check: Optional[str] = None, precision: Optional[str] = None,
    batch_invariant: bool = False,
):
    """`lla_attention` of new queries over cached keys and values, for generation (no gradients).

    q (B, Lq, Hq, D), or packed (total_q, Hq, D) with cu_seqlens_q (int32, sequences + 1) and max_seqlen_q: then one call
    serves sequences with one new token beside sequences with many. k_cache (B, capacity, Hkv, D), or pages
    (pages, page_size, Hkv, D) with a page_table (B, n) of page numbers; v_cache alike; any strides.
    cache_seqlens: how many positions are filled, one integer or a (B,) int32 tensor; None means all. k and v
    (B, Lnew, Hkv, ...), packed like q where that is packed, are written into the caches in place after them and are then
    seen too. Each sequence's queries are its last positions (causal masks are aligned bottom-right); keys before
    first_key (B,) are invisible (left padding). ridge, check, precision and batch_invariant as in `lla_attention`.

    Tensors of lengths and pages stay on their device. The host knows bounds only: max_seqlen_k of the lengths (the
    capacity unless given) and max_total_k of the keys of all sequences that do not decode; both size the workspace.
    On CUDA the rows of a sequence that breaks a bound or names a page that is not there are NaN with status "invalid", and
    the other sequences do not change; on the CPU the call raises. A call that raises has not written to the caches.
    Under autocast q, k and v may have another type than the caches."""
    options = _options(scale, causal, window_size, tol, max_iterations, solver, implementation)
    return _attend_cache(q, k_cache, v_cache, ridge, None, k, v, cache_seqlens, page_table, first_key, cu_seqlens_q,
                         max_seqlen_q, max_seqlen_k, max_total_k, options, return_info, check, precision,
                         batch_invariant)


def parallax_attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, x: Tensor, k: Optional[Tensor] = None, v: Optional[Tensor] = None, *,
    cache_seqlens: Optional[Union[int, Tensor]] = None, page_table: Optional[Tensor] = None,
    first_key: Optional[Union[int, Tensor]] = None, cu_seqlens_q: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None, max_total_k: Optional[int] = None,
    scale: Optional[float] = None, causal: bool = True, window_size: Tuple[int, int] = (-1, -1),
    implementation: Optional[str] = None, check: Optional[str] = None, precision: Optional[str] = None,
    batch_invariant: bool = False,
):
    """`parallax_attention` over cached keys and values: x is given, shaped like q; the rest as in
    `lla_attention_with_kvcache`."""
    need_tensor("x", x)
    options = _options(scale, causal, window_size, None, None, "auto", implementation)
    return _attend_cache(q, k_cache, v_cache, None, x, k, v, cache_seqlens, page_table, first_key, cu_seqlens_q,
                         max_seqlen_q, max_seqlen_k, max_total_k, options, False, check, precision, batch_invariant)
