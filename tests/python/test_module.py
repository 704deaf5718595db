"""The attention layer: shapes of its state, training, and generation equal to training."""
import pytest
import torch
from helpers import relative

import lla

VARIANTS = {
    "plain": {},
    "grouped": dict(num_kv_heads=2),
    "dimension": dict(ridge="dimension"),
    "shared": dict(ridge="shared", ridge_bias=False, num_kv_heads=2),
    "rope": dict(rope=True, qk_norm=True, num_kv_heads=1),
    "paper": dict(ridge_min=0.0, bias=True),
    "unbounded": dict(ridge_form="softplus", ridge="dimension"),
    "window": dict(window_size=(6, 0), head_dim=12),
}


def make(variant, device, dtype=torch.float64):
    return lla.LocalLinearAttention(32, 4, **VARIANTS[variant], tol=1e-10, device=device, dtype=dtype)


@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_equals_training(device, variant):
    layer = make(variant, device)
    x = torch.randn(2, 21, 32, device=device, dtype=torch.float64)
    whole = layer(x)
    cache = layer.make_cache(2, 24)
    with torch.no_grad():
        prefix = layer(x[:, :9], cache=cache)
        tokens = [layer(x[:, i:i + 1], cache=cache) for i in range(9, 21)]
    assert cache.length == 21
    assert relative(torch.cat([prefix, *tokens], 1), whole) < 1e-6
    cache.reset()
    with torch.no_grad():
        assert relative(layer(x, cache=cache), whole) < 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_equals_separate(device, variant):
    layer = make(variant, device)
    x = torch.randn(21, 32, device=device, dtype=torch.float64)
    cu = torch.tensor([0, 8, 8, 21], dtype=torch.int32, device=device)
    packed = layer(x, cu_seqlens=cu, max_seqlen=13)
    separate = torch.cat([layer(x[None, :8])[0], layer(x[None, 8:])[0]])
    assert relative(packed, separate) < 1e-6


@pytest.mark.parametrize("variant", ["rope", "dimension", "shared"])
def test_every_parameter_learns(device, variant):
    layer = make(variant, device, torch.float32)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    x, target = torch.randn(4, 16, 32, device=device), torch.randn(4, 16, 32, device=device)
    losses = []
    for _ in range(30):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        assert all(p.grad.abs().max() > 0 for p in layer.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("how", ["bfloat16", "half", "double", "meta"])
def test_positions_mean_the_same_however_the_layer_was_made(device, how):
    layer = lla.LocalLinearAttention(32, 4, rope=True, device="meta" if how == "meta" else device)
    layer = layer.to_empty(device=device) if how == "meta" else getattr(layer, how)()
    q, positions = torch.randn(1, 9, 4, 8, device=device), 1000 * torch.arange(9, device=device)
    want = lla.LocalLinearAttention(32, 4, rope=True, device=device).rope(q, positions)
    assert torch.equal(layer.rope(q, positions), want)
    assert not list(layer.rope.buffers())


def test_ridge_stays_in_its_range(device):
    for ridge, size in (("head", (2, 5, 4)), ("dimension", (2, 5, 4, 8)), ("shared", (2, 5, 4, 8))):
        layer = lla.LocalLinearAttention(32, 4, ridge=ridge, ridge_min=0.25, device=device)
        values = layer.compute_ridge(100 * torch.randn(2, 5, 32, device=device))
        assert values.shape == size and values.dtype == torch.float32
        assert values.min() >= 0.25 and values.max() <= 1


def test_softplus_has_a_floor_and_no_ceiling(device):
    layer = lla.LocalLinearAttention(32, 4, ridge_min=0.25, ridge_form="softplus", device=device)
    x = 10 * torch.randn(2, 5, 32, device=device)
    values = layer.compute_ridge(x)
    assert values.min() >= 0.25 and values.max() > 2
    assert torch.allclose(values, 0.25 + 0.75 * layer.ridge_proj(x).double().exp().log1p().float(), rtol=1e-5)


def test_shared_ridge_is_one_for_all_heads(device):
    """The paper's d_lambda = d_h: equal to a ridge per dimension whose heads have the same weights."""
    shared = lla.LocalLinearAttention(32, 4, ridge="shared", tol=1e-13, device=device, dtype=torch.float64)
    apart = lla.LocalLinearAttention(32, 4, ridge="dimension", tol=1e-13, device=device, dtype=torch.float64)
    state = shared.state_dict()
    for name in ("ridge_proj.weight", "ridge_proj.bias"):
        state[name] = torch.cat([state[name]] * 4)
    apart.load_state_dict(state)
    x = torch.randn(2, 9, 32, device=device, dtype=torch.float64)
    values = shared.compute_ridge(x)
    assert torch.equal(values[..., 0, :], values[..., 3, :]) and values[0, 0, 0].unique().numel() == 8
    # Not to the bit: the projections are products of different shapes, which torch may sum in different orders.
    torch.testing.assert_close(values, apart.compute_ridge(x), rtol=1e-14, atol=0)
    first, second = shared(x), apart(x)
    torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-12)
    first.square().sum().backward()
    second.square().sum().backward()
    summed = apart.ridge_proj.weight.grad.unflatten(0, (4, 8)).sum(0)
    assert relative(shared.ridge_proj.weight.grad, summed) < 1e-10


