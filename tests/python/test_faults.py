"""What a caller's memory, types and processes can do to a call: padding behind packed sequences, windows of any size, page
tables that name no page, caches of another type, forked workers."""
import math
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from helpers import make_inputs, relative

import lla

CAPACITY, PAGE = 16, 4


def poison_the_allocator(device, *sizes):
    """Leaves large numbers in memory that the next torch.empty of such a size is likely to get."""
    junk = [torch.full(size, 1e6, device=device) for size in sizes for _ in range(20)]
    del junk


# ---- packed tensors longer than their last sequence ----------------------------------------------------------------


@pytest.mark.parametrize("rest", [0.0, 1e30, math.nan])
def test_rows_behind_the_last_sequence(device, rest):
    """Output, information and every gradient are zero there; what comes before does not change."""
    total, padded = 40, 64
    ends = torch.tensor([0, 20, total], dtype=torch.int32, device=device)

    def run(length):
        torch.manual_seed(0)
        inputs = [torch.randn(total, 4, 8, device=device) for _ in range(3)]
        inputs.append(torch.rand(total, 4, device=device) + 0.1)
        grad = torch.randn(total, 4, 8, device=device)
        more = [torch.cat((t, torch.full((length - total, *t.shape[1:]), rest, device=device))) for t in (*inputs, grad)]
        leaves = [t.requires_grad_() for t in more[:4]]
        poison_the_allocator(device, (length, 4, 8), (length, 4))
        o, info = lla.lla_attention_varlen(*leaves, ends, ends, 20, 20, return_info=True)
        return [o, *torch.autograd.grad(o, leaves, more[4])], info

    good, good_info = run(total)
    bad, bad_info = run(padded)
    for name, a, b in zip(("o", "dq", "dk", "dv", "dridge"), good, bad):
        assert torch.equal(b[:total], a), name
        assert torch.equal(b[total:], torch.zeros_like(b[total:])), name
    for a, b in zip(good_info[:3], bad_info[:3]):
        assert torch.equal(b[:, :total], a) and not b[:, total:].any()


def test_padding_does_not_reach_the_weights(device):
    layer = lla.LocalLinearAttention(32, 4, device=device)
    x = torch.randn(64, 32, device=device)
    ends = torch.tensor([0, 20, 40], dtype=torch.int32, device=device)

    def gradients(total):
        layer.zero_grad()
        poison_the_allocator(device, (total, 4, 8), (total, 4))
        layer(x[:total], cu_seqlens=ends, max_seqlen=20)[:40].pow(2).sum().backward()
        return {name: p.grad.clone() for name, p in layer.named_parameters()}

    good, bad = gradients(40), gradients(64)
    for name in good:
        assert relative(bad[name], good[name]) < 1e-5, name


@pytest.mark.parametrize("window", [(sys.maxsize, sys.maxsize), (sys.maxsize - 3, -1), (2**31, 2**31 - 1), (2**80, 2**63)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_of_any_size(device, window, causal):
    def run(window_size, attention=lla.lla_attention):
        q, k, v, ridge = (t.requires_grad_() for t in make_inputs(1, 20, 26, 2, dtype=torch.float64, device=device))
        o = attention(q, k, v, ridge, causal=causal, window_size=window_size)
        return [o, *torch.autograd.grad(o.pow(2).sum(), (q, k, v, ridge))]

    torch.manual_seed(5)
    want = run((-1, -1))
    torch.manual_seed(5)
    for a, b in zip(run(window), want):
        assert torch.equal(a, b)
    torch.manual_seed(5)
    assert relative(run(window, lla.reference.lla_attention)[0], want[0]) < 1e-3


# ---- types ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.complex128])
def test_a_ridge_that_is_no_real_number(device, dtype):
    q, k, v, _ = make_inputs(1, 9, dtype=torch.float32, device=device)
    with pytest.raises(TypeError, match="ridge must hold real numbers"):
        lla.lla_attention(q, k, v, torch.ones((), dtype=dtype, device=device))


@pytest.mark.parametrize("option", ["ridge", "scale"])
def test_an_integer_no_float_holds(device, option):
    q, k, v, ridge = make_inputs(1, 9, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match=option):
        lla.lla_attention(q, k, v, **{"ridge": ridge, option: 10**400})


@pytest.mark.cpu_only
@pytest.mark.parametrize("sizes", [dict(num_heads=0), dict(num_heads=-1), dict(num_kv_heads=0), dict(head_dim=0), dict(embed_dim=0),
                                   dict(embed_dim=8.0), dict(num_heads=True), dict(num_kv_heads="2")])
def test_a_layer_of_no_size(sizes):
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(sizes))} must be"):
        lla.LocalLinearAttention(**{**dict(embed_dim=8, num_heads=2), **sizes})


