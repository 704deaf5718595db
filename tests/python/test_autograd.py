"""Gradients, torch.compile, autocast, and torch's own checks of operator registrations."""
import inspect
import math

import pytest
import torch
from helpers import make_inputs, relative
from torch.autograd import forward_ad

import lla

OPTIONS = (None, None, 0, 0, None, True, -1, -1, 1e-12, 0, "direct", None, False, False)
CACHE = (None, None, None, 0)


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() if isinstance(t, torch.Tensor) else t for t in tensors]


@pytest.mark.parametrize("ridge", ["scalar", "head", "token", "dimension"])
def test_gradcheck(device, ridge):
    inputs = leaves(*make_inputs(1, 6, 7, 4, 2, 3, 2, device=device, ridge=ridge))
    assert torch.autograd.gradcheck(lambda *a: lla.lla_attention(*a, solver="direct"), inputs)


def test_gradcheck_cg_window(device):
    inputs = leaves(*make_inputs(1, 7, heads=2, dim=4, device=device))
    assert torch.autograd.gradcheck(
        lambda *a: lla.lla_attention(*a, solver="cg", tol=1e-14, causal=False, window_size=(3, 1)), inputs)


def test_gradcheck_parallax(device):
    q, k, v, _ = make_inputs(1, 6, heads=2, dim=3, device=device)
    assert torch.autograd.gradcheck(lla.parallax_attention, leaves(q, k, v, torch.randn_like(q)))


@pytest.mark.parametrize("given_x", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(device, given_x, packed):
    q, k, v, ridge = make_inputs(1, 6, heads=4, heads_kv=2, dim=4, value_dim=3, device=device)
    options = OPTIONS
    if packed:
        q, k, v, ridge = (t[0] for t in (q, k, v, ridge))
        cu = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
        options = (cu, cu, 4, 4, *OPTIONS[4:])
    last = (None, torch.randn_like(q)) if given_x else (ridge, None)
    args = leaves(q, k, v, *last)
    torch.library.opcheck(torch.ops.lla.forward.default, (*args, *options, *CACHE, True, True))
    o, saved, *_ = torch.ops.lla.forward(*args, *options, *CACHE, True, False)
    plain = [t.detach() if t is not None else None for t in args]
    torch.library.opcheck(torch.ops.lla.backward.default,
                          (torch.randn_like(o), *plain, saved, *options, True, True, False, True, True))
    torch.library.opcheck(torch.ops.lla.inference.default, (*plain, *options))
    torch.library.opcheck(torch.ops.lla.plan.default, (*plain, *options, *CACHE, False),
                          test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3), (1, 2)])
def test_only_wanted_gradients(device, wanted):
    inputs = make_inputs(2, 12, heads=4, heads_kv=2, device=device)
    full = leaves(*inputs)
    g = torch.randn(2, 12, 4, 16, dtype=torch.float64, device=device)
    expected = torch.autograd.grad(lla.lla_attention(*full, solver="direct"), full, g)
    some = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(inputs)]
    lla.lla_attention(*some, solver="direct").backward(g)
    for i, t in enumerate(some):
        assert (t.grad is not None) == (i in wanted)
        assert t.grad is None or relative(t.grad, expected[i]) < 1e-12


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-3), (torch.bfloat16, 2e-2), (torch.float16, 1e-2)])
def test_gradients_of_narrow_types(device, dtype, limit):
    inputs = leaves(*make_inputs(2, 50, heads=4, heads_kv=2, dim=32, dtype=dtype, device=device, low=0.3))
    o, ref = lla.lla_attention(*inputs, tol=1e-6), lla.reference.lla_attention(*inputs)
    g = torch.randn_like(o)
    for got, want, leaf in zip(torch.autograd.grad(o, inputs, g), torch.autograd.grad(ref, inputs, g.double()), inputs):
        assert got.dtype == leaf.dtype and relative(got, want) < limit


