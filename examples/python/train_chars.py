#!/usr/bin/env python3
"""Trains the same small character model with Local Linear Attention and with softmax attention, and plots the losses.

    python examples/python/train_chars.py                          # about a minute on a laptop's CPU
    python examples/python/train_chars.py --text book.txt --device cuda --steps 2000

Writes out/train_chars.png and prints a sample of each model. Without --text it reads this repository's own prose."""
import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import lla

ROOT = Path(__file__).parents[2]


class SoftmaxAttention(nn.Module):
    """The same layer around softmax attention: same projections, rotary embedding, cache-free."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.rope = lla.module.RotaryEmbedding(width // heads)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        positions = torch.arange(x.shape[1], device=x.device)
        q, k, v = (t.transpose(1, 2) for t in (self.rope(q, positions), self.rope(k, positions), v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width, heads, kind):
        super().__init__()
        local = kind == "lla"
        self.attention = lla.LocalLinearAttention(width, heads, rope=True) if local else SoftmaxAttention(width, heads)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CharModel(nn.Module):
    def __init__(self, characters, width, heads, layers, kind):
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.blocks = nn.Sequential(*(Block(width, heads, kind) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, characters)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embedding(ids))))


def progress(name, step, steps, loss, start):
    filled = 30 * step // steps
    left = (time.monotonic() - start) / max(step, 1) * (steps - step)
    bar = f"\r{name:8}[{'#' * filled}{'.' * (30 - filled)}] {step}/{steps}  loss {loss:.3f}  {left:4.0f} s left "
    print(bar, end="" if step < steps else "\n", file=sys.stderr, flush=True)


def train(kind, text, characters, args):
    """Losses of every step, and the model."""
    torch.manual_seed(args.seed)
    model = CharModel(characters, args.width, args.heads, args.layers, kind).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    batches = torch.Generator().manual_seed(args.seed)
    losses, start = [], time.monotonic()
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - args.length - 1, (args.batch,), generator=batches)
        ids = torch.stack([text[s:s + args.length + 1] for s in starts.tolist()]).to(args.device)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        progress(kind, step, args.steps, losses[-1], start)
    return losses, model


@torch.no_grad()
def sample(model, prompt, length, context, generator):
    ids = prompt[None]
    for _ in range(length):
        probabilities = torch.softmax(model(ids[:, -context:])[0, -1].float().cpu(), -1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator).to(ids)[None]], 1)
    return ids[0]


def plot(losses, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    for kind, values in losses.items():
        smooth = torch.tensor(values).unfold(0, max(1, len(values) // 25), 1).mean(-1)
        label = "Local Linear Attention" if kind == "lla" else kind
        axes.plot(range(len(values) - len(smooth), len(values)), smooth, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per character")
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, nargs="*", default=[ROOT / "README.md", ROOT / "LICENSE"])
    parser.add_argument("--out", type=Path, default=ROOT / "out/train_chars.png")
    parser.add_argument("--device", default="cpu")
    for name, value in dict(steps=300, length=64, batch=16, width=64, heads=4, layers=2, seed=1).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    text = "\n".join(path.read_text(errors="replace") for path in args.text)
    alphabet = sorted(set(text))
    ids = torch.tensor([alphabet.index(c) for c in text])
    print(f"{len(text)} characters, {len(alphabet)} different", file=sys.stderr)
    losses = {}
    for kind in ("softmax", "lla"):
        losses[kind], model = train(kind, ids, len(alphabet), args)
        made = sample(model, ids[:16].to(args.device), 120, args.length, torch.Generator().manual_seed(args.seed))
        print(f"{kind}: {''.join(alphabet[i] for i in made.tolist())!r}")
    last = max(1, args.steps // 10)
    for kind, values in losses.items():
        print(f"{kind}: loss {values[0]:.3f} -> {sum(values[-last:]) / last:.3f} (mean of the last {last} steps)")
    plot(losses, args.out)
    print(f"plot: {args.out}")


if __name__ == "__main__":
    main()