def test_state_dict_is_stable():
    """Names and shapes that saved checkpoints rely on."""
    shapes = {name: tuple(t.shape) for name, t in make("rope", "cpu").state_dict().items()}
    assert shapes == {
        "q_proj.weight": (32, 32), "k_proj.weight": (8, 32), "v_proj.weight": (8, 32), "o_proj.weight": (32, 32),
        "ridge_proj.weight": (4, 32), "ridge_proj.bias": (4,), "q_norm.weight": (8,), "k_norm.weight": (8,),
    }
    shapes = {name: tuple(t.shape) for name, t in make("dimension", "cpu").state_dict().items()}
    assert shapes["ridge_proj.weight"] == (32, 32) and "q_norm.weight" not in shapes
    shapes = {name: tuple(t.shape) for name, t in make("shared", "cpu").state_dict().items()}
    assert shapes["ridge_proj.weight"] == (8, 32) and "ridge_proj.bias" not in shapes
    first, second = make("grouped", "cpu"), make("grouped", "cpu")
    second.load_state_dict(first.state_dict())
    x = torch.randn(1, 7, 32, dtype=torch.float64)
    assert torch.equal(first(x), second(x))


def test_compiles_without_graph_breaks(device):
    layer = make("rope", device, torch.float32)
    x = torch.randn(2, 9, 32, device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert relative(compiled(x), layer(x)) < 1e-5


def test_bfloat16_layer(device):
    layer = make("grouped", device, torch.bfloat16)
    o = layer(torch.randn(2, 9, 32, device=device, dtype=torch.bfloat16))
    assert o.dtype == torch.bfloat16 and o.isfinite().all()


@pytest.mark.parametrize("change,word", [
    (dict(num_heads=5), "embed_dim"), (dict(num_kv_heads=3), "num_kv_heads"), (dict(ridge="token"), "ridge"),
    (dict(ridge_min=1.0), "ridge_min"), (dict(ridge_form="exp"), "ridge_form"), (dict(rope=True, head_dim=7), "head_dim"),
])
def test_wrong_configuration(change, word):
    with pytest.raises(ValueError, match=word):
        lla.LocalLinearAttention(**{**dict(embed_dim=32, num_heads=4), **change})


def test_wrong_input():
    layer = make("plain", "cpu")
    with pytest.raises(ValueError, match="x has 2 dimensions"):
        layer(torch.ones(3, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match="cache"):
        cache = layer.make_cache(1, 2)
        with torch.no_grad():
            layer(torch.ones(1, 3, 32, dtype=torch.float64), cache=cache)
    with pytest.raises(ValueError, match="no_grad"):
        layer(torch.ones(1, 1, 32, dtype=torch.float64), cache=layer.make_cache(1, 2))
