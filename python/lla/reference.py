"""Local Linear Attention as its formulas read: float64, a direct solve per query, plain torch.

Slow (it forms a D x D matrix per query and head) and differentiable any number of times. It shares no code with the
library, so that each can be checked against the other."""
import math

import torch


def _visible(length_q, length_k, causal, window_size, device):
    """(Lq, Lk) booleans: which keys each query sees, aligned bottom-right."""
    query = torch.arange(length_q, device=device)[:, None] + (length_k - length_q)
    key = torch.arange(length_k, device=device)[None, :]
    left, right = min(window_size[0], length_k), min(window_size[1], length_q)  # beyond that, sums could overflow
    visible = torch.ones(length_q, length_k, dtype=torch.bool, device=device)
    if causal:
        visible &= key <= query
    if left >= 0:
        visible &= key >= query - left
    if right >= 0:
        visible &= key <= query + right
    return visible


def _solve(matrix, right_side, ridge):
    """x of (matrix + diag(ridge)) x = right_side, with x_d = 0 where ridge_d is infinite."""
    fixed = torch.isinf(ridge)
    finite_ridge = torch.where(fixed, torch.ones_like(ridge), ridge)
    free = (~fixed).to(matrix.dtype)
    system = matrix * free[..., :, None] * free[..., None, :] + torch.diag_embed(finite_ridge)
    right_side = right_side * free
    if bool((ridge == 0).any()):  # possibly singular; directions no key spans do not reach the output
        return (torch.linalg.pinv(system, hermitian=True) @ right_side[..., None]).squeeze(-1)
    return torch.linalg.solve(system, right_side)


def _head(q, k, v, ridge, x, scale, visible):
    """One head: q (Lq, D), k (Lk, D), v (Lk, Dv), ridge or x (Lq, D)."""
    has_key = visible.any(1, keepdim=True)
    logits = (q @ k.T * scale).masked_fill(~visible, -math.inf)
    p = torch.softmax(torch.where(has_key, logits, torch.zeros_like(logits)), -1) * visible
    mean_k = p @ k
    centred = k - mean_k[:, None]  # (Lq, Lk, D): sums of k k^T would lose what is small beside the keys
    if x is None:
        covariance = centred.mT @ (p[..., None] * centred)
        bad = (ridge < 0) | torch.isnan(ridge)
        x = _solve(covariance, q - mean_k, torch.where(bad, torch.ones_like(ridge), ridge))
        x = x.masked_fill(bad.any(1, keepdim=True), math.nan)
    correction = 1 + (centred @ x[..., None]).squeeze(-1)
    return torch.where(has_key, (p * correction) @ v, torch.zeros((), dtype=q.dtype, device=q.device))


def _attend(q, k, v, ridge, x, scale, causal, window_size):
    q, k, v = q.double(), k.double(), v.double()
    batch, length_q, heads, dim = q.shape
    group = heads // k.shape[2]
    scale = dim**-0.5 if scale is None else scale
    visible = _visible(length_q, k.shape[1], causal, window_size, q.device)
    if x is None:
        ridge = torch.as_tensor(ridge, dtype=torch.float64, device=q.device)
        while ridge.dim() < 4:
            ridge = ridge[..., None] if ridge.dim() != 1 else ridge[None, None, :]
        ridge = ridge.expand(batch, length_q, heads, dim)
    else:
        x = x.double()
    rows = [
        _head(q[b, :, h], k[b, :, h // group], v[b, :, h // group], None if x is not None else ridge[b, :, h],
              None if x is None else x[b, :, h], scale, visible)
        for b in range(batch) for h in range(heads)
    ]
    if not rows:
        return q.new_zeros(batch, length_q, heads, v.shape[-1])
    return torch.stack(rows).unflatten(0, (batch, heads)).transpose(1, 2)


def lla_attention(q, k, v, ridge, *, scale=None, causal=True, window_size=(-1, -1), tol=None, max_iterations=None,
                  solver="direct", return_info=False):
    """`lla.lla_attention` in float64 (also the result). The solve is direct: tol and max_iterations must be None."""
    if tol is not None or max_iterations is not None or solver not in ("auto", "direct") or return_info:
        raise ValueError("the reference solves directly: tol and max_iterations do not apply, and it has no info")
    return _attend(q, k, v, ridge, None, scale, causal, window_size)


def parallax_attention(q, k, v, x, *, scale=None, causal=True, window_size=(-1, -1)):
    """`lla.parallax_attention` in float64."""
    return _attend(q, k, v, None, x, scale, causal, window_size)


def lla_attention_varlen(q, k, v, ridge, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, **options):
    """`lla.lla_attention_varlen` in float64, a sequence at a time."""
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    by_token = isinstance(ridge, torch.Tensor) and ridge.dim() >= 2
    parts = []
    for b in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[b:b + 2]), slice(*starts_k[b:b + 2])
        sequence_ridge = ridge[None, rows] if by_token else ridge
        parts.append(lla_attention(q[None, rows], k[None, keys], v[None, keys], sequence_ridge, **options)[0])
    behind = q.shape[0] - starts_q[-1]  # rows of no sequence
    return torch.cat(parts + [q.new_zeros(behind, q.shape[1], v.shape[2], dtype=torch.float64)])
