#!/usr/bin/env python3
"""A training soak: a byte-level language model with the package's own layer, in every precision people train in.

    python scripts/train_soak.py --out soak                       # the whole queue, on the GPU
    python scripts/train_soak.py --out soak --seconds 240         # at most four minutes of it; run again to go on
    python scripts/train_soak.py --out soak --models lla --precisions bf16 --steps 500

6 layers, width 512, 8 heads of 64, RoPE, QK-norm, L = 1024, batch 32, on the text of `lla reproduce language-model`, which
`lla_train corpus` reads; validation is the whole of its validation part. Models: lla, softmax, parallax. Precisions:
bf16 (autocast), fp16 (autocast and GradScaler), tf32 (fp32 with TF32 allowed, 500 steps). Each run writes
OUT/MODEL-PRECISION.json (losses, times, statuses) and a checkpoint, so that a queue can be cut anywhere.

Exit code: 0 when the queue is done and passed; 1 when a loss or gradient was not finite, more than 1e-4 of the rows ended
with a status other than OK, or LLA's training loss in bf16 over the last 200 of 2,000 steps is above softmax's; 3 when
the time was up first."""
import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import lla
from lla.module import RotaryEmbedding

STEPS = {"bf16": 2000, "fp16": 2000, "tf32": 500}
MOST_UNSOLVED = 1e-4  # share of rows with a status other than OK
UNFINISHED = 3


# ---- data ------------------------------------------------------------------------------------------------------------

def trainer():
    """The program that reads the corpus: named in LLA_TRAIN, beside this script, or in the build."""
    here = Path(__file__).resolve().parent
    places = [here / "lla_train", *sorted((here.parent / "build").glob("*/bin/lla_train"))]
    return next((str(p) for p in ([Path(os.environ["LLA_TRAIN"])] if "LLA_TRAIN" in os.environ else places) if p.exists()), None)


def load_corpus(folder, file):
    """(training, validation) bytes: the language-model experiment's, from its own reader, or a file."""
    if file is not None:
        text = np.frombuffer(file.read_bytes(), dtype=np.uint8)
        cut = len(text) * 49 // 50
        return text[:cut], text[cut:]
    parts = [folder / "corpus" / name for name in ("training.bin", "validation.bin")]
    if not all(part.exists() for part in parts):
        program = trainer()
        if program is None:
            sys.exit("lla_train reads the corpus and is not here: build it (docs/experiments.md) or name it in LLA_TRAIN; --corpus FILE takes another text")
        # Carried to another machine it finds this torch's libraries.
        site = Path(torch.__file__).resolve().parents[1]
        places = [site / "torch" / "lib", *site.glob("nvidia/cu*/lib"), os.environ.get("LD_LIBRARY_PATH", "")]
        manifest = subprocess.run([program, "corpus", "--out", folder / "corpus"], check=True, stdout=subprocess.PIPE, text=True,
                                  env={**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, places))}).stdout
        (folder / "corpus" / "manifest.json").write_text(manifest)
    return tuple(np.fromfile(part, dtype=np.uint8) for part in parts)


def batch_at(data, seed, step, args):
    """The batch of a step, made from its number alone: a run that goes on where it stopped sees what it would have seen."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    start = torch.randint(len(data) - args.length - 1, (args.batch, 1), generator=generator)
    rows = (start + torch.arange(args.length + 1)).to(data.device, non_blocking=True)
    ids = data[rows].long()
    return ids[:, :-1], ids[:, 1:]


def windows(data, args):
    """Batches of windows one after the other over the whole text; what does not fill a window is left out."""
    ids = data[:(len(data) - 1) // args.length * args.length + 1].long()
    inputs, targets = (part.unflatten(0, (-1, args.length)) for part in (ids[:-1], ids[1:]))
    return zip(inputs.split(args.batch), targets.split(args.batch))


# ---- models ----------------------------------------------------------------------------------------------------------

class OtherAttention(nn.Module):
    """The layer's projections, norms and rotary embedding around softmax attention or around a learned x (Parallax)."""

    def __init__(self, width, heads, kind):
        super().__init__()
        self.heads, self.kind = heads, kind
        dim = width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.q_norm, self.k_norm, self.rope = nn.RMSNorm(dim), nn.RMSNorm(dim), RotaryEmbedding(dim)
        if kind == "parallax":
            self.x_proj = nn.Linear(width, width, bias=False)
            nn.init.zeros_(self.x_proj.weight)  # softmax attention to begin with

    def forward(self, h):
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        positions = torch.arange(h.shape[1], device=h.device)
        q, k = (self.rope(t, positions).to(v.dtype) for t in (self.q_norm(q), self.k_norm(k)))
        if self.kind == "parallax":
            o = lla.parallax_attention(q, k, v, self.x_proj(h).unflatten(-1, (self.heads, -1)))
        else:
            o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
        return self.out(o.flatten(-2))


class Block(nn.Module):
    def __init__(self, width, heads, kind):
        super().__init__()
        self.attention = (lla.LocalLinearAttention(width, heads, rope=True, qk_norm=True) if kind == "lla"
                          else OtherAttention(width, heads, kind))
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def rest(self, h):
        return h + self.mlp(self.norm2(h))

    def forward(self, h):
        return self.rest(h + self.attention(self.norm1(h)))


