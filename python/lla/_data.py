"""Synthetic attention inputs, the twin of src/data/data.cpp: same kinds, same numbers (to the rounding of log, sin and cos). Of the degenerate kinds src/data/degenerate.cpp."""

import numpy as np

KINDS = ("randn", "aniso", "self", "cluster", "pw", "mean")
PEAKED_KINDS = ("long_both", "qk_norm", "queries6", "queries20", "two_channels", "rope", "sink", "mean10", "mean30",
                "channel_scales")
# Repeated, zero or of very different size: randn, changed.
DEGENERATE_KINDS = (
    "equal_values", "equal_keys", "equal_pairs", "one_token", "two_tokens", "zero_queries", "zero_keys", "zero_values", "mean_query",
    "one_large_value", "one_large_key", "short_keys", "long_keys", "long_queries", "padding",
)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SEGMENT = 128
_CENTRES = 16
_QUERY, _KEY, _VALUE, _CENTRE, _CHOICE_QUERY, _CHOICE_KEY, _MEAN, _MAP = range(8)


def _mix(z):
    """The finaliser of splitmix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seed, stream, index):
    """Numbers in (0, 1), a hash of (seed, stream, index); index may be an array."""
    with np.errstate(over="ignore"):
        index = np.asarray(index, dtype=np.uint64)
        key = _mix(np.uint64(seed) + _GOLDEN * (np.uint64(stream) + np.uint64(1)))
        bits = _mix(key + _GOLDEN * (index + np.uint64(1)))
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normal(seed, stream, index):
    """Box-Muller: an even index takes the cosine, the next one the sine."""
    index = np.asarray(index, dtype=np.uint64)
    pair = index & ~np.uint64(1)
    radius = np.sqrt(-2 * np.log(uniform(seed, stream, pair)))
    angle = 2 * np.pi * uniform(seed, stream, pair + np.uint64(1))
    return radius * np.where(index & np.uint64(1), np.sin(angle), np.cos(angle))


def _normals(seed, head, purpose, *shape):
    return normal(seed, head * 8 + purpose, np.arange(np.prod(shape, dtype=np.int64))).reshape(shape)


def _dimension_scale(dim):
    scale = np.arange(1, dim + 1) ** -0.5
    return scale / np.sqrt(np.mean(scale**2))


def _around_centres(x, centres, seed, head, purpose):
    choice = (uniform(seed, head * 8 + purpose, np.arange(len(x))) * _CENTRES).astype(np.int64)
    x = centres[choice] + 0.3 * x
    return x / np.sqrt(np.mean(x**2, axis=1, keepdims=True))


def _into_cones(keys):
    length, dim = keys.shape
    segments = -(-length // _SEGMENT)
    bits = max(segments - 1, 0).bit_length()
    segment = np.arange(length) // _SEGMENT
    for d in range(min(bits, dim)):
        keys[:, d] = np.where(segment >> d & 1, np.abs(keys[:, d]), -np.abs(keys[:, d]))
    return keys


def _piecewise_values(keys, value_dim, seed, head):
    length, dim = keys.shape
    segments = -(-length // _SEGMENT)
    maps = _normals(seed, head, _MAP, segments, value_dim, dim)
    parts = [keys[c * _SEGMENT : (c + 1) * _SEGMENT] @ maps[c].T for c in range(segments)]
    return (np.concatenate(parts) if parts else np.zeros((0, value_dim))) / np.sqrt(dim)


def _rotated(x, random, first):
    """Means of +-2 by channel, then each pair of channels turned by the row's position."""
    x = x + np.where(random < 0, -2.0, 2.0)
    dim = x.shape[1]
    pairs = np.arange(0, dim - 1, 2)
    angle = (first + np.arange(len(x)))[:, None] * 10000.0 ** (-pairs / dim)
    even, odd = x[:, pairs].copy(), x[:, pairs + 1].copy()
    x[:, pairs] = even * np.cos(angle) - odd * np.sin(angle)
    x[:, pairs + 1] = even * np.sin(angle) + odd * np.cos(angle)
    return x


def _normalized(x):
    return 2.5 * x / np.sqrt(np.mean(x**2, axis=1, keepdims=True))


def _channel_sizes(dim):
    return 10.0 ** (2 - 6 * np.arange(dim) / (max(dim, 2) - 1))


def _peaked_keys(kind, random, k):
    if kind == "long_both":
        k = 4 * k
    elif kind == "qk_norm":
        k = _normalized(k)
    elif kind == "two_channels":
        k = k * np.where(np.arange(k.shape[1]) < 2, 20, 1)
    elif kind == "rope":
        k = _rotated(k, random, 0)
    elif kind == "sink":
        k[:1] = 20 * random / np.sqrt(np.sum(random**2))
    elif kind in ("mean10", "mean30"):
        k = k + int(kind[4:]) * random
    elif kind == "channel_scales":
        k = k * _channel_sizes(k.shape[1])
    return k


