"""lla_attention and its variants against the plain-torch reference, and properties that need no reference."""
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, exact_tol, head_error, make_inputs, relative
from hypothesis import given
from hypothesis import strategies as st

import lla

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ridge", ["number", "scalar", "head", "token", "dimension"])
def test_matches_reference(device, dtype, ridge):
    q, k, v, r = make_inputs(heads=4, heads_kv=2, value_dim=24, dtype=dtype, device=device, ridge=ridge)
    o = lla.lla_attention(q, k, v, r, tol=exact_tol(dtype))
    assert o.dtype == dtype and o.shape == (*q.shape[:-1], 24)
    assert_close(o, lla.reference.lla_attention(q, k, v, r))


@given(batch=st.integers(1, 2), length_q=st.integers(1, 40), length_k=st.integers(1, 40), heads_kv=st.integers(1, 2),
       group=st.integers(1, 3), dim=st.sampled_from([1, 3, 8, 16, 20]), value_dim=st.sampled_from([1, 5, 16]),
       causal=st.booleans(), left=st.integers(-1, 9), right=st.integers(-1, 9), layout=st.permutations(range(4)),
       slack=st.integers(0, 2))
def test_any_shape_and_stride(device, batch, length_q, length_k, heads_kv, group, dim, value_dim, causal, left, right,
                              layout, slack):
    def restride(t):
        """The same values with the dimensions in another order in memory and gaps between the rows."""
        order = torch.empty([t.shape[i] for i in layout[:-1]] + [t.shape[layout[-1]] + slack], dtype=t.dtype,
                            device=device)
        view = order[..., :t.shape[layout[-1]]].permute(*[layout.index(i) for i in range(4)])
        return view.copy_(t)

    inputs = make_inputs(batch, length_q, length_k, heads_kv * group, heads_kv, dim, value_dim, device=device,
                         ridge="dimension")
    q, k, v, r = map(restride, inputs)
    options = dict(causal=causal, window_size=(left, right))
    o = lla.lla_attention(q, k, v, r, tol=1e-12, **options)
    assert o.is_contiguous()
    assert_close(o, lla.reference.lla_attention(*inputs, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinite_ridge_is_softmax(device, dtype):
    q, k, v, _ = make_inputs(2, 70, heads=4, heads_kv=2, dim=32, dtype=dtype, device=device)
    o = lla.lla_attention_bhld(*(t.transpose(1, 2) for t in (q, k, v)), math.inf)
    ref = F.scaled_dot_product_attention(*(t.transpose(1, 2).double() for t in (q, k, v)), is_causal=True,
                                         enable_gqa=True)
    assert_close(o.transpose(1, 2), ref.transpose(1, 2), dtype)


def test_recovers_linear_data(device):
    q, k, _, _ = make_inputs(1, 64, heads=2, dim=8, device=device)
    weight, bias = torch.randn(8, 5, dtype=q.dtype, device=device), torch.randn(5, dtype=q.dtype, device=device)
    o = lla.lla_attention(q, k, k @ weight + bias, 1e-12, solver="direct")
    late = slice(16, None)  # D + 1 keys in general position span the space
    assert relative(o[:, late], (q @ weight + bias)[:, late]) < 1e-6


def test_keys_far_from_the_origin(device):
    """With equal weights a common shift of queries and keys changes nothing: in the library and in the reference."""
    q, k, v, _ = make_inputs(1, 40, heads=2, device=device)
    for attention in (lla.lla_attention, lla.reference.lla_attention):
        near, far = (attention(q + shift, k + shift, v, 1e-6, scale=0.0, solver="direct") for shift in (0, 2**13))
        assert relative(far, near) < 1e-6


def test_one_key_returns_its_value(device):
    q, k, v, r = make_inputs(3, 1, heads=2, dtype=torch.float32, device=device)
    assert torch.equal(lla.lla_attention(q, k, v, r), v)


@pytest.mark.parametrize("ridge", ["number", "scalar", "head", "token", "dimension"])
def test_varlen_equals_single_sequences(device, ridge):
    lengths_q, lengths_k = [5, 0, 17, 1], [5, 3, 20, 0]
    q, _, _, r = make_inputs(1, sum(lengths_q), heads=4, device=device, ridge=ridge)
    _, k, v, _ = make_inputs(1, sum(lengths_k), heads=2, device=device)
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32, device=device)
                  for n in (lengths_q, lengths_k))
    r = r[0] if ridge in ("token", "dimension") else r
    q, k, v = (t[0].requires_grad_() for t in (q, k, v))
    args = (q, k, v, r, cu_q, cu_k, 17, 20)
    o, info = lla.lla_attention_varlen(*args, tol=1e-12, return_info=True)
    ref = lla.reference.lla_attention_varlen(*args)
    assert_close(o, ref)
    assert info.iterations.shape == info.status.shape == (4, sum(lengths_q))
    g = torch.randn_like(o)
    for a, b in zip(torch.autograd.grad(o, (q, k, v), g), torch.autograd.grad(ref, (q, k, v), g)):
        assert relative(a, b) < 1e-8


def test_parallax_matches_reference(device):
    q, k, v, _ = make_inputs(heads=4, heads_kv=2, device=device)
    x = 0.3 * torch.randn_like(q)
    leaves = [t.requires_grad_() for t in (q, k, v, x)]
    o, ref = lla.parallax_attention(*leaves), lla.reference.parallax_attention(*leaves)
    assert_close(o, ref)
    g = torch.randn_like(o)
    for a, b in zip(torch.autograd.grad(o, leaves, g), torch.autograd.grad(ref, leaves, g)):
        assert relative(a, b) < 1e-9


