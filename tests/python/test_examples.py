"""The examples run and do what they say."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

import lla


def run(script, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(Path(lla.__file__).parents[1])}
    command = [sys.executable, REPOSITORY / "examples/python" / script, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_character_model(device, tmp_path):
    pytest.importorskip("matplotlib")  # its curve
    output = run("train_chars.py", "--steps", 40, "--length", 32, "--batch", 8, "--width", 32, "--device", device,
                 "--out", tmp_path / "loss.png")
    losses = re.findall(r"(\w+): loss ([\d.]+) -> ([\d.]+)", output)
    assert [kind for kind, *_ in losses] == ["softmax", "lla"]
    assert all(float(last) < 0.85 * float(first) for _, first, last in losses), output
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_generation(device):
    output = run("generate.py", "--steps", 20, "--length", 32, "--batch", 4, "--width", 32, "--write", 24, "--device", device)
    errors = [float(e) for e in re.findall(r"KVCache, [\w, ]+: logits differ by ([\d.e+-]+)", output)]
    assert len(errors) == (5 if device == "cuda" else 3) and max(errors) < 1e-4, output
    same = [int(n) for numbers in re.findall(r"the same \[([\d, ]+)\] of 24 bytes", output) for n in numbers.split(",")]
    assert len(same) in (0, 6, 9) and all(n == 24 for n in same), output


def test_switching_a_hugging_face_model(device):
    pytest.importorskip("transformers")
    output = run("switch_hf_model.py", "--steps", 500 if device == "cuda" else 11, "--device", device)
    losses = [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", output)]
    assert losses[-1] < losses[0] and "generated 16 tokens" in output