class ByteModel(nn.Module):
    def __init__(self, args, kind):
        super().__init__()
        self.embedding = nn.Embedding(256, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads, kind) for _ in range(args.layers))
        self.norm, self.head = nn.RMSNorm(args.width), nn.Linear(args.width, 256)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if args.compile:
            for block in self.blocks:
                block.rest = torch.compile(block.rest)

    def forward(self, ids, targets):
        h = self.embedding(ids)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1).float(), targets.flatten())


# ---- training --------------------------------------------------------------------------------------------------------

class Run:
    """One model in one precision, from its checkpoint or from the beginning."""

    def __init__(self, kind, precision, args, data):
        self.kind, self.precision, self.args = kind, precision, args
        self.training, self.validation = data
        self.steps = args.steps or STEPS[precision]
        self.name = f"{kind}-{precision}"
        self.log_path, self.checkpoint = args.out / f"{self.name}.json", args.out / f"{self.name}.pt"
        self.log = {"model": kind, "precision": precision, "steps": self.steps, "step": 0, "seconds": 0.0, "training": [],
                    "validation": [], "rows": {}, "skipped": 0, "failed": None,
                    "machine": torch.cuda.get_device_name() if args.device == "cuda" else "cpu", "torch": torch.__version__}
        if self.log_path.exists():
            kept = json.loads(self.log_path.read_text())
            self.log.update(kept, steps=self.steps)

    @property
    def done(self):
        return self.log["failed"] is not None or self.log["step"] >= self.steps

    def prepare(self):
        args = self.args
        torch.manual_seed(args.seed)
        self.model = ByteModel(args, self.kind).to(args.device)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                           lr=args.lr, betas=(0.9, 0.95), fused=True)
        self.scaler = torch.amp.GradScaler(args.device, enabled=self.precision == "fp16")
        if self.log["step"] > 0:
            state = torch.load(self.checkpoint, map_location=args.device)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
        self.model.train()

    def autocast(self):
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision, torch.float32)
        return torch.autocast(self.args.device, dtype, enabled=self.precision != "tf32")

    def learning_rate(self, step):
        warm, low = 100, 0.1
        if step < warm:
            return self.args.lr * (step + 1) / warm
        share = (step - warm) / max(1, STEPS["bf16"] - warm)  # the same schedule whatever the number of steps
        return self.args.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(share, 1))))

    def step(self, step, seen):
        """One step; what it must be asked for afterwards is added up on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        with self.autocast():
            loss = self.model(*batch_at(self.training, self.args.seed, step, self.args))
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        seen["loss"] += loss.detach()
        seen["bad_loss"] += ~torch.isfinite(loss.detach())
        seen["bad_gradient"] += ~torch.isfinite(norm)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        with self.autocast():
            sums = [(self.model(ids, targets) * len(ids), len(ids)) for ids, targets in windows(self.validation, self.args)]
        self.model.train()
        return (sum(loss for loss, _ in sums) / sum(count for _, count in sums)).item()

    @torch.no_grad()
    def ridges(self):
        """What the layers have learned: 1 %, median and 99 % of lambda in each, over some validation windows."""
        found, hooks = [], []
        for block in self.model.blocks:
            hooks.append(block.attention.register_forward_pre_hook(
                lambda layer, inputs: found.append(layer.compute_ridge(inputs[0]).float().flatten())))
        with self.autocast():
            self.model(*next(iter(windows(self.validation, self.args))))
        for hook in hooks:
            hook.remove()
        marks = torch.tensor([0.01, 0.5, 0.99], device=self.args.device)
        return [[round(v, 4) for v in torch.quantile(ridge[:1 << 20], marks).tolist()] for ridge in found]

    def train(self, deadline):
        """Until the run is done or the time is up."""
        log, args = self.log, self.args
        self.prepare()
        seen = {name: torch.zeros((), device=args.device) for name in ("loss", "bad_loss", "bad_gradient")}
        start, first = time.monotonic(), log["step"]
        with lla.debug.count_rows() as rows:
            while not self.done and time.monotonic() < deadline:
                self.step(log["step"], seen)
                log["step"] += 1
                if log["step"] % args.every == 0 or log["step"] == self.steps:
                    self.look(seen, rows)
                if log["step"] % args.validate_every == 0 or log["step"] == self.steps:
                    log["validation"].append([log["step"], self.validate()])
                    print(f"{self.name}: step {log['step']}, validation {log['validation'][-1][1]:.4f} nats a byte", flush=True)
            self.look(seen, rows)
        if self.done and self.kind == "lla":
            log["ridge"] = self.ridges()
        log["seconds"] += time.monotonic() - start
        if log["step"] > first:
            log["milliseconds_a_step"] = 1e3 * (time.monotonic() - start) / (log["step"] - first)
        self.save()

    def look(self, seen, rows):
        """Reads what was added up since the last look; the only wait for the device."""
        log = self.log
        count = log["step"] - (log["training"][-1][0] if log["training"] else 0)
        if count == 0:
            return
        loss, bad_loss, bad_gradient = (seen[name].item() for name in ("loss", "bad_loss", "bad_gradient"))
        for value in seen.values():
            value.zero_()
        log["training"].append([log["step"], loss / count])
        for direction, statuses in rows.read().items():
            kept = log["rows"].setdefault(direction, {})
            for status, number in statuses.items():
                kept[status] = kept.get(status, 0) + number
        rows.clear()
        log["skipped"] += int(bad_gradient)
        # GradScaler looks for its scale from above, and tries twice as much every 2,000 steps.
        allowed = 20 + log["step"] // 1000 if self.precision == "fp16" else 0
        if bad_loss > 0:
            log["failed"] = f"{int(bad_loss)} losses that are not finite up to step {log['step']}"
        elif log["skipped"] > allowed:
            log["failed"] = f"{log['skipped']} gradients that are not finite up to step {log['step']}"
        print(f"{self.name}: step {log['step']} of {self.steps}, loss {loss / count:.4f}"
              + (f", {log['failed']}" if log["failed"] else ""), flush=True)

    def save(self):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                    "scaler": self.scaler.state_dict()}, self.checkpoint)
        self.log_path.write_text(json.dumps(self.log, indent=1) + "\n")


def unsolved_share(log):
    total = bad = 0
    for statuses in log["rows"].values():
        total += sum(statuses.values())
        bad += sum(number for status, number in statuses.items() if status != "ok")
    return bad / total if total else 0.0


def final_loss(log):
    """Mean training loss of the last 200 steps. Both models see the same batches in the same order, and less than one pass
    over the text, so this difference has far less noise than that on the small validation set, which is shown beside it."""
    first, total, count = log["step"] - 200, 0.0, 0
    for (before, _), (step, loss) in zip([[0, 0.0], *log["training"]], log["training"]):
        if step > first:
            total, count = total + loss * (step - before), count + step - before
    return total / count


def verdicts(runs):
    """What is wrong, as sentences."""
    wrong = []
    for run in runs:
        if run.log["failed"]:
            wrong.append(f"{run.name}: {run.log['failed']}")
        if unsolved_share(run.log) > MOST_UNSOLVED:
            wrong.append(f"{run.name}: {unsolved_share(run.log):.1e} of the rows were not solved: {run.log['rows']}")
    final = {run.name: final_loss(run.log) for run in runs if run.done and run.log["training"]}
    long_enough = all(run.steps >= STEPS["bf16"] for run in runs if run.precision == "bf16")
    if long_enough and final.get("lla-bf16", 0) > final.get("softmax-bf16", math.inf):
        wrong.append(f"lla-bf16 ends with a training loss of {final['lla-bf16']:.4f}, above softmax's {final['softmax-bf16']:.4f}")
    return wrong


def table(runs):
    print(f"\n{'run':<14} {'steps':>6} {'ms/step':>8} {'unsolved':>9} {'skipped':>8} {'training':>9}  validation, nats a byte")
    for run in runs:
        log = run.log
        marks = "  ".join(f"{step}: {loss:.3f}" for step, loss in log["validation"])
        training = f"{final_loss(log):.4f}" if log["training"] else ""
        print(f"{run.name:<14} {log['step']:>6} {log.get('milliseconds_a_step', 0):>8.1f} {unsolved_share(log):>9.1e} "
              f"{log['skipped']:>8} {training:>9}  {marks}")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("soak"))
    parser.add_argument("--corpus", type=Path, help="a file to read instead; its last 2 % are for validation")
    parser.add_argument("--models", nargs="+", default=["lla", "softmax", "parallax"], choices=["lla", "softmax", "parallax"])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp16", "tf32"], choices=["bf16", "fp16", "tf32"])
    parser.add_argument("--steps", type=int, help="of every run (default: 2,000; 500 in tf32)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this long; run again to go on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile for what is not attention")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=50, help="steps between two looks at the losses")
    parser.add_argument("--validate-every", type=int, default=500)
    return parser.parse_args()


def main():
    args = parse()
    deadline = time.monotonic() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    training, validation = load_corpus(args.out, args.corpus)
    print(f"{len(training) / 1e6:.1f} MB to train on, {len(validation) / 1e6:.2f} MB to validate; {lla.machine()}", flush=True)
    data = tuple(torch.tensor(part, device=args.device) for part in (training, validation))
    runs = [Run(kind, precision, args, data) for precision in args.precisions for kind in args.models]
    for run in runs:
        if run.done or time.monotonic() >= deadline:
            continue
        if args.device == "cuda":
            torch.backends.cuda.matmul.fp32_precision = "tf32" if run.precision == "tf32" else "ieee"
        run.train(deadline)
        del run.model, run.optimizer
    table(runs)
    wrong = verdicts(runs)
    for sentence in wrong:
        print(f"FAILED {sentence}")
    if wrong:
        return 1
    if not all(run.done for run in runs):
        print("not done: run it again to go on")
        return UNFINISHED
    print("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
