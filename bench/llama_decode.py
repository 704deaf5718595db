#!/usr/bin/env python3
"""A token of a small Llama with 'lla' beside sdpa: transformers' StaticCache, the step a replayed CUDA graph.

    python bench/llama_decode.py [--device cpu]        # on the CPU: a small one, checks only

12 layers, 1024 wide, 8 query heads over 4 key heads of 128, bf16, batch 1, cache of 8192, 8,000 and 1,000 filled. Before
a step is timed its logits are compared: of the graph with those of the eager call, of the cached step with those of the
whole text at once."""
import argparse

import torch

import lla


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


class Step:
    """One more token behind `filled` of them. Replays write the same position again."""

    def __init__(self, model, capacity, filled, chunk=2000):
        from transformers import StaticCache

        device = model.device
        self.model, self.filled = model, filled
        ids = torch.randint(3, model.config.vocab_size, (1, filled + 1), device=device)
        self.cache = StaticCache(config=model.config, max_cache_len=capacity)
        for at in range(0, filled, chunk):
            model(ids[:, at:min(at + chunk, filled)], past_key_values=self.cache, use_cache=True)
        self.whole = model(ids, use_cache=False, logits_to_keep=1).logits
        self.token = ids[:, filled:].clone()
        self.position = torch.full((1, 1), filled, device=device)
        self.counted = [layer.cumulative_length for layer in self.cache.layers
                        if isinstance(getattr(layer, "cumulative_length", None), torch.Tensor)]

    def rewind(self):
        """Newer versions of transformers count the positions in the cache, older ones are told."""
        for length in self.counted:
            length.fill_(self.filled)

    def __call__(self):
        told = {} if self.counted else {"cache_position": self.position[0]}
        return self.model(self.token, past_key_values=self.cache, use_cache=True, position_ids=self.position, **told).logits

    def captured(self):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self()
            self.rewind()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                logits = self()
        self.rewind()
        return graph, logits


def microseconds(step, graph, replays=8, batches=9):
    times = []
    for _ in range(batches):
        step.rewind()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / replays * 1e3)
    return sorted(times)[batches // 2]


def kernels(graph, count=6):
    """What the device spends a step on."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    for event in sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:count]:
        print(f"  {event.self_device_time_total:8.1f} us in {event.count:3} of {event.key[:90]}")


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", action="store_true", help="also what the device spends a step on")
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, LlamaConfig

    cuda = args.device == "cuda"
    layers, capacity, fills = (12, 8192, (8000, 1000)) if cuda else (2, 256, (200, 25))
    lla.hf.register(ridge=0.3)
    config = LlamaConfig(vocab_size=1024, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers,
                         num_attention_heads=8, num_key_value_heads=4, head_dim=128, max_position_embeddings=16384)
    times, wrong = {}, 0
    for kind in ("sdpa", "lla"):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=kind)
        model = model.to(args.device, torch.bfloat16 if cuda else torch.float32).eval()
        lla.hf.set_ridge(model, torch.full((), 0.3, device=args.device))
        for filled in fills:
            step = Step(model, capacity, filled)
            eager = step()
            step.rewind()
            cached = relative(eager, step.whole)
            line = f"{kind}, {filled} filled: cached step against the whole text {cached:.1e}"
            wrong += not cached < (3e-2 if cuda else 1e-4)
            if cuda:
                graph, logits = step.captured()
                graph.replay()
                replayed = relative(logits, eager)
                wrong += not replayed < 1e-2
                times[kind, filled] = microseconds(step, graph)
                line += f", graph against eager {replayed:.1e}, {times[kind, filled]:.0f} us a token"
            print(line, flush=True)
            if cuda and args.kernels and filled == fills[0]:
                kernels(graph)
    for filled in fills if cuda else ():
        sdpa, ours = times["sdpa", filled], times["lla", filled]
        print(f"{layers} layers, cache of {capacity}, {filled} filled: sdpa {sdpa:.0f} us a token, lla {ours:.0f}; a layer "
              f"{(ours - sdpa) / layers:+.1f} us, ratio {ours / sdpa:.2f}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
