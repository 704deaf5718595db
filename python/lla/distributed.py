"""Local Linear Attention over sequences that are sharded between processes (torch.distributed; NCCL, Gloo).

Two ways; both equal the single-process result, forward and backward (docs/distributed.md says when to use which):

    o = lla.distributed.sequence_parallel_attention(q, k, v, ridge, group=mesh)   # gathers K and V, any number of heads
    o = lla.distributed.head_parallel_attention(q, k, v, ridge, group=mesh)       # exchanges heads for positions

Every process holds its share of the positions: q (B, L / P, Hq, D) and so on, as `shard_sequence` cuts them. The
default layout, "zigzag", gives process r the r-th and the r-th-last of 2 P pieces, so that causal work is the same for
all; "contiguous" gives it the r-th of P. A ridge by token is sharded like q; the gradient of a ridge that all processes
share, () or (Hq,), is each process's part: sum it over the group, as data-parallel training does for parameters."""
from typing import List, Tuple, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ._errors import need_tensor
from .functional import Ridge, _ridge_tensor, _window, lla_attention

Group = Union[dist.ProcessGroup, DeviceMesh, None]
LAYOUTS = ("zigzag", "contiguous")


def _process_group(group: Group) -> dist.ProcessGroup:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group is a mesh of {group.ndim} dimensions: name the one to shard over, mesh['name']")
        return group.get_group()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup, a DeviceMesh or None, not {type(group).__name__}")
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    return dist.group.WORLD if group is None else group


def _check_layout(layout):
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, not {layout!r}")


def _pieces(world: int, layout: str) -> List[List[int]]:
    """Which pieces of the sequence each process holds, in the order it holds them."""
    if layout == "contiguous":
        return [[r] for r in range(world)]
    return [[r, 2 * world - 1 - r] for r in range(world)]


def _order(world: int, layout: str) -> List[int]:
    """Where each piece of the sequence is found when the processes' shares are laid one after the other."""
    held = [piece for pieces in _pieces(world, layout) for piece in pieces]
    return [held.index(piece) for piece in range(len(held))]


def _to_sequence_order(shares: Tensor, world: int, layout: str, dim: int) -> Tensor:
    """All shares one after the other along dim -> the sequence."""
    if layout == "contiguous":
        return shares
    parts = shares.chunk(2 * world, dim)
    return torch.cat([parts[i] for i in _order(world, layout)], dim)


def _from_sequence_order(sequence: Tensor, world: int, layout: str, dim: int) -> Tensor:
    if layout == "contiguous":
        return sequence
    parts = sequence.chunk(2 * world, dim)
    return torch.cat([parts[i] for pieces in _pieces(world, layout) for i in pieces], dim)


def shard_sequence(x: Tensor, *, group: Group = None, dim: int = 1, layout: str = "zigzag") -> Tensor:
    """This process's share of a whole sequence (the same on every process)."""
    _check_layout(layout)
    process_group = _process_group(group)
    world, rank = process_group.size(), process_group.rank()
    pieces = world if layout == "contiguous" else 2 * world
    if x.shape[dim] % pieces:
        raise ValueError(f"x has length {x.shape[dim]} along dimension {dim}, not a multiple of {pieces}")
    return torch.cat([x.chunk(pieces, dim)[i] for i in _pieces(world, layout)[rank]], dim)


def unshard_sequence(x: Tensor, *, group: Group = None, dim: int = 1, layout: str = "zigzag") -> Tensor:
    """The whole sequence from the processes' shares; gradients go back to the shares."""
    _check_layout(layout)
    process_group = _process_group(group)
    gathered = _AllGather.apply(x.movedim(dim, 0), process_group)
    return _to_sequence_order(gathered, process_group.size(), layout, 0).movedim(0, dim)


class _AllGather(torch.autograd.Function):
    """Concatenates along the first dimension; the gradient is the sum of all processes' gradients for one's part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx, grad):
        share = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(share, grad.contiguous(), group=ctx.group)
        return share, None


class _AllToAll(torch.autograd.Function):
    """The i-th of P equal parts along the first dimension goes to process i; its own gradient, reversed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, ctx.group), None


def _key_range(start: int, stop: int, total: int, left: int, right: int) -> Tuple[int, int, int, int]:
    """Keys [begin, end) that queries [start, stop) of `total` positions see, and the window that shows each its own
    when masks are aligned bottom-right within that range. right = 0 for causal masks, -1 unbounded."""
    begin = 0 if left < 0 else max(0, start - left)
    end = total if right < 0 else min(total, stop + right)
    beyond = end - stop  # keys to the right of the last query: the alignment is off by so many
    return begin, end, -1 if left < 0 else left + beyond, -1 if right < 0 else right - beyond


