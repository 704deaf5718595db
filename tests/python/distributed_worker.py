"""What every process of test_distributed.py runs, under torchrun: sharded against single-process attention."""
import itertools
import os
import sys

import torch
import torch.distributed as dist
from helpers import leave_together, make_inputs, relative
from torch.distributed.device_mesh import init_device_mesh

import lla
from lla.distributed import head_parallel_attention, sequence_parallel_attention, shard_sequence, unshard_sequence

LIMIT = 1e-10
OPTIONS = dict(solver="direct")


def compare(attention, group, device, layout, ridge_kind, mask, heads, heads_kv):
    """Forward and all gradients of one configuration; every process draws the same whole problem."""
    torch.manual_seed(7)
    whole = [t.detach().requires_grad_() if isinstance(t, torch.Tensor) else t
             for t in make_inputs(2, 24, heads=heads, heads_kv=heads_kv, dim=8, value_dim=6, device=device,
                                  ridge=ridge_kind)]
    grad = torch.randn(2, 24, heads, 6, dtype=torch.float64, device=device)
    expected = lla.lla_attention(*whole, **mask, **OPTIONS)
    by_tensor = [t for t in whole if isinstance(t, torch.Tensor)]
    expected_grads = torch.autograd.grad(expected, by_tensor, grad)

    cut = dict(group=group, layout=layout)
    sharded = [isinstance(t, torch.Tensor) and t.dim() >= 3 for t in whole]
    mine = [shard_sequence(t.detach(), **cut).requires_grad_() if s else
            t.detach().clone().requires_grad_() if isinstance(t, torch.Tensor) else t for t, s in zip(whole, sharded)]
    o = attention(*mine, **cut, **mask, **OPTIONS)
    errors = {"o": relative(o, shard_sequence(expected, **cut))}
    o.backward(shard_sequence(grad, **cut))
    names = [name for name, t in zip(("dq", "dk", "dv", "dridge"), whole) if isinstance(t, torch.Tensor)]
    for name, want, leaf in zip(names, expected_grads, [t for t in mine if isinstance(t, torch.Tensor)]):
        got = leaf.grad.clone()
        if leaf.dim() >= 3:
            want = shard_sequence(want, **cut)
        else:
            dist.all_reduce(got)
        errors[name] = relative(got, want)
    bad = {name: error for name, error in errors.items() if not error < LIMIT}
    assert not bad, f"{attention.__name__} {layout} ridge {ridge_kind} {mask} heads {heads}/{heads_kv}: {bad}"


def check_unshard(group, device):
    x = torch.arange(2 * 16 * 3, dtype=torch.float64, device=device).view(2, 16, 3)
    for layout in lla.distributed.LAYOUTS:
        share = shard_sequence(x, group=group, layout=layout).requires_grad_()
        back = unshard_sequence(share, group=group, layout=layout)
        assert torch.equal(back, x)
        back.sum().backward()
        assert (share.grad == dist.get_world_size()).all()


def check_errors(world):
    q = torch.zeros(1, 2, 3, 4)
    if world == 1:  # divides any number of heads
        return
    for call, word in (
        (lambda: sequence_parallel_attention(q, q, q, 0.1, layout="ring"), "layout"),
        (lambda: sequence_parallel_attention(q[:, :1], q[:, :1], q[:, :1], 0.1), "length"),
        (lambda: head_parallel_attention(q, q, q, 0.1), "heads"),
        (lambda: shard_sequence(torch.zeros(1, 2 * world + 1, 3)), "multiple"),
    ):
        try:
            call()
        except ValueError as error:
            assert word in str(error), error
        else:
            raise AssertionError(f"no error about {word}")


def main():
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("sequence",))
    masks = [dict(), dict(window_size=(5, 0)), dict(causal=False), dict(causal=False, window_size=(4, 7)),
             dict(causal=False, window_size=(-1, 3))]
    for layout, mask in itertools.product(lla.distributed.LAYOUTS, masks):
        for ridge in ("number", "scalar", "head", "token", "dimension"):
            if mask and ridge not in ("number", "token"):
                continue
            compare(sequence_parallel_attention, mesh, device, layout, ridge, mask, 6, 3)
            compare(head_parallel_attention, mesh["sequence"], device, layout, ridge, mask, 8, 4)
    compare(head_parallel_attention, None, device, "zigzag", "head", {}, 8, 2)  # P = 4: key heads are repeated
    check_unshard(dist.group.WORLD, device)
    check_errors(world)
    leave_together(f"{world} processes: equal")


if __name__ == "__main__":
    main()
