"""Cached attention equals attention over the whole sequence, for every kind of cache."""
import math

import pytest
import torch
from helpers import assert_close, make_inputs, relative

import lla

OPTIONS = dict(solver="direct")


def paged(cache, lengths, page_size, spare=3):
    """A contiguous cache (B, capacity, H, D) cut into shuffled pages, unused memory poisoned: (pages, page_table)."""
    batch, capacity = cache.shape[:2]
    per_sequence = -(-capacity // page_size)
    pages = cache.new_full((batch * per_sequence + spare, page_size, *cache.shape[2:]), math.nan)
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(3))[:batch * per_sequence]
    table = order.view(batch, per_sequence).to(cache.device)
    for b in range(batch):
        for position in range(lengths[b]):
            pages[table[b, position // page_size], position % page_size] = cache[b, position]
    return pages, table.to(torch.int32)


def full_attention(q, keys, values, ridge, lengths, **options):
    """Each sequence on its own, with its own length."""
    rows = [lla.lla_attention(q[b:b + 1], keys[b:b + 1, :n], values[b:b + 1, :n], ridge[b:b + 1], **OPTIONS, **options)
            for b, n in enumerate(lengths)]
    return torch.cat(rows)


@pytest.mark.parametrize("page_size", [None, 1, 4, 16])
@pytest.mark.parametrize("lengths", ["number", "tensor"])
@pytest.mark.parametrize("new", [0, 1, 3])
@pytest.mark.parametrize("window", [(-1, -1), (5, 0)])
def test_cached_equals_full(device, page_size, lengths, new, window):
    capacity, filled = 32, [11, 11, 11] if lengths == "number" else [11, 2, 26]
    length_q = max(new, 2)
    total = [n + new for n in filled]
    q, k, v, ridge = make_inputs(3, length_q, capacity, 4, 2, device=device, ridge="dimension", dtype=torch.float32)
    expected = full_attention(q, k, v, ridge, total, window_size=window)

    appended = {}
    if new:
        for name, full in (("k", k), ("v", v)):
            appended[name] = torch.stack([full[b, n:n + new] for b, n in enumerate(filled)])
    k_cache, v_cache = k.clone(), v.clone()
    for b, n in enumerate(filled):  # whatever lies behind the filled part must not matter
        k_cache[b, n:] = v_cache[b, n:] = math.nan
    table = None
    if page_size:
        (k_cache, table), (v_cache, _) = (paged(c, filled, page_size) for c in (k_cache, v_cache))
    seqlens = filled[0] if lengths == "number" else torch.tensor(filled, dtype=torch.int32, device=device)
    o, info = lla.lla_attention_with_kvcache(q, k_cache, v_cache, ridge, **appended, cache_seqlens=seqlens,
                                             page_table=table, window_size=window, return_info=True, **OPTIONS)
    assert_close(o, expected)
    assert info.status.shape == (3, 4, length_q) and (info.status == 0).all()
    if new and page_size is None:
        for b, n in enumerate(filled):
            assert torch.equal(k_cache[b, :n + new], k[b, :n + new])
            assert torch.equal(v_cache[b, :n + new], v[b, :n + new])


def test_page_table_may_hold_unused_entries(device):
    q, k, v, ridge = make_inputs(2, 1, 16, 2, device=device, dtype=torch.float32)
    pages, table = paged(k, [5, 0], 4)
    values, _ = paged(v, [5, 0], 4)
    table[0, 2:], table[1] = -1, -1
    o = lla.lla_attention_with_kvcache(q, pages, values, ridge, page_table=table,
                                       cache_seqlens=torch.tensor([5, 0], dtype=torch.int32, device=device), **OPTIONS)
    assert_close(o[:1], lla.lla_attention(q[:1], k[:1, :5], v[:1, :5], ridge[:1], **OPTIONS))
    assert (o[1] == 0).all()


def test_chunked_prefill_equals_whole(device):
    q, k, v, ridge = make_inputs(2, 40, heads=4, heads_kv=2, device=device, dtype=torch.float32)
    whole = lla.lla_attention(q, k, v, ridge, **OPTIONS)
    k_cache, v_cache = torch.empty_like(k), torch.empty_like(v)
    parts, start = [], 0
    for end in (1, 2, 17, 39, 40):
        part = slice(start, end)
        parts.append(lla.lla_attention_with_kvcache(q[:, part], k_cache, v_cache, ridge[:, part], k[:, part],
                                                    v[:, part], cache_seqlens=start, **OPTIONS))
        start = end
    assert_close(torch.cat(parts, 1), whole)
    assert torch.equal(k_cache, k) and torch.equal(v_cache, v)


def test_decoding_beside_prompts(device):
    """Queries packed by cu_seqlens_q: a decoder, a fresh prompt, padding, a chunk; new keys appended by the same call."""
    filled, new = [20, 0, 0, 9], [1, 7, 0, 5]
    total = [n + m for n, m in zip(filled, new)]
    cu = torch.tensor([0, *new]).cumsum(0).to(device, torch.int32)
    q, k, v, ridge = make_inputs(4, 8, 32, 4, 2, device=device, dtype=torch.float32)
    pages, table = paged(k, filled, 4)
    values, _ = paged(v, filled, 4)
    pick = lambda t, start: torch.cat([t[b, s:s + n] for b, (s, n) in enumerate(zip(start, new))])  # noqa: E731
    o, info = lla.lla_attention_with_kvcache(
        pick(q, [0] * 4), pages, values, pick(ridge, [0] * 4), pick(k, filled), pick(v, filled),
        cache_seqlens=torch.tensor(filled, dtype=torch.int32, device=device), page_table=table, cu_seqlens_q=cu,
        max_seqlen_q=7, return_info=True, **OPTIONS)
    assert info.status.shape == (4, 13) and (info.status == 0).all()
    for b, (n, m) in enumerate(zip(total, new)):
        alone = lla.lla_attention(q[b:b + 1, :m], k[b:b + 1, :n], v[b:b + 1, :n], ridge[b:b + 1, :m], **OPTIONS)
        assert_close(o[int(cu[b]):int(cu[b + 1])], alone[0])


def test_left_padding(device):
    q, k, v, ridge = make_inputs(3, 4, 20, 4, 2, device=device, dtype=torch.float32)
    first = [0, 7, 18]
    for b, n in enumerate(first):
        k[b, :n] = v[b, :n] = math.nan
    o = lla.lla_attention_with_kvcache(q, k, v, ridge, first_key=torch.tensor(first, device=device), **OPTIONS)
    for b, n in enumerate(first):
        alone = lla.lla_attention(q[b:b + 1], k[b:b + 1, n:], v[b:b + 1, n:], ridge[b:b + 1], **OPTIONS)
        assert_close(o[b:b + 1], alone)
    assert (o[2, :2] == 0).all(), "rows of padding see nothing"


def test_parallax_over_a_cache(device):
    q, k, v, _ = make_inputs(3, 2, 20, 4, 2, device=device, dtype=torch.float32)
    x = torch.randn_like(q)
    filled = [5, 20, 11]
    for page_size in (None, 4):
        keys, values, table = k, v, None
        if page_size:
            (keys, table), (values, _) = (paged(t, filled, page_size) for t in (k, v))
        o = lla.parallax_attention_with_kvcache(q, keys, values, x, page_table=table,
                                                cache_seqlens=torch.tensor(filled, device=device))
        for b, n in enumerate(filled):
            assert_close(o[b:b + 1], lla.parallax_attention(q[b:b + 1], k[b:b + 1, :n], v[b:b + 1, :n], x[b:b + 1]))


def test_strides_of_engines(device):
    """Head-major caches, and keys and values side by side in one tensor."""
    q, k, v, ridge = make_inputs(2, 1, 16, 4, 2, device=device, dtype=torch.float32)
    want = lla.lla_attention(q, k, v, ridge, **OPTIONS)
    head_major = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    side_by_side = torch.stack((k, v), 1).unbind(1)
    for keys, values in (head_major, side_by_side):
        assert_close(lla.lla_attention_with_kvcache(q, keys, values, ridge, **OPTIONS), want)


def test_tokens_by_slots(device):
    k, v = (torch.randn(4, 2, 8, device=device) for _ in range(2))
    caches = [torch.zeros(3, 4, 2, 8, device=device) for _ in range(2)]
    lla.cache_append(k, v, *caches, slots=torch.tensor([11, -1, 0, 6], device=device))
    for cache, new in zip(caches, (k, v)):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[[11, 0, 6]], new[[0, 2, 3]]) and int((flat != 0).any(-1).any(-1).sum()) == 3


def test_a_cache_filled_token_by_token(device):
    """The layer, per-sequence lengths and pages, against one pass over the whole sequences."""
    torch.manual_seed(4)
    layer = lla.LocalLinearAttention(32, 4, 2, rope=True, solver="direct", device=device, dtype=torch.float32)
    x = torch.randn(3, 24, 32, device=device)
    with torch.no_grad():
        want = layer(x)
        for page_size in (None, 1, 5):
            cache = layer.make_cache(3, 24, page_size=page_size)
            parts = [layer(x[:, :3], cache=cache)] + [layer(x[:, i:i + 1], cache=cache) for i in range(3, 24)]
            assert_close(torch.cat(parts, 1), want)
            assert cache.length == 24 and cache.seqlens.tolist() == [24] * 3
            with pytest.raises(ValueError, match="do not fit"):
                layer(x[:, :1], cache=cache)


def test_sequences_of_a_layers_cache_have_their_own_lengths(device):
    torch.manual_seed(4)
    layer = lla.LocalLinearAttention(32, 4, 2, rope=True, solver="direct", device=device, dtype=torch.float32)
    x = torch.randn(3, 24, 32, device=device)
    steps = [(7, 1, 0), (1, 4, 3), (1, 1, 1), (9, 0, 1)]
    for page_size in (None, 4):
        cache = layer.make_cache(3, 24, page_size=page_size)
        with torch.no_grad():
            want = layer(x)
            start = [0, 0, 0]
            for step in steps:
                cu = torch.tensor([0, *step]).cumsum(0).to(device, torch.int32)
                part = torch.cat([x[b, start[b]:start[b] + n] for b, n in enumerate(step)])
                o = layer(part, cache=cache, cu_seqlens=cu, max_seqlen=max(step))
                for b, n in enumerate(step):
                    if n > 0:
                        assert relative(o[int(cu[b]):int(cu[b + 1])], want[b, start[b]:start[b] + n]) < 1e-4
                    start[b] += n
        assert cache.seqlens.tolist() == start
        cache.reset(torch.tensor([1], device=device))
        assert cache.seqlens.tolist() == [start[0], 0, start[2]]


@pytest.mark.parametrize("page_size", [None, 4])
def test_tokens_taken_back(device, page_size):
    """Drafts of four tokens of which two are accepted fill a cache to its end; so do sequences that all start again."""
    layer = lla.LocalLinearAttention(32, 4, 2, rope=True, solver="direct", device=device, dtype=torch.float32)
    x = torch.randn(3, 24, 32, device=device)
    with torch.no_grad():
        want = layer(x)
        cache = layer.make_cache(3, 24, page_size=page_size)
        for _ in range(2):
            for start in range(0, 21, 2):
                part = x[:, start:start + 4].clone()
                part[:, 2:] = 0 if start < 20 else part[:, 2:]  # rejected, unless they are the last
                o = layer(part, cache=cache)
                accepted = 2 if start < 20 else 4
                assert_close(o[:, :accepted], want[:, start:start + accepted])
                cache.seqlens -= 4 - accepted
            with pytest.raises(ValueError, match="24 positions and 1 new ones do not fit"):
                layer(x[:, :1], cache=cache)
            assert cache.seqlens.tolist() == [24] * 3
            cache.reset(torch.arange(3, device=device))


def test_operators_of_caches(device):
    q, k, v, ridge = make_inputs(2, 1, 16, device=device, dtype=torch.float32)
    lengths = torch.tensor([5, 16], dtype=torch.int32, device=device)
    options = (None, None, 0, 0, None, True, -1, -1, None, 0, "direct", None, False, False)
    torch.library.opcheck(torch.ops.lla.forward.default,
                          (q, k, v, ridge, None, *options, lengths, None, None, 0, False, True))
    torch.library.opcheck(torch.ops.lla.cache_append.default,
                          (k[:, :1].clone(), v[:, :1].clone(), k, v, lengths - 5, None, None, None))
    torch.library.opcheck(torch.ops.lla.append_inference.default,
                          (k[:, :1].clone(), v[:, :1].clone(), lengths - 5, q, k, v, ridge, None, *options, None,
                           None, None, 0))


def test_one_operator_or_its_parts(device):
    """A plain call writes and attends in one operator, one that is looked at in several: the same bits, the same cache."""
    q, k, v, ridge = make_inputs(2, 2, 16, 4, 2, device=device, dtype=torch.float32)
    new_k, new_v = torch.randn(2, 2, 2, 16, device=device), torch.randn(2, 2, 2, 16, device=device)
    lengths = torch.tensor([3, 14], dtype=torch.int32, device=device)
    results = []
    for return_info in (False, True):
        caches = k.clone(), v.clone()
        o = lla.lla_attention_with_kvcache(q, *caches, ridge, new_k, new_v, cache_seqlens=lengths,
                                           return_info=return_info, **OPTIONS)
        results.append((o[0] if return_info else o, *caches))
    assert all(torch.equal(a, b) for a, b in zip(*results)) and torch.equal(results[0][1][0, 3:5], new_k[0])


@pytest.mark.parametrize("change", [dict(ridge=-torch.ones(2, 3)), dict(solver="none"), dict(implementation="none"),
                                    dict(v=torch.ones(2, 1, 4, 15)), dict(k=torch.ones(2, 1, 4, 16, dtype=torch.float64)),
                                    dict(max_seqlen_k=2), dict(page_table=torch.full((2, 4), 9, dtype=torch.int32))])
def test_a_refused_step_writes_nothing(change):
    caches = torch.ones(2, 16, 4, 16), torch.ones(2, 16, 4, 16)
    good = dict(q=torch.ones(2, 1, 4, 16), k_cache=caches[0], v_cache=caches[1], ridge=0.1, k=torch.zeros(2, 1, 4, 16),
                v=torch.zeros(2, 1, 4, 16), cache_seqlens=torch.tensor([4, 5], dtype=torch.int32))
    with pytest.raises((ValueError, NotImplementedError)):
        lla.lla_attention_with_kvcache(**{**good, **change})
    assert all((c == 1).all() for c in caches)


def test_whole_cache_by_default(device):
    q, k, v, ridge = make_inputs(2, 3, 12, device=device)
    assert_close(lla.lla_attention_with_kvcache(q, k, v, ridge), lla.lla_attention(q, k, v, ridge))


def test_compiles(device):
    q, k, v, ridge = make_inputs(2, 1, 16, device=device, dtype=torch.float32)
    new_k, new_v = torch.randn(2, 1, 4, 16, device=device), torch.randn(2, 1, 4, 16, device=device)

    def step(k_cache, v_cache):
        return lla.lla_attention_with_kvcache(q, k_cache, v_cache, ridge, new_k, new_v, cache_seqlens=7, **OPTIONS)

    eager_cache, compiled_cache = (k.clone(), v.clone()), (k.clone(), v.clone())
    expected = step(*eager_cache)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled_cache)
    assert torch.equal(compiled, expected) and torch.equal(eager_cache[0], compiled_cache[0])