def sequence_parallel_attention(q: Tensor, k: Tensor, v: Tensor, ridge: Ridge, *, group: Group = None,
                                layout: str = "zigzag", causal: bool = True, window_size: Tuple[int, int] = (-1, -1),
                                **options) -> Tensor:
    """`lla_attention` of sharded sequences: keys and values are gathered from all processes, each attends with its own
    queries; in the backward pass the gradients of keys and values are summed and scattered. Self-attention: q and k
    have the same length. Works for any number of heads and any window. Returns this process's share of o."""
    _check_layout(layout)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        need_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(f"{name} has {tensor.dim()} dimensions, not (batch, length, heads, dim)")
    if k.shape[1] != q.shape[1] or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must have the same length")
    process_group = _process_group(group)
    world, rank = process_group.size(), process_group.rank()
    mine = _pieces(world, layout)[rank]
    if q.shape[1] % len(mine):
        raise ValueError(f"q has length {q.shape[1]}, not a multiple of {len(mine)} (layout {layout!r})")
    left, right = _window(window_size)
    if causal:
        right = 0
    # One exchange for keys and values together, positions first.
    shared = torch.cat([k, v], -1).movedim(1, 0)
    whole = _to_sequence_order(_AllGather.apply(shared, process_group), world, layout, 0).movedim(0, 1)
    keys, values = whole.split([k.shape[-1], v.shape[-1]], -1)

    size = q.shape[1] // len(mine)
    by_token = isinstance(ridge, Tensor) and ridge.dim() >= 3
    outputs = []
    for slot, piece in enumerate(mine):
        rows = slice(slot * size, (slot + 1) * size)
        begin, end, piece_left, piece_right = _key_range(piece * size, (piece + 1) * size, keys.shape[1], left, right)
        outputs.append(lla_attention(
            q[:, rows], keys[:, begin:end], values[:, begin:end], ridge[:, rows] if by_token else ridge, causal=False,
            window_size=(piece_left, piece_right), **options))
    return torch.cat(outputs, 1)


def _scatter_heads(x: Tensor, group, layout) -> Tensor:
    """(B, L / P, H, ...) -> (B, L, H / P, ...): give away heads, receive positions."""
    world = group.size()
    parts = x.unflatten(2, (world, x.shape[2] // world)).movedim(2, 0).movedim(2, 1)  # (P, L / P, B, H / P, ...)
    received = _AllToAll.apply(parts.contiguous(), group).flatten(0, 1)
    return _to_sequence_order(received, world, layout, 0).movedim(0, 1)


def _gather_heads(x: Tensor, group, layout) -> Tensor:
    """(B, L, H / P, D) -> (B, L / P, H, D)."""
    world = group.size()
    shares = _from_sequence_order(x.movedim(1, 0), world, layout, 0)
    received = _AllToAll.apply(shares.unflatten(0, (world, shares.shape[0] // world)).contiguous(), group)
    return received.movedim(0, 2).movedim(0, 1).flatten(2, 3)  # (P, L / P, B, H / P, D) -> (B, L / P, H, D)


def head_parallel_attention(q: Tensor, k: Tensor, v: Tensor, ridge: Ridge, *, group: Group = None,
                            layout: str = "zigzag", **options) -> Tensor:
    """`lla_attention` of sharded sequences: an all-to-all gives every process whole sequences of Hq / P heads, and
    back. P must divide Hq, and divide Hkv or be a multiple of it (key heads are then repeated). Every other option is
    that of `lla_attention`. Returns this process's share of o."""
    _check_layout(layout)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        need_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(f"{name} has {tensor.dim()} dimensions, not (batch, length, heads, dim)")
    process_group = _process_group(group)
    world, rank = process_group.size(), process_group.rank()
    heads, heads_kv = q.shape[2], k.shape[2]
    if heads % world:
        raise ValueError(f"q has {heads} heads, not a multiple of the {world} processes")
    if heads_kv % world:
        if world % heads_kv:
            raise ValueError(f"k has {heads_kv} heads: neither a multiple nor a divisor of the {world} processes")
        k, v = (t.repeat_interleave(world // heads_kv, 2) for t in (k, v))
    ridge = _ridge_tensor(ridge, q)
    if ridge.dim() >= 3:
        ridge = _scatter_heads(ridge, process_group, layout)
    elif ridge.dim() == 1:
        ridge = ridge.chunk(world)[rank]
    q, k, v = (_scatter_heads(t, process_group, layout) for t in (q, k, v))
    return _gather_heads(lla_attention(q, k, v, ridge, **options), process_group, layout)
