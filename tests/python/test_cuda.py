"""What only a GPU can show: streams, graphs, no synchronisation, device errors. Skipped on the CPU."""
import pytest
import torch
from helpers import make_inputs, relative

import lla


@pytest.fixture(autouse=True)
def needs_gpu(device):
    if device != "cuda":
        pytest.skip("needs a GPU")


def test_runs_on_the_current_stream():
    q, k, v, ridge = make_inputs(2, 300, dim=64, dtype=torch.bfloat16, device="cuda")
    expected = lla.lla_attention(q, k, v, ridge)
    stream = torch.cuda.Stream()
    late = torch.empty_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # the values of `late` come after this
        late.copy_(q)
        o = lla.lla_attention(late, k, v, ridge)
    stream.synchronize()
    assert torch.equal(o, expected)


def test_graph_capture():
    q, k, v, ridge = make_inputs(1, 200, dim=64, dtype=torch.float16, device="cuda")
    lla.lla_attention(q, k, v, ridge)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = lla.lla_attention(q, k, v, ridge)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(o, lla.lla_attention(q, k, v, ridge))


def test_never_synchronises():
    inputs = [t.requires_grad_() for t in make_inputs(2, 100, dim=64, dtype=torch.bfloat16, device="cuda")]
    cache = [torch.randn(2, 64, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    lengths = torch.tensor([30, 50], dtype=torch.int32, device="cuda")
    q = inputs[0][:, :1].detach()
    lla.lla_attention(*inputs).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        lla.lla_attention(*inputs).sum().backward()
        lla.lla_attention(*inputs[:3], 0.1)
        with torch.no_grad():
            lla.lla_attention_with_kvcache(q, *cache, 0.1, q, q, cache_seqlens=lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cpu_and_gpu_agree():
    inputs = make_inputs(2, 150, heads=4, heads_kv=2, dim=64, dtype=torch.float32)
    o = lla.lla_attention(*(t.cuda() for t in inputs), tol=1e-6)
    assert relative(o, lla.lla_attention(*inputs, tol=1e-6)) < 1e-4


def test_mixed_devices_are_refused():
    q, k, v, ridge = make_inputs(2, 9, dtype=torch.float32)
    with pytest.raises(ValueError, match="k"):
        lla.lla_attention(q.cuda(), k, v, ridge)
    with pytest.raises(ValueError, match="ridge"):
        lla.lla_attention(q.cuda(), k.cuda(), v.cuda(), ridge)


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_captured_step_follows_its_cache(page_size):
    """A layer's step captured once and replayed: the lengths grow on the device, the bound is the capacity."""
    torch.manual_seed(1)
    layer = lla.LocalLinearAttention(256, 4, 2, rope=True, qk_norm=True, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 40, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        whole = layer(x)
        cache = layer.make_cache(2, 40, page_size=page_size)
        first = layer(x[:, :8], cache=cache)
        new = torch.empty(2, 1, 256, device="cuda", dtype=torch.bfloat16)
        new.copy_(x[:, 8:9])
        eager = layer(new, cache=cache)
        cache.seqlens -= 1  # the warm-up is written again
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = layer(new, cache=cache)
        steps = []
        for i in range(8, 40):
            new.copy_(x[:, i:i + 1])
            graph.replay()
            steps.append(o.clone())
        assert cache.seqlens.tolist() == [40, 40] and cache.length == 40
        graph.replay()  # no room is left
        assert o.isnan().all()
    assert torch.equal(steps[0], eager)
    made = torch.cat([first, *steps], 1).float()
    assert ((made - whole.float()).norm() / whole.float().norm()).item() < 2e-2
