#!/usr/bin/env python3
"""Where a language model's results differ from another's: by how much of a file can only be copied from the window.

    lla_train corpus --out DIR
    scripts/copied_bytes.py DIR experiments/trained/results/language-model --model gated_deltanet
    scripts/copied_bytes.py DIR experiments/trained/results/language-model --model lla --seed 2

A byte can only be copied where it and the eight before it stand in the 768 bytes before (what a window of 1,024 moved by
half of it has seen on average), but nowhere in the training text. Prints the files of 2,000 bytes and more in fifths by
the share of such bytes, each with both models' bits per byte, and the correlation of share and difference over files."""
import argparse
import json
import sys
from pathlib import Path

import numpy as np

LENGTH, BEFORE, SHORTEST = 9, 768, 2000


def hashes(text):
    """Of every LENGTH bytes in a row."""
    x = np.frombuffer(text, np.uint8).astype(np.uint64)
    h = np.zeros(max(0, len(x) - LENGTH + 1), np.uint64)
    for j in range(LENGTH):
        h = h * np.uint64(0x9E3779B97F4A7C15) + x[j:j + len(h)]
    return h


def known_of(training, part=1 << 24):
    """The hashes of a long text, each once."""
    return np.unique(np.concatenate([np.unique(hashes(training[i:i + part + LENGTH - 1])) for i in range(0, len(training), part)]))


def only_copied(text, known):
    """The share of its bytes that can only be copied."""
    h = hashes(text)
    there = known[np.minimum(np.searchsorted(known, h), len(known) - 1)] == h
    last, copied = {}, 0
    for i, (value, elsewhere) in enumerate(zip(h.tolist(), there.tolist())):
        copied += not elsewhere and i - last.get(value, -BEFORE) < BEFORE
        last[value] = i
    return copied / max(1, len(text))


def best(records, model, seed=None):
    """Of its runs with equal steps, or those of one seed, the one that is best on validation."""
    runs = [r for r in records if r["model"] == model and r["budget"] == "steps" and "test_files" in r and seed in (None, r["seed"])]
    if not runs:
        sys.exit(f"copied_bytes.py: there is no run of {model}" + ("" if seed is None else f" with seed {seed}"))
    return min(runs, key=lambda r: r["validation_best"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--against", default="softmax")
    parser.add_argument("--seed", type=int, help="compare the runs of this seed")
    args = parser.parse_args()
    records = json.loads((args.results / "results.json").read_text())["records"]
    ours, theirs = (np.array(best(records, m, args.seed)["test_files"], dtype=float) for m in (args.model, args.against))
    text, ends = (args.corpus / "test.bin").read_bytes(), np.cumsum(ours[:, 0]).astype(int)
    if ends[-1] != len(text):
        sys.exit(f"copied_bytes.py: the results are of {ends[-1]} bytes, test.bin has {len(text)}")
    known = known_of((args.corpus / "training.bin").read_bytes())
    sizes = ours[:, 0]
    shares = np.array([only_copied(text[end - int(size):end], known) for end, size in zip(ends, sizes)])
    print(f"test: {np.average(shares, weights=sizes):.3f} of the bytes; validation: {only_copied((args.corpus / 'validation.bin').read_bytes(), known):.3f}")
    large = np.flatnonzero(sizes >= SHORTEST)
    difference = (ours[:, 1] - theirs[:, 1]) / sizes
    print(f"{len(large)} files; correlation {np.corrcoef(shares[large], difference[large])[0, 1]:.2f}")
    print(f"{'share':>15} {args.model:>15} {args.against:>10} {'difference':>10}")
    for fifth in np.array_split(large[np.argsort(shares[large])], 5):
        bits = [files[fifth, 1].sum() / sizes[fifth].sum() for files in (ours, theirs)]
        print(f"{shares[fifth].min():>6.3f} to {shares[fifth].max():.3f} {bits[0]:>15.3f} {bits[1]:>10.3f} {bits[0] - bits[1]:>+10.3f}")


if __name__ == "__main__":
    main()