def test_expanded_gradient_and_inputs(device):
    inputs = leaves(*make_inputs(2, 12, device=device))
    by_sum = torch.autograd.grad(lla.lla_attention(*inputs).sum(), inputs)  # its gradient has stride 0 everywhere
    ones = torch.ones(2, 12, 4, 16, dtype=torch.float64, device=device)
    for a, b in zip(by_sum, torch.autograd.grad(lla.lla_attention(*inputs), inputs, ones)):
        assert torch.equal(a, b)
    q, k, v, _ = inputs
    shared = torch.tensor(0.3, dtype=torch.float64, device=device, requires_grad=True)
    (wide,) = torch.autograd.grad(lla.lla_attention(q, k, v, shared.expand(2, 12, 4)).sum(), shared)
    (narrow,) = torch.autograd.grad(lla.lla_attention(q, k, v, shared).sum(), shared)
    assert relative(wide, narrow) < 1e-12


def test_infinite_ridge_has_no_gradient(device):
    q, k, v, ridge = leaves(*make_inputs(1, 12, device=device, ridge="dimension"))
    with torch.no_grad():
        ridge[..., 3] = math.inf
    lla.lla_attention(q, k, v, ridge, solver="direct").sum().backward()
    assert (ridge.grad[..., 3] == 0).all() and ridge.grad.isfinite().all() and ridge.grad.abs().sum() > 0


def test_double_backward_is_refused(device):
    inputs = leaves(*make_inputs(1, 6, device=device))
    (dq,) = torch.autograd.grad(lla.lla_attention(*inputs).sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        dq.sum().backward()


def test_torch_func(device):
    q, k, v, ridge = make_inputs(1, 6, device=device)

    def loss(*inputs):
        return lla.lla_attention(*inputs, solver="direct").square().sum()

    queries = torch.stack([q, 2 * q])
    by_sample = torch.func.vmap(torch.func.grad(loss), (0, None, None, None))(queries, k, v, ridge)
    for query, got in zip(queries, by_sample):
        leaf = query.clone().requires_grad_()
        (want,) = torch.autograd.grad(loss(leaf, k, v, ridge), leaf)
        assert torch.equal(got, want) and torch.equal(torch.func.grad(loss)(query, k, v, ridge), want)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x, k, v, ridge).sum())(q)