@pytest.mark.cpu_only
def test_lazily_negated_tensors_are_read_as_they_look():
    q = torch.randn(1, 9, 2, 8, dtype=torch.complex64).conj().imag
    assert q.is_neg()
    assert torch.equal(lla.lla_attention(q, q, q, 0.3), lla.lla_attention(*(q.resolve_neg(),) * 3, 0.3))


@pytest.mark.parametrize("wrong", ["20", 20.0, True, None, -1, 2**70])
def test_max_seqlen(device, wrong):
    q, k, v = (torch.randn(20, 2, 8, device=device) for _ in range(3))
    ends = torch.tensor([0, 20], dtype=torch.int32, device=device)
    with pytest.raises((TypeError, ValueError), match="max_seqlen_k"):
        lla.lla_attention_varlen(q, k, v, 0.3, ends, ends, 20, wrong)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seqlens", ["number", "tensor"])
def test_generation_under_autocast_whatever_the_cache_holds(device, cache_dtype, seqlens):
    """A layer in front gives bfloat16; the result is that of the whole sequence under autocast."""
    q, k, v, ridge = make_inputs(2, 6, dtype=torch.bfloat16, device=device)
    caches = [torch.full((2, CAPACITY, 4, 16), math.nan, dtype=cache_dtype, device=device) for _ in range(2)]
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
        whole = lla.lla_attention(q, k, v, ridge)
        parts = []
        for i in range(6):
            length = i if seqlens == "number" else torch.full((2,), i, dtype=torch.int32, device=device)
            parts.append(lla.lla_attention_with_kvcache(q[:, i:i + 1], *caches, ridge[:, i:i + 1], k[:, i:i + 1],
                                                        v[:, i:i + 1], cache_seqlens=length, return_info=True)[0])
    assert parts[0].dtype == torch.bfloat16
    assert relative(torch.cat(parts, 1), whole) < 2e-2


def test_another_type_without_autocast_says_what_to_do(device):
    q, k, v, ridge = make_inputs(1, 1, dtype=torch.bfloat16, device=device)
    cache = torch.zeros(1, CAPACITY, 4, 16, device=device)
    with pytest.raises(ValueError, match="make the cache with dtype=torch.bfloat16"):
        lla.lla_attention_with_kvcache(q, cache, cache.clone(), ridge, k, v, cache_seqlens=0)


# ---- page tables and refused appends -------------------------------------------------------------------------------


def paged_call(table, seqlens, append=True, **change):
    q = torch.randn(len(table), 1, 2, 8)
    pages = [torch.zeros(4, PAGE, 2, 8) for _ in range(2)]
    arguments = dict(cache_seqlens=seqlens, page_table=torch.tensor(table), ridge=0.3)
    if append:
        arguments.update(k=torch.ones(len(table), 1, 2, 8), v=torch.ones(len(table), 1, 2, 8))
    arguments.update(change)
    try:
        return lla.lla_attention_with_kvcache(q, *pages, **arguments), pages
    except (TypeError, ValueError, NotImplementedError) as error:
        return error, pages


@pytest.mark.cpu_only  # tables on a device are not looked at: that would make the host wait
@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("page", [-1, 4, 2**31 - 1])
def test_a_table_that_names_no_page(append, as_tensor, page):
    seqlens = torch.tensor([4 if append else 5], dtype=torch.int32) if as_tensor else 4 if append else 5
    error, pages = paged_call([[0, page]], seqlens, append)
    assert isinstance(error, ValueError) and f"page {page} in use" in str(error) and "0 to 3" in str(error)
    assert not any(p.any() for p in pages), "written before it was refused"


@pytest.mark.cpu_only
@pytest.mark.parametrize("as_tensor", [False, True])
def test_entries_that_are_not_in_use_may_hold_anything(as_tensor):
    seqlens = torch.tensor([3, 3], dtype=torch.int32) if as_tensor else 3
    o, pages = paged_call([[0, -1, 99], [2, -1, -1]], seqlens)
    assert isinstance(o, torch.Tensor) and all((p[[0, 2], 3] == 1).all() and not p[[1, 3]].any() for p in pages)


@pytest.mark.cpu_only
def test_two_sequences_in_one_place():
    error, pages = paged_call([[0, 1], [2, 1]], 4)
    assert isinstance(error, ValueError) and "same place" in str(error)
    assert not any(p.any() for p in pages)