def _peaked_queries(kind, random, q, first):
    if kind in ("long_both", "queries6", "queries20"):
        q = {"long_both": 4, "queries6": 6, "queries20": 20}[kind] * q
    elif kind == "qk_norm":
        q = _normalized(q)
    elif kind == "rope":
        q = _rotated(q, random, first)
    elif kind == "sink":
        q = q + 2 * random / np.sqrt(np.sum(random**2))
    elif kind == "channel_scales":
        q = q * _channel_sizes(q.shape[1])
    return q


def _keys(kind, seed, head, length, dim):
    k = _normals(seed, head, _KEY, length, dim)
    if kind == "aniso":
        k = k * _dimension_scale(dim)
    elif kind == "cluster":
        k = _around_centres(k, _normals(seed, head, _CENTRE, _CENTRES, dim), seed, head, _CHOICE_KEY)
    elif kind == "pw":
        k = _into_cones(k)
    elif kind == "mean":
        k = k + 3 * _normals(seed, head, _MEAN, dim)
    return _peaked_keys(kind, _normals(seed, head, _MEAN, dim), k)


def _queries(kind, seed, head, key_head, keys, length, dim):
    q = _normals(seed, head, _QUERY, length, dim)
    if kind == "aniso":
        q = q * _dimension_scale(dim)
    elif kind == "cluster":
        q = _around_centres(q, _normals(seed, key_head, _CENTRE, _CENTRES, dim), seed, head, _CHOICE_QUERY)
    elif kind in ("self", "pw") and len(keys) > 0:
        tied = keys[np.maximum(0, np.arange(length) + len(keys) - length)]
        q = tied.copy() if kind == "pw" else 2 * (tied + 0.1 * q)
    return _peaked_queries(kind, _normals(seed, key_head, _MEAN, dim), q, len(keys) - length)


def _degrade(kind, q, k, v):
    """Changes random tensors in place into one of DEGENERATE_KINDS."""
    repeated = {"equal_values": [v], "equal_keys": [k], "equal_pairs": [k, v], "one_token": [q, k, v], "two_tokens": [q, k, v]}
    for t in repeated.get(kind, []):
        t[:] = t[:, np.arange(t.shape[1]) % (2 if kind == "two_tokens" else 1)]
    multiplied = {"zero_queries": (q, 0), "zero_keys": (k, 0), "zero_values": (v, 0), "short_keys": (k, 1e-4), "long_keys": (k, 100),
                  "long_queries": (q, 30), "one_large_value": (v[:, _third(v)], 300), "one_large_key": (k[:, _third(k)], 300)}
    if kind in multiplied:
        tensor, factor = multiplied[kind]
        tensor *= factor
    if kind == "mean_query":
        q[:] = np.arange(q.shape[3]) == 0
        k[:, 1::2] = -k[:, 0 : k.shape[1] // 2 * 2 : 2]
        k[..., 0] = 1
    if kind == "padding":
        for t in (q, k, v):
            place = 4 * np.arange(t.shape[1])
            t[:, (place < t.shape[1]) | (place >= 3 * t.shape[1])] = 0


def _third(t):
    return slice(t.shape[1] // 3, t.shape[1] // 3 + 1)


def make(kind, seed, batch, length_q, length_k, heads_q, heads_kv, dim, value_dim):
    """float64 q (batch, length_q, heads_q, dim), k (batch, length_k, heads_kv, dim), v (batch, length_k, heads_kv, value_dim)."""
    if kind not in KINDS + PEAKED_KINDS + DEGENERATE_KINDS:
        raise ValueError(f"kind is {kind!r}, must be one of {', '.join(KINDS + PEAKED_KINDS + DEGENERATE_KINDS)}")
    q = np.zeros((batch, length_q, heads_q, dim))
    k = np.zeros((batch, length_k, heads_kv, dim))
    v = np.zeros((batch, length_k, heads_kv, value_dim))
    for b in range(batch):
        for h in range(heads_kv):
            key_head = b * heads_kv + h
            k[b, :, h] = _keys(kind, seed, key_head, length_k, dim)
            if kind == "pw":
                v[b, :, h] = _piecewise_values(k[b, :, h], value_dim, seed, key_head)
            else:
                v[b, :, h] = _normals(seed, key_head, _VALUE, length_k, value_dim)
                if kind == "sink":
                    v[b, :1, h] *= 0.1
            group = heads_q // heads_kv
            for g in range(h * group, (h + 1) * group):
                q[b, :, g] = _queries(kind, seed, b * heads_q + g, key_head, k[b, :, h], length_q, dim)
    _degrade(kind, q, k, v)
    return q, k, v
