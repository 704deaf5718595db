#!/usr/bin/env python3
"""Switches a Hugging Face model from softmax to Local Linear Attention and fine-tunes it there.

    python examples/python/switch_hf_model.py                                  # a small Llama with random weights
    python examples/python/switch_hf_model.py --model Qwen/Qwen3-0.6B          # a pretrained one (downloads it)

At an infinite ridge the switched model is the old one, to rounding. From there the ridge is made finite and learned."""
import argparse
import math

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import lla

TEXT = "The average of what is seen is a constant; the line through it can follow a trend. " * 4


def load(name):
    """A model with softmax attention and token ids to train on."""
    if name:
        ids = AutoTokenizer.from_pretrained(name)(TEXT, return_tensors="pt").input_ids
        return AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager", dtype=torch.float32), ids
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    ids = torch.tensor([list(TEXT.encode())])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager"), ids


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a name on the Hub or a folder; a small random Llama without it")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(1)

    model, ids = load(args.model)
    model, ids = model.to(args.device), ids.to(args.device)
    with torch.no_grad():
        before = model(ids).logits

    lla.hf.register()
    model.set_attn_implementation("lla")
    lla.hf.set_ridge(model, math.inf)
    with torch.no_grad():
        change = (model(ids).logits - before).norm() / before.norm()
    print(f"switched over at an infinite ridge: logits changed by {change:.1e}")
    if not change < 1e-4:
        raise SystemExit("the switched model is not the old one")

    lla.hf.set_ridge(model, None)
    ridges = lla.hf.add_learned_ridge(model, initial=0.9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")
    means = ", ".join(f"{torch.sigmoid(r).mean().item():.3f}" for r in ridges[:8])
    print(f"learned ridge, mean over heads, by layer: {means}")
    made = model.generate(ids[:, :16], attention_mask=torch.ones_like(ids[:, :16]), max_new_tokens=16, do_sample=False)
    print(f"generated {made.shape[1] - 16} tokens after the switch")


if __name__ == "__main__":
    main()
