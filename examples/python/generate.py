#!/usr/bin/env python3
"""Trains a small byte model with Local Linear Attention, and lets it write with every kind of cache.

    python examples/python/generate.py                                 # about a minute on a laptop's CPU
    python examples/python/generate.py --device cuda --dtype bfloat16 --text book.txt --steps 2000

First the package's own layer with its `KVCache`, contiguous, in pages and, on a GPU, in a CUDA graph, then, where
transformers is installed, a Llama with `DynamicCache`, `StaticCache` and continuous batching. Each prints what it wrote,
how long a step took, and how far its logits are from those of a model that reads the whole text again for every byte. Exit
code 1 where that is further than rounding explains."""
import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import lla

ROOT = Path(__file__).parents[2]
PROMPTS = ("Local Linear Attention ", "The workspace of a call", "# ")


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = lla.LocalLinearAttention(width, heads, heads // 2, rope=True, qk_norm=True)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, **given):
        x = x + self.attention(self.norm1(x), **given)
        return x + self.mlp(self.norm2(x))


class ByteModel(nn.Module):
    """Logits of the next byte. caches: one per block, which the new bytes continue."""

    def __init__(self, width, heads, layers):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256)

    def forward(self, ids, caches=None, **packed):
        x = self.embedding(ids)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks)):
            x = block(x, cache=cache, **packed)
        return self.head(self.norm(x))