WRONG = {
    "k without v": (dict(k=torch.ones(2, 1, 4, 16)), "both k and v"),
    "no cache_seqlens": (dict(k=torch.ones(2, 1, 4, 16), v=torch.ones(2, 1, 4, 16)), "cache_seqlens"),
    "too long": (dict(cache_seqlens=17), "cache_seqlens"),
    "negative": (dict(cache_seqlens=-1), "cache_seqlens"),
    "full": (dict(k=torch.ones(2, 1, 4, 16), v=torch.ones(2, 1, 4, 16), cache_seqlens=16), "cache_seqlens"),
    "seqlens shape": (dict(cache_seqlens=torch.ones(3, dtype=torch.int32)), "cache_seqlens"),
    "seqlens dtype": (dict(cache_seqlens=torch.ones(2)), "cache_seqlens"),
    "cache batch": (dict(k_cache=torch.ones(3, 16, 4, 16), v_cache=torch.ones(3, 16, 4, 16)), "k_cache"),
    "v_cache": (dict(v_cache=torch.ones(2, 15, 4, 16)), "v_cache"),
    "page_table": (dict(page_table=torch.ones(2, dtype=torch.int32), cache_seqlens=1), "page_table"),
    "gradient": (dict(q=torch.ones(2, 1, 4, 16, requires_grad=True)), "gradient"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(case):
    change, word = WRONG[case]
    cache = torch.ones(2, 16, 4, 16)
    good = dict(q=torch.ones(2, 1, 4, 16), k_cache=cache, v_cache=cache.clone(), ridge=0.1)
    with pytest.raises(ValueError, match=word):
        lla.lla_attention_with_kvcache(**{**good, **change})


NAMED = {
    "cache_seqlens": dict(cache_seqlens=torch.tensor([-1, 3], dtype=torch.int32)),
    "k_cache": dict(k_cache=torch.ones(2, 16, 3, 16), v_cache=torch.ones(2, 16, 3, 16)),  # 4 query heads
    "v_cache": dict(v_cache=torch.ones(2, 16, 4, 16, dtype=torch.float64)),
    "page_table": dict(page_table=torch.full((2, 1), 7, dtype=torch.int32), cache_seqlens=1),
    "tol": dict(tol=-1.0),
    "implementation": dict(implementation="none"),
}


@pytest.mark.parametrize("name", NAMED)
def test_messages_have_the_names_of_the_arguments(name):
    """The library's own words begin with its own names: k for a cache, seqlens_k, options.tolerance."""
    cache = torch.ones(2, 16, 4, 16)
    good = dict(q=torch.ones(2, 1, 4, 16), k_cache=cache, v_cache=cache.clone(), ridge=0.1)
    with pytest.raises(ValueError, match=f"^{name}: "):
        lla.lla_attention_with_kvcache(**{**good, **NAMED[name]})


def test_messages_of_appending_have_the_names_of_the_arguments():
    cache, new = torch.ones(2, 16, 4, 16), torch.ones(2, 1, 4, 16)
    with pytest.raises(ValueError, match="^cache_seqlens: "):
        lla.cache_append(new, new, cache, cache.clone(), cache_seqlens=torch.tensor([16, 3], dtype=torch.int32))