def test_forward_derivatives_are_refused(device):
    q, k, v, ridge = make_inputs(1, 6, device=device)
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(lambda x: lla.lla_attention(x, k, v, ridge), (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode"):
        lla.lla_attention(forward_ad.make_dual(q, q), k, v, ridge)


def test_left_out_arguments_are_the_defaults():
    arguments = torch.ops.lla.inference.default._schema.arguments
    assert [a.name for a in arguments[5 + lla._ops._OPTIONS:]] == ["seqlens_k", "page_table", "first_key", "max_total_k"]
    assert lla._ops._DEFAULTS[lla._ops._OPTIONS:] == lla._ops.NO_CACHE
    defaults = inspect.signature(lla.lla_attention).parameters
    for name in ("scale", "causal", "tol", "solver", "implementation", "batch_invariant"):
        assert {a.name: a.default_value for a in arguments}[name] == defaults[name].default


def test_nothing_is_saved_without_gradients(device):
    q, k, v, ridge = make_inputs(1, 6, device=device)
    assert lla.lla_attention(q, k, v, ridge).grad_fn is None
    with torch.no_grad():
        assert lla.lla_attention(*leaves(q, k, v, ridge)).grad_fn is None
    with torch.inference_mode():
        lla.lla_attention(q, k, v, 0.1)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph_dynamic(device, backend):
    def model(q, k, v, ridge):
        return lla.lla_attention(q * 2, k, v, torch.sigmoid(ridge), solver="direct").square()

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    counter = torch._dynamo.testing.CompileCounter()
    counted = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for length in (12, 9, 20):
        inputs = leaves(*make_inputs(2, length, heads=4, heads_kv=2, device=device))
        counted(*inputs)
        o, eager = compiled(*inputs), model(*inputs)
        assert relative(o, eager) < 1e-12
        g = torch.randn_like(o)
        for a, b in zip(torch.autograd.grad(o, inputs, g), torch.autograd.grad(eager, inputs, g)):
            assert relative(a, b) < 1e-12
    assert counter.frame_count == 1, "a new length compiled the graph again"


def test_compile_with_info_and_number(device):
    compiled = torch.compile(lambda *a: lla.lla_attention(*a, 0.2, return_info=True), fullgraph=True,
                             backend="aot_eager")
    q, k, v, _ = make_inputs(1, 8, device=device)
    o, info = compiled(q, k, v)
    eager, eager_info = lla.lla_attention(q, k, v, 0.2, return_info=True)
    assert torch.equal(o, eager) and torch.equal(info.status, eager_info.status) and info.plan == eager_info.plan


def test_compile_refuses_wrong_shapes(device):
    compiled = torch.compile(lla.lla_attention, fullgraph=True, backend="aot_eager")
    q, k, v, ridge = make_inputs(2, 8, device=device)
    with pytest.raises(Exception, match=r"k: shape is \(1, 8, 4, 16\)"):
        compiled(q, k[:1], v[:1], ridge)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("traced", [False, True])
def test_autocast(device, dtype, traced):
    attention = lla.lla_attention
    if traced:
        attention = torch.compile(attention, fullgraph=True, backend="aot_eager")
    inputs = leaves(*make_inputs(1, 12, dtype=torch.float32, device=device))
    with torch.autocast(device, dtype=dtype):
        o = attention(*inputs)
    assert o.dtype == dtype
    grads = torch.autograd.grad(o.float().sum(), inputs)
    assert all(g.dtype == torch.float32 for g in grads)
    q, k, v, ridge = inputs
    plain = lla.lla_attention(q.to(dtype), k.to(dtype), v.to(dtype), ridge)  # the ridge keeps its digits
    assert torch.equal(o, plain)
    for a, b in zip(grads, torch.autograd.grad(plain.float().sum(), inputs)):
        assert torch.equal(a, b)


def test_autocast_leaves_float64(device):
    with torch.autocast(device, dtype=torch.bfloat16):
        assert lla.lla_attention(*make_inputs(1, 6, device=device)).dtype == torch.float64


def test_export(device):
    class Model(torch.nn.Module):
        def forward(self, q, k, v, ridge):
            return lla.lla_attention(q, k, v, ridge)

    inputs = make_inputs(2, 8, device=device)
    program = torch.export.export(Model(), tuple(inputs))
    assert torch.equal(program.module()(*inputs), lla.lla_attention(*inputs))


def test_checkpointing(device):
    inputs = leaves(*make_inputs(1, 12, device=device))
    o = torch.utils.checkpoint.checkpoint(lla.lla_attention, *inputs, use_reentrant=False)
    expected = torch.autograd.grad(lla.lla_attention(*inputs).sum(), inputs)
    for a, b in zip(torch.autograd.grad(o.sum(), inputs), expected):
        assert torch.equal(a, b)


def test_info_of_the_backward_pass(device):
    q, k, v, ridge = make_inputs(2, 40, heads=4, heads_kv=2, device=device)
    o, info = lla.lla_attention(*leaves(q, k, v, ridge), solver="cg", tol=1e-6, return_info=True)
    assert info.backward.status is None
    o.sum().backward()
    for forward, backward in zip(info[:3], (info.backward.iterations, info.backward.residual, info.backward.status)):
        assert backward.shape == forward.shape and backward.dtype == forward.dtype
    assert (info.backward.status == 0).all() and (info.backward.iterations > 0).any()
    assert (info.backward.residual <= 1e-6).all()
    assert lla.lla_attention(q, k, v, ridge, return_info=True)[1].backward is None