REFUSED = {
    "ridge shape": dict(ridge=torch.ones(3)), "ridge type": dict(ridge=torch.ones((), dtype=torch.bool)),
    "solver": dict(solver="lu"), "tol": dict(tol=-1.0), "scale": dict(scale=math.inf), "window": dict(window_size=(-2, 0)),
    "implementation": dict(implementation="none such"), "lengths": dict(cache_seqlens=8),
    "k type": dict(k=torch.ones(1, 1, 2, 8, dtype=torch.float64)), "causal": dict(causal=1),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_append_writes_nothing(case):
    error, pages = paged_call([[0, 1]], 3, **REFUSED[case])
    assert isinstance(error, Exception), "accepted"
    assert not any(p.any() for p in pages)


# ---- what else a caller can hand over ------------------------------------------------------------------------------


def cached_call(device, **change):
    """One step of two sequences in caches of ones."""
    caches = [torch.ones(2, CAPACITY, 2, 8, device=device) for _ in range(2)]
    arguments = dict(q=torch.randn(2, 1, 2, 8, device=device), k_cache=caches[0], v_cache=caches[1], ridge=0.3,
                     cache_seqlens=torch.tensor([3, 5], device=device))
    return lla.lla_attention_with_kvcache(**{**arguments, **change})


def appended(device):
    return {name: torch.zeros(2, 1, 2, 8, device=device) for name in ("k", "v")}


def test_lengths_of_64_bits_do_not_wrap(device):
    """2**40 is not 0, which its last 32 bits are."""
    assert not cached_call(device, first_key=torch.tensor([2**40, 2**40], device=device)).any(), "saw keys before the first"
    with pytest.raises(ValueError, match="length"):
        cached_call("cpu", cache_seqlens=torch.tensor([2**32 + 3, 5]), max_seqlen_k=CAPACITY)


PACKED = dict(q=torch.randn(2, 2, 8), cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32), max_seqlen_q=1)


@pytest.mark.cpu_only
@pytest.mark.parametrize("name,wrong", [("cu_seqlens_q", [0, 1, 2]), ("cu_seqlens_q", torch.tensor([0, 1, 2])),
                                        ("max_seqlen_q", "1"), ("max_seqlen_q", -1), ("max_total_k", 1.5),
                                        ("max_total_k", -1)])
@pytest.mark.parametrize("append", [False, True])
def test_bounds_of_a_packed_call(name, wrong, append):
    new = {name: t[:, 0] for name, t in appended("cpu").items()} if append else {}
    with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
        cached_call("cpu", **{**PACKED, **new, name: wrong})


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", ["k", "k_cache", "v_cache", "page_table", "ridge"])
def test_a_cached_call_with_a_tensor_elsewhere(name):
    """One tensor on "meta" makes torch run the shapes alone: the result would be memory as it was found."""
    tensors = {**appended("cpu"), "k_cache": torch.ones(2, CAPACITY, 2, 8), "v_cache": torch.ones(2, CAPACITY, 2, 8),
               "page_table": torch.tensor([[0], [1]]), "ridge": torch.tensor(0.3)}
    tensors[name] = tensors[name].to("meta")
    with pytest.raises(ValueError, match="is on meta, but q is on cpu"):
        cached_call("cpu", **tensors)
    if name in ("k", "k_cache", "v_cache"):
        with pytest.raises(ValueError, match="is on"):
            lla.cache_append(*(tensors[n] for n in ("k", "v", "k_cache", "v_cache")), cache_seqlens=3)


@pytest.mark.parametrize("how", ["append", "step", "step with info"])
def test_autograd_sees_what_is_written(device, how):
    """A backward pass whose keys have been written over since is an error, as after torch's own writing."""
    caches = [torch.randn(2, CAPACITY, 2, 8, device=device) for _ in range(2)]
    q = torch.randn(2, CAPACITY, 2, 8, device=device, requires_grad=True)
    o = lla.lla_attention(q, *caches, 0.3)
    with torch.no_grad():
        if how == "append":
            lla.cache_append(*appended(device).values(), *caches, cache_seqlens=3)
        else:
            cached_call(device, k_cache=caches[0], v_cache=caches[1], **appended(device), return_info=how.endswith("info"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache"])
def test_appending_has_no_gradient(device, name):
    tensors = {**appended(device), **{n: torch.ones(2, CAPACITY, 2, 8, device=device) for n in ("k_cache", "v_cache")}}
    tensors[name].requires_grad_()
    with pytest.raises(ValueError, match="no_grad"):
        lla.cache_append(**tensors, cache_seqlens=3)
    with torch.no_grad():
        lla.cache_append(**tensors, cache_seqlens=3)


# ---- processes -----------------------------------------------------------------------------------------------------

WORKERS = """
    import torch, lla
    torch.set_num_threads(4)
    q = torch.randn(1, 128, 4, 32)
    want = lla.lla_attention(q, q, q, 0.3)

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, i):
            torch.set_num_threads(4)  # a loader's worker has one; with more the library starts threads of its own
            return torch.equal(lla.lla_attention(q, q, q, 0.3), want)

    loader = torch.utils.data.DataLoader(Data(), num_workers=4, multiprocessing_context="fork", batch_size=2)
    assert all(bool(same.all()) for same in loader), "a worker computed something else"
    print("done")
"""


@pytest.mark.cpu_only
def test_workers_forked_after_use_compute():
    """A data loader whose dataset calls the library, as a tokeniser or a teacher model would."""
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(WORKERS)], env=os.environ, capture_output=True, text=True,
                         timeout=240)
    assert run.returncode == 0 and run.stdout.strip() == "done", run.stderr[-2000:]
