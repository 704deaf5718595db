"""What both processes of test_training.py's DistributedDataParallel test run, under torchrun with Gloo."""
import torch
import torch.distributed as dist
from helpers import leave_together
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lla


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(lla.LocalLinearAttention(32, 4, 2, rope=True, qk_norm=True, solver="direct"), nn.Linear(32, 8)).double()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    data = torch.randn(3, 4, 20, 32, dtype=torch.float64)  # three steps of a batch of four
    alone, model = make_model(), DistributedDataParallel(make_model())
    by_alone, by_model = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (alone, model))
    for batch in data:
        for chosen, optimizer, share in ((alone, by_alone, batch), (model, by_model, batch.chunk(world)[rank])):
            optimizer.zero_grad()
            chosen(share).square().mean().backward()
            optimizer.step()
    for mine, want in zip(model.module.parameters(), alone.parameters()):
        assert torch.allclose(mine, want, rtol=1e-9, atol=1e-12), (mine - want).abs().max()
    leave_together(f"{world} processes: equal")


if __name__ == "__main__":
    main()