def test_bhld_equals_blhd(device):
    q, k, v, r = make_inputs(device=device, ridge="dimension")
    o = lla.lla_attention(q, k, v, r)
    moved = (t.transpose(1, 2).contiguous() for t in (q, k, v, r))
    assert torch.equal(lla.lla_attention_bhld(*moved), o.transpose(1, 2))


def test_info(device):
    q, k, v, r = make_inputs(2, 40, heads=3, dim=16, device=device, dtype=torch.float32)
    o, info = lla.lla_attention(q, k, v, r, solver="cg", return_info=True)
    assert torch.equal(o, lla.lla_attention(q, k, v, r, solver="cg"))
    assert info.iterations.shape == info.residual.shape == info.status.shape == (2, 3, 40)
    assert info.iterations.dtype == info.status.dtype == torch.int32 and info.residual.dtype == torch.float32
    assert info.iterations.max() > 0 and info.residual.max() <= 1e-3
    assert lla.STATUS_NAMES[int(info.status.max())] == "ok"
    assert "solver: cg" in info.plan
    _, limited = lla.lla_attention(q, k, v, r, solver="cg", tol=1e-6, max_iterations=1, return_info=True)
    assert lla.STATUS_NAMES[int(limited.status.max())] == "max_iterations"
    _, direct = lla.lla_attention(q, k, v, r, solver="direct", return_info=True)
    assert (direct.iterations == -1).all() and (direct.residual == -1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_unseen_keys_never_matter(device, dtype):
    q, k, v, r = make_inputs(1, 20, device=device, dtype=dtype)
    options = dict(window_size=(4, 0), tol=exact_tol(dtype))
    clean = lla.lla_attention(q, k, v, r, **options)
    k[:, -1], v[:, -1] = math.nan, math.inf  # the last query alone sees the last key
    o = lla.lla_attention(q, k, v, r, **options)
    if dtype == torch.float64:  # rows solved directly share a point to center keys on, which rounds differently
        assert head_error(o[:, :-1], clean[:, :-1]) < 1e-13
    else:
        assert torch.equal(o[:, :-1], clean[:, :-1])
    assert o[:, -1].isnan().all()


def test_bad_ridge_spoils_its_row_only(device):
    q, k, v, r = make_inputs(1, 20, device=device, dtype=torch.float32)
    clean = lla.lla_attention(q, k, v, r)
    r[0, 7, 1] = -1
    o, info = lla.lla_attention(q, k, v, r, return_info=True)
    assert o[0, 7, 1].isnan().all() and lla.STATUS_NAMES[int(info.status[0, 1, 7])] == "nan"
    o[0, 7, 1] = clean[0, 7, 1]
    assert torch.equal(o, clean)


@pytest.mark.parametrize("size", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_empty_sizes(device, size):
    q, k, v, r = make_inputs(*size, heads=2, device=device, dtype=torch.float32)
    leaves = [t.requires_grad_() for t in (q, k, v, r)]
    o = lla.lla_attention(*leaves, causal=False)
    assert o.shape == q.shape and (o == 0).all()
    for grad, leaf in zip(torch.autograd.grad(o.sum(), leaves), leaves):
        assert grad.shape == leaf.shape and (grad == 0).all()


def test_deterministic(device):
    q, k, v, r = make_inputs(2, 200, dim=32, dtype=torch.float32, device=device)
    first = lla.lla_attention(q, k, v, r)
    assert all(torch.equal(first, lla.lla_attention(q, k, v, r)) for _ in range(3))


@pytest.mark.cpu_only
def test_threads_follow_torch_and_change_nothing():
    q, k, v, r = make_inputs(2, 100, dim=32, dtype=torch.float32)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(lla.lla_attention(q, k, v, r))
            assert f"{threads} thread" in lla.machine()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], o) for o in results[1:])


def test_inputs_are_not_copied_or_changed(device):
    q, k, v, r = make_inputs(device=device, dtype=torch.float32)
    versions = [t._version for t in (q, k, v, r)]
    copies = [t.clone() for t in (q, k, v, r)]
    lla.lla_attention(q, k, v, r)
    assert versions == [t._version for t in (q, k, v, r)]
    assert all(torch.equal(t, c) for t, c in zip((q, k, v, r), copies))


def test_explain_names_every_implementation(device):
    q, k, v, r = make_inputs(device=device, dtype=torch.float32)
    answers = lla.explain(q, k, v, r)
    assert list(answers) == list(lla.implementations())
    taken = [name for name, reason in answers.items() if reason is None]
    assert taken and all(head_error(lla.lla_attention(q, k, v, r, implementation=name, tol=1e-6),
                                    lla.lla_attention(q, k, v, r, tol=1e-6)) < 1e-4 for name in taken)


def test_default_tolerance_goes_by_type(device):
    for dtype, tol in ((torch.bfloat16, 1e-3), (torch.float32, 1e-4), (torch.float64, 1e-9)):
        q, k, v = (torch.randn(1, 80, 1, 64, dtype=dtype, device=device) for _ in range(3))
        _, default = lla.lla_attention(q, k, v, 0.1, solver="cg", return_info=True)
        _, named = lla.lla_attention(q, k, v, 0.1, solver="cg", tol=tol, return_info=True)
        assert torch.equal(default.iterations, named.iterations)


@pytest.mark.parametrize("kind", ["float32", "float64", "int64", "float16"])
def test_numpy_scalars_are_numbers(kind):
    """A ridge read from an array or a config of numpy's is neither an int nor a float."""
    number = getattr(np, kind)(1)
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    expected = lla.lla_attention(q, k, v, 1.0, scale=1.0, tol=1.0)
    assert torch.equal(lla.lla_attention(q, k, v, number, scale=number, tol=number), expected)
