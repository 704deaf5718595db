"""Attention over a key-value cache, contiguous or paged, with new keys and values appended in place.

For now the cache is attended through the forward operator: equal lengths without a copy, unequal ones by gathering the
cache into a packed batch. No device synchronisation either way."""
from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from . import _ops
from ._errors import call, need_tensor
from .functional import AttentionInfo, Ridge, _options, _ridge_tensor, attend


def _check_cache(q, k_cache, v_cache, k, v, cache_seqlens, page_table):
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        need_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(f"{name} has {tensor.dim()} dimensions, not 4")
    batch = q.shape[0]
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(f"v_cache is {tuple(v_cache.shape)} and does not go with k_cache, {tuple(k_cache.shape)}")
    if (k is None) != (v is None):
        raise ValueError("give both k and v or neither")
    if page_table is None:
        if k_cache.shape[0] != batch:
            raise ValueError(f"k_cache has batch {k_cache.shape[0]} but q has {batch}")
    else:
        need_tensor("page_table", page_table)
        if page_table.dim() != 2 or page_table.shape[0] != batch:
            raise ValueError(f"page_table is {tuple(page_table.shape)}, not (batch {batch}, pages)")
        if page_table.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"page_table must be int32 or int64, not {page_table.dtype}")
        if cache_seqlens is None:
            raise ValueError("cache_seqlens is needed with a page_table")
    if k is not None:
        need_tensor("k", k)
        need_tensor("v", v)
        if cache_seqlens is None:
            raise ValueError("cache_seqlens is needed to append k and v: it says where they go")
        for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
            if tensor.dim() != 4 or tensor.shape[0] != batch or tensor.shape[2:] != cache.shape[2:]:
                raise ValueError(f"{name} is {tuple(tensor.shape)} and does not fit {name}_cache, {tuple(cache.shape)}")
            if tensor.dtype != cache.dtype:
                raise ValueError(f"{name} is {tensor.dtype} but {name}_cache is {cache.dtype}; make the cache with dtype="
                                 f"{tensor.dtype}, or convert {name}")
        if v.shape[1] != k.shape[1]:
            raise ValueError(f"v has length {v.shape[1]} but k has {k.shape[1]}")
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.shape != (batch,) or cache_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"cache_seqlens must be an int32 ({batch},) tensor, not {cache_seqlens.dtype} "
                             f"{tuple(cache_seqlens.shape)}")
    elif cache_seqlens is not None and (isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, int)):
        raise TypeError(f"cache_seqlens must be an integer, a tensor or None, not {type(cache_seqlens).__name__}")


def _capacity(k_cache, page_table):
    return k_cache.shape[1] if page_table is None else page_table.shape[1] * k_cache.shape[1]


def _check_lengths(cache_seqlens, appended, capacity):
    """Where the lengths are on the host. On a GPU, an append beyond the cache is caught by torch's index check."""
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.device.type != "cpu" or torch.compiler.is_compiling() or cache_seqlens.numel() == 0:
            return
        low, high = int(cache_seqlens.min()), int(cache_seqlens.max())
    else:
        low = high = cache_seqlens
    if low < 0 or high + appended > capacity:
        raise ValueError(f"cache_seqlens {low} to {high} and {appended} new positions do not fit a cache of {capacity}")


