"""scripts/copied_bytes.py: which bytes can only be copied from the window, and whether that is where a model loses."""
import json
import random
import subprocess
import sys

from conftest import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "copied_bytes.py"


def drawn(seed, size):
    return random.Random(seed).randbytes(size)


def written(folder, texts, bits):
    """A corpus of these files and results in which a model has so many bits a byte in them and softmax none."""
    (folder / "training.bin").write_bytes(drawn(0, 5000))
    (folder / "validation.bin").write_bytes(drawn(0, 5000))
    (folder / "test.bin").write_bytes(b"".join(texts))
    runs = {("linear", 0.5): bits, ("linear", 0.4): [9] * len(texts), ("softmax", 0.1): [0] * len(texts)}  # the better on validation has the bits
    records = [{"model": m, "budget": "steps", "seed": 1, "validation_best": 1 - v, "test_files": [[len(t), b * len(t)] for t, b in zip(texts, values)]} for (m, v), values in runs.items()]
    (folder / "results.json").write_text(json.dumps({"records": records}))


def said(folder, model="linear", *more):
    return subprocess.run([sys.executable, SCRIPT, folder, folder, "--model", model, *more], capture_output=True, text=True)


def test_shares_and_what_they_explain(tmp_path):
    # A part of each file stands twice in it: 500 bytes apart it can be copied, beyond the window it cannot, and what the
    # training text has too need not be.
    repeats = [0, 100, 200, 300, 400]
    texts = [drawn(i + 1, 500) + drawn(i + 1, n) + drawn(i + 11, 1500 - n) for i, n in enumerate(repeats)]
    far = drawn(20, 2000)
    texts += [far + far[:400], drawn(0, 500) * 2 + drawn(21, 1000)]
    shares = [max(0, n - 8) / 2000 for n in repeats] + [0, 0]
    written(tmp_path, texts, shares)
    done = said(tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"test: {sum(s * len(t) for s, t in zip(shares, texts)) / sum(map(len, texts)):.3f} of the bytes; validation: 0.000"
    assert lines[1] == "7 files; correlation 1.00"
    assert lines[-1].split() == ["0.196", "to", "0.196", "0.196", "0.000", "+0.196"]


def test_one_seed(tmp_path):
    """Of several seeds the one that was asked for, on both sides."""
    texts = [drawn(i, 2000) for i in range(1, 6)]
    written(tmp_path, texts, [1] * 5)
    records = json.loads((tmp_path / "results.json").read_text())["records"]
    worse = [{**r, "seed": 2, "validation_best": 2, "test_files": [[2000, 2000 * bits]] * 5} for r, bits in zip(records[::2], (3, 0.5))]
    (tmp_path / "results.json").write_text(json.dumps({"records": records + worse}))
    for more, last in (((), ["1.000", "0.000", "+1.000"]), (("--seed", "2"), ["3.000", "0.500", "+2.500"])):
        done = said(tmp_path, "linear", *more)
        assert done.returncode == 0 and done.stdout.split()[-3:] == last, done.stderr
    assert "there is no run of linear with seed 3" in said(tmp_path, "linear", "--seed", "3").stderr


def test_what_does_not_belong_together_is_refused(tmp_path):
    written(tmp_path, [drawn(1, 2000)], [1])
    assert "there is no run of lla" in said(tmp_path, "lla").stderr
    (tmp_path / "test.bin").write_bytes(b"more")
    assert "the results are of 2000 bytes, test.bin has 4" in said(tmp_path).stderr
