"""float32 tensors and TF32: who decides, and what comes of it."""
import pytest
import torch
from helpers import make_inputs

import lla


@pytest.fixture
def matmul():
    """torch's own setting, put back afterwards."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    yield setting
    setting.fp32_precision = before


def test_on_a_cpu_the_permission_changes_nothing(matmul):
    q, k, v, ridge = make_inputs(1, 12, device="cpu")
    full = lla.lla_attention(q, k, v, ridge, tol=1e-4, precision="full")
    matmul.fp32_precision = "tf32"
    assert torch.equal(lla.lla_attention(q, k, v, ridge, tol=1e-4), full)
    assert torch.equal(lla.lla_attention(q, k, v, ridge, tol=1e-4, precision="tf32"), full)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_follows_torch_unless_told(matmul, compiled):
    q, k, v = (torch.randn(1, 64, 2, 64, device="cuda") for _ in range(3))

    def plan(**options):
        return lla.lla_attention(q, k, v, 0.1, return_info=True, **options)[1].plan

    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(lambda q: lla.lla_attention(q, k, v, 0.1), fullgraph=True)
        matmul.fp32_precision = "tf32"
        assert torch.equal(attend(q), lla.lla_attention(q, k, v, 0.1, precision="tf32"))
        return
    matmul.fp32_precision = "ieee"
    assert "sm90" not in plan() and "sm90" in plan(precision="tf32")
    matmul.fp32_precision = "tf32"
    assert "sm90" in plan() and "sm90" not in plan(precision="full")


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
def test_a_layer_trains_in_tf32(matmul):
    matmul.fp32_precision = "tf32"
    torch.manual_seed(0)
    layer = lla.LocalLinearAttention(128, 2, rope=True, qk_norm=True).cuda()
    h = torch.randn(2, 200, 128, device="cuda")
    layer(h).pow(2).sum().backward()
    tf32 = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer.options["precision"] = "full"
    layer(h).pow(2).sum().backward()
    for a, p in zip(tf32, layer.parameters()):
        assert a.dtype == torch.float32
        assert (a - p.grad).norm() < 2e-2 * p.grad.norm()