def _check_pages(page_table, lengths, pages, page_size):
    """The entries in use must be pages; those behind may hold anything (-1, usually). Where the table is on the host."""
    if page_table.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if isinstance(lengths, Tensor):
        if lengths.device.type != "cpu":
            return
        used = torch.arange(page_table.shape[1])[None, :] < -(-lengths[:, None] // page_size)
        entries = page_table[used]
    else:
        entries = page_table[:, :-(-lengths // page_size)]
    if entries.numel() and (int(entries.min()) < 0 or int(entries.max()) >= pages):
        bad = entries[(entries < 0) | (entries >= pages)]
        raise ValueError(f"page_table has page {int(bad.flatten()[0])} in use, but there are pages 0 to {pages - 1}")


def _check_call(q, k_cache, v_cache, ridge, page_table, options):
    """Whatever the attention would refuse is refused before the caches are written to."""
    if torch.compiler.is_compiling():
        return  # the trace has asked the same
    if page_table is not None:  # any page stands for all: their contents are not looked at
        k_cache, v_cache = (cache[:1].expand(q.shape[0], -1, -1, -1) for cache in (k_cache, v_cache))
    call(_ops.plan, q, k_cache, v_cache, _ridge_tensor(ridge, q), None, None, None, 0, 0, *options, False)


def _append(k_cache, v_cache, k, v, cache_seqlens, page_table):
    if page_table is None and not isinstance(cache_seqlens, Tensor):
        k_cache[:, cache_seqlens:cache_seqlens + k.shape[1]].copy_(k)
        v_cache[:, cache_seqlens:cache_seqlens + k.shape[1]].copy_(v)
        return
    steps = torch.arange(k.shape[1], device=k.device)[None, :]
    start = cache_seqlens.to(torch.int64)[:, None] if isinstance(cache_seqlens, Tensor) else cache_seqlens
    positions = (steps + start).expand(k.shape[0], -1)
    page_size = k_cache.shape[1]
    if page_table is None:
        first, second = torch.arange(k.shape[0], device=k.device)[:, None], positions
    else:
        first = page_table.to(torch.int64).gather(1, positions // page_size)
        second = positions % page_size
        if first.device.type == "cpu" and not torch.compiler.is_compiling():
            places = first * page_size + second
            if places.unique().numel() < places.numel():
                raise ValueError("page_table gives new positions of two sequences the same place in one page")
    k_cache[first, second] = k
    v_cache[first, second] = v


def _attend_equal(q, k_cache, v_cache, ridge, length, page_table, options, return_info, check):
    if page_table is None:
        keys, values = k_cache[:, :length], v_cache[:, :length]
    else:
        pages = page_table[:, :-(-length // k_cache.shape[1])].to(torch.int64)
        keys, values = (cache[pages].flatten(1, 2)[:, :length] for cache in (k_cache, v_cache))
    return attend(q, keys, values, ridge, None, None, None, 0, 0, options, return_info, check)


def _attend_unequal(q, k_cache, v_cache, ridge, lengths, page_table, options, return_info, check):
    """Lengths (B,) known to the device only: every packed row finds its sequence and its row of the cache there."""
    batch, length_q, heads = q.shape[:3]
    capacity = _capacity(k_cache, page_table)
    ends = torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))
    packed_rows = batch * capacity if q.device.type != "cpu" else int(ends[-1])
    packed = torch.arange(packed_rows, device=q.device)
    sequence = torch.searchsorted(ends, packed, right=True).sub_(1).clamp_(max=batch - 1)
    position = (packed - ends[sequence]).clamp_(max=capacity - 1)
    if page_table is None:
        source = sequence * capacity + position
    else:
        page_size = k_cache.shape[1]
        source = page_table.to(torch.int64)[sequence, position // page_size] * page_size + position % page_size
    source = torch.where(packed < ends[-1], source, 0)  # rows past the end belong to no sequence
    keys, values = (cache.flatten(0, 1).index_select(0, source) for cache in (k_cache, v_cache))
    cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length_q
    if isinstance(ridge, Tensor) and ridge.dim() >= 3:
        ridge = ridge.flatten(0, 1)
    o, info = attend(q.flatten(0, 1), keys, values, ridge, None, cu_seqlens_q, ends.to(torch.int32), length_q,
                     capacity, options, return_info, check)
    if info is not None:
        by_batch = (rows.view(heads, batch, length_q).transpose(0, 1) for rows in info[:3])
        info = AttentionInfo(*by_batch, info.plan_bytes)
    return o.unflatten(0, (batch, length_q)), info


def lla_attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, ridge: Ridge, k: Optional[Tensor] = None, v: Optional[Tensor] = None,
    *, cache_seqlens: Optional[Union[int, Tensor]] = None, page_table: Optional[Tensor] = None,
    scale: Optional[float] = None, causal: bool = True, window_size: Tuple[int, int] = (-1, -1), tol: Optional[float] = None,
    max_iterations: Optional[int] = None, solver: str = "auto", implementation: Optional[str] = None,
    return_info: bool = False, check: Optional[str] = None,
):
    """`lla_attention` of new queries over cached keys and values, for generation (no gradients).

    q (B, Lq, Hq, D); k_cache (B, capacity, Hkv, D), or pages (pages, page_size, Hkv, D) with a page_table (B, n) of
    page numbers; v_cache alike. cache_seqlens: how many positions are filled, one integer or a (B,) int32 tensor; None
    means all. k and v (B, Lnew, Hkv, ...), if given, are written into the caches in place after them and are then seen too.
    The queries are the last Lq positions (causal masks are aligned bottom-right). ridge and check as in
    `lla_attention`.
    A call that is refused has not written to the caches. Under autocast q, k and v may have another type than the caches."""
    if isinstance(q, Tensor) and isinstance(k_cache, Tensor) and torch.is_autocast_enabled(q.device.type):
        # Layers in front give autocast's type whatever the cache has; the attention goes to autocast's type in any case.
        q, k, v = (t.to(k_cache.dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in (q, k, v))
    _check_cache(q, k_cache, v_cache, k, v, cache_seqlens, page_table)
    learned = [t for t in (q, k_cache, v_cache, ridge, k, v) if isinstance(t, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in learned):
        raise ValueError("lla_attention_with_kvcache has no gradient: call it under torch.no_grad(), or use "
                         "lla_attention")
    appended = 0 if k is None else k.shape[1]
    capacity = _capacity(k_cache, page_table)
    if cache_seqlens is None:
        cache_seqlens = capacity
    _check_lengths(cache_seqlens, appended, capacity)
    options = _options(scale, causal, window_size, tol, max_iterations, solver, implementation)
    lengths = cache_seqlens + appended
    if page_table is not None:
        _check_pages(page_table, lengths, *k_cache.shape[:2])
    if k is not None:
        _check_call(q, k_cache, v_cache, ridge, page_table, options)
        _append(k_cache, v_cache, k, v, cache_seqlens, page_table)
    attend_cache = _attend_unequal if isinstance(lengths, Tensor) else _attend_equal
    o, info = attend_cache(q, k_cache, v_cache, ridge, lengths, page_table, options, return_info, check)
    return (o, info) if return_info else o
