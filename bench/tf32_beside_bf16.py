#!/usr/bin/env python3
"""float32 tensors on the tensor cores (TF32 allowed) beside bf16 and beside float32 in full.

    python bench/tf32_beside_bf16.py        # about ten seconds on an H200

First one call, forward and backward, causal, randn, ridge 0.1, the tolerance of 16 bits; then a training step of the
paper's in-context model (two layers of two heads of 64, a ridge per dimension, no MLP; 128 pairs and 16 queries, batch
256; forward, loss, gradients and AdamW). A time is the median of the repeats, the precisions taking turns."""
import torch
from torch import nn

import lla
from timing import median_microseconds

PRECISIONS = ("bf16", "tf32", "full")
SHAPES = ((64, 4, 8, 4096), (128, 4, 8, 4096), (64, 8, 8, 1024), (128, 8, 8, 1024))  # D, batch, heads, length
PAIRS, QUERIES, BATCH, WIDTH = 128, 16, 256, 128


def medians(works, rounds=3, repeats=5):
    """Milliseconds of each of the works: the median over rounds in which they take turns."""
    for work in works:
        work()
    times = [[median_microseconds(work, repeats) * 1e-3 for work in works] for _ in range(rounds)]
    return [sorted(column)[rounds // 2] for column in zip(*times)]


def attention_calls(dim, batch, heads, length, precisions):
    def calls(precision):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        q, k, v, g = (torch.randn(batch, length, heads, dim, device="cuda", dtype=dtype) for _ in range(4))
        ridge = torch.full((batch, length, heads), 0.1, device="cuda", requires_grad=True)
        inputs = [t.requires_grad_() for t in (q, k, v)]
        option = None if precision == "bf16" else precision

        def forward():
            return lla.lla_attention(*inputs, ridge, precision=option, tol=1e-3)

        o = forward()
        return forward, lambda: torch.autograd.grad(o, [*inputs, ridge], g, retain_graph=True)

    pairs = [calls(precision) for precision in precisions]
    return [medians([pair[i] for pair in pairs]) for i in range(2)]


class InContextModel(nn.Module):
    def __init__(self, precision):
        super().__init__()
        option = None if precision == "bf16" else precision
        self.embed, self.read = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 32)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.mixers = nn.ModuleList(
            lla.LocalLinearAttention(WIDTH, 2, ridge="shared", ridge_bias=False, precision=option) for _ in range(2))

    def forward(self, x):
        h = self.embed(x)
        for norm, mixer in zip(self.norms, self.mixers):
            h = h + mixer(norm(h))
        return self.read(h[:, -QUERIES:])


def training_step(precision):
    torch.manual_seed(1)
    model = InContextModel(precision).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(BATCH, PAIRS + QUERIES, 64, device="cuda")
    target = torch.randn(BATCH, QUERIES, 32, device="cuda")

    def step():
        torch.backends.cuda.matmul.fp32_precision = "ieee" if precision == "full" else "tf32"
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = (model(x).float() - target).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def main():
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, lla {lla.version()}\n")
    print("| D, B·H, n | forward ms: bf16 | TF32 | / bf16 | backward ms: bf16 | TF32 | / bf16 |")
    print("|---|---|---|---|---|---|---|")
    for dim, batch, heads, length in SHAPES:
        torch.manual_seed(1)
        forward, backward = attention_calls(dim, batch, heads, length, PRECISIONS[:2])
        cells = [f"{a:.3f} | {b:.3f} | {b / a:.3f}" for a, b in (forward, backward)]
        print(f"| {dim}, {batch * heads}, {length} | {' | '.join(cells)} |", flush=True)
    steps = medians([training_step(precision) for precision in PRECISIONS])
    print("\nin-context training step, ms: " + ", ".join(f"{name} {ms:.2f}" for name, ms in zip(PRECISIONS, steps)))


if __name__ == "__main__":
    main()