def train(logits_of, model, text, args):
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    start, last = time.monotonic(), []
    for step in range(args.steps):
        at = torch.randint(len(text) - args.length - 1, (args.batch,)).tolist()
        ids = torch.stack([text[s:s + args.length + 1] for s in at]).to(args.device)
        with torch.autocast(args.device, args.dtype, enabled=args.dtype != torch.float32):
            loss = F.cross_entropy(logits_of(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = (last + [loss.detach()])[-20:]
    print(f"{args.steps} steps in {time.monotonic() - start:.0f} s, loss {torch.stack(last).mean():.2f}")
    return model.to(args.dtype).eval()


def as_text(ids):
    return bytes(ids).decode(errors="replace")


@torch.no_grad()
def write_again(logits_of, prompt, count):
    """Greedily, reading everything for each byte: what caches must agree with."""
    ids, logits = prompt, []
    for _ in range(count):
        logits.append(logits_of(ids[None])[0, -1].float())
        ids = torch.cat([ids, logits[-1].argmax()[None]])
    return ids, torch.stack(logits)


class Eager:
    """One byte for each sequence, as packed queries."""

    def __init__(self, model, caches, sequences):
        self.model, self.caches = model, caches
        self.cu = torch.arange(sequences + 1, device=caches[0].k.device, dtype=torch.int32)

    def __call__(self, ids):
        return self.model(ids, self.caches, cu_seqlens=self.cu, max_seqlen=1)


class Graph:
    """The same from a captured CUDA graph: the lengths are on the device, and replays count them there."""

    def __init__(self, model, caches, sequences):
        self.ids = torch.zeros(sequences, 1, dtype=torch.long, device="cuda")
        before = [cache.seqlens.clone() for cache in caches]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(self.ids, caches)  # what the first call of a kernel sets up
        torch.cuda.current_stream().wait_stream(stream)
        for cache, lengths in zip(caches, before):  # that byte was no part of the text
            cache.seqlens.copy_(lengths)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = model(self.ids, caches)[:, 0]

    def __call__(self, ids):
        self.ids.copy_(ids[:, None])
        self.graph.replay()
        return self.logits.clone()


@torch.no_grad()
def write(model, prompts, count, forced, page_size=None, step=Eager):
    """(logits, milliseconds a step): all prompts in one batch of packed queries, then a byte for each of them at a time.
    forced: the bytes to go on with, (prompts, count), so that logits can be compared whatever a tie of two bytes would
    choose."""
    lengths = [len(p) for p in prompts]
    capacity = max(lengths) + count + 1
    caches = [b.attention.make_cache(len(prompts), capacity, page_size=page_size) for b in model.blocks]
    ids = torch.cat(prompts)
    cu = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(ids.device, torch.int32)
    made = [model(ids, caches, cu_seqlens=cu, max_seqlen=max(lengths))[cu[1:].long() - 1]]
    next_logits = step(model, caches, len(prompts))
    start = synchronized_time(ids)
    made += [next_logits(forced[:, at]) for at in range(count - 1)]
    milliseconds = (synchronized_time(ids) - start) / max(count - 1, 1) * 1e3
    return torch.stack(made, 1).float(), milliseconds


def synchronized_time(tensor):
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


# Of logits relative to their spread; the bits of a model's weights and activations explain so much.
MOST_APART = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
too_far = []


def compare(name, logits, expected, dtype, milliseconds=None):
    """How far the logits are apart, relative to their spread; and how many bytes would be the same."""
    error = ((logits - expected).norm() / (expected - expected.mean(-1, keepdim=True)).norm()).item()
    same = (logits.argmax(-1) == expected.argmax(-1)).float().mean().item()
    print(f"{name}: logits differ by {error:.1e}, {100 * same:.1f} % of the bytes are the same"
          + ("" if milliseconds is None else f", {milliseconds:.2f} ms a step"), flush=True)
    if not error <= MOST_APART[dtype]:
        too_far.append(name)


def own_layer(text, args):
    model = ByteModel(args.width, args.heads, args.layers).to(args.device)
    train(model, model, text, args)
    prompts = [torch.tensor(list(p.encode()), device=args.device) for p in PROMPTS]
    again = [write_again(model, p, args.write) for p in prompts]
    for ids, _ in again:
        print(repr(as_text(ids.tolist())))
    expected = torch.stack([logits for _, logits in again])
    forced = torch.stack([ids[-args.write:] for ids, _ in again])
    forms = [("contiguous", None, Eager), ("pages of 16", 16, Eager), ("pages of 1", 1, Eager)]
    if args.device == "cuda":
        forms += [("contiguous, CUDA graph", None, Graph), ("pages of 16, CUDA graph", 16, Graph)]
    for name, page_size, step in forms:
        logits, milliseconds = write(model, prompts, args.write, forced, page_size, step)
        compare(f"KVCache, {name}", logits, expected, args.dtype, milliseconds)


def llama(text, args):
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

    lla.hf.register(ridge=0.3)
    config = LlamaConfig(vocab_size=256, hidden_size=args.width, intermediate_size=2 * args.width,
                         num_hidden_layers=args.layers, num_attention_heads=args.heads,
                         num_key_value_heads=args.heads // 2, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="lla").to(args.device)
    train(lambda ids: model(ids).logits, model, text, args)
    prompts = [list(p.encode()) for p in PROMPTS]
    again = [write_again(lambda ids: model(ids, use_cache=False).logits, torch.tensor(p, device=args.device), args.write)
             for p in prompts]
    expected = torch.stack([logits for _, logits in again])
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=args.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=args.device)
    for kind in ("dynamic", "static"):
        start = synchronized_time(padded)
        made = model.generate(padded, attention_mask=mask, max_new_tokens=args.write, do_sample=False, output_logits=True,
                              return_dict_in_generate=True, cache_implementation=kind)
        milliseconds = (synchronized_time(padded) - start) / args.write * 1e3
        first = torch.stack(made.logits, 1).float()
        wrote = [row[longest:] for row in made.sequences.tolist()]
        compare(f"transformers, {kind} cache, first byte", first[:, :1], expected[:, :1], args.dtype)
        print(f"transformers, {kind} cache: the same {same_bytes(wrote, again)} of {args.write} bytes, {milliseconds:.2f} ms a "
              f"step; {as_text(wrote[0])!r}")
        # Where the two first part, the choice must have been a close one: the cached logits of what was written so far
        # are those of the whole text.
        for row, (ids, logits) in enumerate(again):
            at = same_bytes([wrote[row]], [again[row]])[0]
            if at < args.write:
                compare(f"  prompt {row}, where it goes on differently", first[row, at], logits[at], args.dtype)
    options = GenerationConfig(max_new_tokens=args.write, do_sample=False, pad_token_id=0, eos_token_id=-1)
    try:
        with lla.hf.continuous_batching(model):
            made = model.generate_batch(prompts, generation_config=options, progress_bar=False)
    except NotImplementedError as reason:  # an older transformers
        print(reason)
        return
    by_prompt = {tuple(result.prompt_ids): result.generated_tokens for result in made.values()}
    wrote = [by_prompt[tuple(prompt)] for prompt in prompts]
    print(f"transformers, continuous batching: the same {same_bytes(wrote, again)} of {args.write} bytes; "
          f"{as_text(wrote[0])!r}")


def same_bytes(wrote, again):
    """Of each prompt, how many bytes are written before the first that differs."""
    return [next((i for i, (a, b) in enumerate(zip(row, ids[-len(row):].tolist())) if a != b), len(row))
            for row, (ids, _) in zip(wrote, again)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, nargs="*", default=[ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    for name, value in dict(steps=300, length=128, batch=8, width=128, heads=4, layers=2, write=200, seed=1).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    args.dtype = getattr(torch, args.dtype)
    text = torch.tensor(list("\n".join(path.read_text(errors="replace") for path in args.text).encode()))
    torch.manual_seed(args.seed)
    own_layer(text, args)
    try:
        import transformers  # noqa: F401
    except ImportError:
        print("transformers is not installed: its caches are left out")
    else:
        llama(text, args)
    if too_far:
        sys.exit("further from the whole text's logits than rounding explains: " + "; ".join(too_far))


if __name__ == "__main__":
    main()
