"""What training loops do with the layer: accumulate, checkpoint, compile, capture, scale losses, run in two processes."""
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from torch import nn
from torch.utils.checkpoint import checkpoint

import lla

HERE = Path(__file__).parent


def make_model(device, dtype=torch.float32, **options):
    torch.manual_seed(3)
    attention = lla.LocalLinearAttention(64, 1, rope=True, qk_norm=True, **options)  # one head of 64: any implementation
    return nn.Sequential(attention, nn.Linear(64, 16)).to(device, dtype)


def gradients(model, *batches):
    model.zero_grad()
    for batch in batches:
        (model(batch).square().sum() / 100).backward()
    return [p.grad.clone() for p in model.parameters()]


def assert_alike(got, want, limit):
    for a, b in zip(got, want, strict=True):
        assert torch.isfinite(a).all()
        assert float((a - b).norm() / b.norm().clamp_min(1e-30)) <= limit


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(lla.__file__).parents[1]), str(HERE)]), "OMP_NUM_THREADS": "1"}


def test_gradient_accumulation(device):
    model = make_model(device, torch.float64, solver="direct")
    x = torch.randn(4, 30, 64, dtype=torch.float64, device=device)
    assert_alike(gradients(model, *x.chunk(4)), gradients(model, x), 1e-10)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_activation_checkpointing_keeps_every_bit(device, reentrant, dtype):
    model = make_model(device, dtype)
    x = torch.randn(2, 40, 64, device=device, dtype=dtype, requires_grad=True)

    def run(through):
        model.zero_grad()
        x.grad = None
        y = through(x)
        y.square().sum().backward()
        return [y.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in model.parameters())]

    for a, b in zip(run(model), run(lambda h: checkpoint(model, h, use_reentrant=reentrant))):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training(device, mode):
    x = torch.randn(2, 40, 64, device=device)
    steps = []
    for compiled in (False, True):
        model = make_model(device)
        step = torch.compile(model, mode=mode, fullgraph=True) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(4):  # reduce-overhead captures in the second and replays from the third on
            if mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            loss = step(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        steps.append(losses)
    assert steps[1] == pytest.approx(steps[0], rel=1e-3) and steps[0][-1] < steps[0][0]


def test_two_processes():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", HERE / "ddp_worker.py"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert result.returncode == 0 and "2 processes: equal" in result.stdout, result.stdout + result.stderr


def test_loss_scaling_sees_an_overflow_and_recovers(device):
    """An overflow on its way through the backward pass reaches the scaler: it skips that step, and only that."""
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**120)
    x = torch.randn(2, 20, 64, device=device)
    skipped = 0
    for _ in range(200):
        before, scale = model[1].weight.detach().clone(), scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale(1e6 * model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.isfinite(p).all() for p in model.parameters())
        if scaler.get_scale() >= scale:
            assert not torch.equal(before, model[1].weight)
            break
        assert torch.equal(before, model[1].weight)
        skipped += 1
    assert 0 < skipped < 60


def test_one_graph_of_forward_and_backward(device):
    if device != "cuda":
        pytest.skip("needs a GPU")
    for dtype in (torch.bfloat16, torch.float32):
        model = make_model(device, dtype)
        x = torch.randn(4, 300, 64, device=device, dtype=dtype)
        warm = torch.cuda.Stream()
        with torch.cuda.stream(warm):
            for _ in range(3):
                gradients(model, x)
        torch.cuda.current_stream().wait_stream(warm)
        model.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = model(x).square().sum() / 100
            loss.backward()
        captured = [p.grad for p in model.parameters()]
        for _ in range(2):
            x.copy_(torch.randn_like(x))
            graph.replay()
            got = [loss.clone(), *(g.clone() for g in captured)]
            eager = make_model(device, dtype)
            want_loss = eager(x).square().sum() / 100
            want_loss.backward()
            for a, b in zip(got, [want_loss, *(p.grad for p in eager.parameters())]):
                assert torch.equal(a, b)


def test_training_soak_in_pieces(device, tmp_path):
    """The soak's script on a corpus and a model of its own size: cut off, gone on with, finished."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"".join(path.read_bytes() for path in sorted((REPOSITORY / "python" / "lla").glob("*.py"))))
    precisions = ["bf16", "fp16", "tf32"] if device == "cuda" else ["tf32"]

    def run(*more):
        command = [sys.executable, REPOSITORY / "scripts" / "train_soak.py", "--out", tmp_path, "--corpus", text, "--device", device,
                   "--precisions", *precisions, "--steps", "6", "--every", "2", "--validate-every", "3", "--layers", "2", "--width",
                   "64", "--heads", "1", "--length", "32", "--batch", "4", *more]
        return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600)

    first = run("--seconds", "0.01")
    assert first.returncode == 3 and "run it again" in first.stdout, first.stdout + first.stderr
    second = run()
    assert second.returncode == 0 and "passed" in second.stdout, second.stdout + second.stderr
    log = json.loads((tmp_path / f"lla-{precisions[0]}.json").read_text())
    assert log["step"] == 6 and [step for step, _ in log["validation"]] == [3, 6] and log["failed"] is None
    assert log["rows"]["backward"]["ok"] == 6 * 2 * 4 * 32  # steps, layers, batch, rows
    assert len(log["ridge"]) == 2 and all(1e-3 <= low <= middle <= high <= 1 for low, middle, high in log["ridge"])


def test_training_soak_says_what_is_wrong(tmp_path, monkeypatch):
    """The script's verdict on finished runs, and where its text comes from."""
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    soak = importlib.import_module("train_soak")

    def run(name, loss, validation, rows=None):
        kind, precision = name.split("-")
        log = {"step": 2000, "failed": None, "training": [[1790, 3.0], [1850, loss + 1], [2000, loss]], "validation": [[2000, validation]],
               "rows": rows or {"forward": {"ok": 10}}}
        return types.SimpleNamespace(name=name, kind=kind, precision=precision, log=log, steps=2000, done=True)

    assert soak.final_loss(run("lla-bf16", 0.5, 1.0).log) == pytest.approx((60 * 1.5 + 150 * 0.5) / 210)
    assert soak.verdicts([run("lla-bf16", 0.5, 0.8), run("softmax-bf16", 0.6, 0.7)]) == []
    assert "above softmax's 0.6857" in soak.verdicts([run("lla-bf16", 0.5, 0.7), run("softmax-bf16", 0.4, 0.8)])[0]
    rows = {"forward": {"ok": 5_000}, "backward": {"ok": 4_998, "breakdown": 2, "nan": 0}}
    assert "2.0e-04 of the rows" in soak.verdicts([run("lla-bf16", 0.5, 0.7, rows)])[0]
    rows["forward"]["ok"] = 15_000  # 2 of 20,000: as many as are allowed
    assert soak.verdicts([run("lla-bf16", 0.5, 0.7, rows)]) == []

    reader = tmp_path / "lla_train"  # stands in for the reader: what it writes is what is read
    reader.write_text("#!/bin/sh\n[ $1 = corpus ] && mkdir -p $3 && printf abcdef > $3/training.bin && printf xyz > $3/validation.bin && echo '{}'\n")
    reader.chmod(0o755)
    monkeypatch.setenv("LLA_TRAIN", str(reader))
    training, validation = soak.load_corpus(tmp_path, None)
    assert bytes(training) == b"abcdef" and bytes(validation) == b"xyz"
    monkeypatch.setenv("LLA_TRAIN", str(tmp_path / "nothing"))
    with pytest.raises(SystemExit, match="name it in LLA_TRAIN"):
        soak.load_corpus(tmp_path / "new", None)
