"""Boolean attention masks as packed sequences: exactly, or not at all.

Local Linear Attention knows causal masks, windows and packed sequences. A mask whose rows each show one run of keys
can be written that way; this module finds how, and refuses every other mask."""
from typing import List, NamedTuple, Tuple

import torch
from torch import Tensor


class Packing(NamedTuple):
    """Rows of (batch * length) queries and keys, gathered sequence by sequence for `lla_attention_varlen`."""

    query_rows: Tensor
    key_rows: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    window_left: int


class _Run(NamedTuple):
    """Queries [first, last] of batch row b that share one sequence of keys [begin, end)."""

    b: int
    first: int
    last: int
    begin: int
    end: int


def _pack(runs: List[_Run], length_q: int, length_k: int, causal: bool, window_left: int, device) -> Packing:
    def rows(ranges):
        parts = [torch.arange(start, stop) for start, stop in ranges]
        return (torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)).to(device)

    def offsets(lengths):
        return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32).to(device)

    lengths_q = [run.last - run.first + 1 for run in runs]
    lengths_k = [run.end - run.begin for run in runs]
    return Packing(
        rows([(run.b * length_q + run.first, run.b * length_q + run.last + 1) for run in runs]),
        rows([(run.b * length_k + run.begin, run.b * length_k + run.end) for run in runs]),
        offsets(lengths_q), offsets(lengths_k), max(lengths_q, default=0), max(lengths_k, default=0), causal,
        window_left)


def _intervals(mask: Tensor) -> Tuple[list, list]:
    """First and one-past-last visible key of every row of a (B, Lq, Lk) mask; begin = end where there is none."""
    length_k = mask.shape[-1]
    count = mask.sum(-1)
    begin = mask.to(torch.uint8).argmax(-1)
    end = length_k - mask.flip(-1).to(torch.uint8).argmax(-1)
    begin, end = begin.where(count > 0, 0), end.where(count > 0, 0)
    if not bool((count == end - begin).all()):
        raise ValueError("attention_mask shows some query keys with a gap between them; Local Linear Attention takes "
                         "masks whose rows are unbroken runs (causal, windows, padding, packed sequences)")
    return begin.tolist(), end.tolist()


def _runs(begins, ends, continues) -> List[_Run]:
    runs = []
    for b, (row_begins, row_ends) in enumerate(zip(begins, ends)):
        current = None
        for i, (begin, end) in enumerate(zip(row_begins, row_ends)):
            if begin == end:
                current = None
            elif current is not None and continues(current, begin, end):
                current = runs[-1] = current._replace(last=i, end=end)
            else:
                current = _Run(b, i, i, begin, end)
                runs.append(current)
    return runs


def pack_mask(mask: Tensor, window: int = 0) -> Packing:
    """Packing of a boolean mask (B, 1, Lq, Lk), True where a key is seen. window > 0: rows may be limited to that many
    keys (a sliding window). Raises ValueError for a mask that has no exact counterpart."""
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise ValueError(f"attention_mask is {tuple(mask.shape)}, not (batch, 1, queries, keys): a mask by head is not "
                         "supported")
    length_q, length_k = mask.shape[2:]
    begins, ends = _intervals(mask[:, 0])
    longest = max((end - begin for row in zip(begins, ends) for begin, end in zip(*row)), default=0)
    left = window - 1 if 0 < window and longest <= window else -1

    def continues_causal(run, begin, end):
        return end == run.end + 1 and begin == (run.begin if left < 0 else max(run.begin, end - 1 - left))

    def continues_full(run, begin, end):
        return (begin, end) == (run.begin, run.end)

    choices = [(_runs(begins, ends, continues_causal), True, left), (_runs(begins, ends, continues_full), False, -1)]
    runs, causal, window_left = min(choices, key=lambda choice: sum(run.end - run.begin for run in choice[0]))
    return _pack(runs, length_q, length_k, causal, window_left, mask.device)


def pack_padding(keep: Tensor, length_q: int, causal: bool) -> Packing:
    """Packing of a padding mask (B, Lk), True where a token is real. Causal: the queries are the last Lq positions, and
    those that are padding are left out; otherwise every query sees every real key."""
    batch, length_k = keep.shape
    keep_q = keep[:, length_k - length_q:] if causal else keep.new_ones(batch, length_q)

    def side(kept):
        lengths = kept.sum(1)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        return kept.flatten().nonzero().flatten(), offsets, int(lengths.max()) if batch else 0

    query_rows, cu_seqlens_q, max_seqlen_q = side(keep_q)
    key_rows, cu_seqlens_k, max_seqlen_k = side(keep)
    return Packing(query_rows, key_rows, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, -1)
