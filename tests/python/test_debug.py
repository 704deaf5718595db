"""check="raise" and "warn", the files they leave, and count_rows."""
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers import make_inputs

import lla

UNSOLVED = dict(solver="cg", max_iterations=1, tol=1e-9)  # no row but those with one key ends well
COMMAND = Path(os.environ.get("LLA_TORCH_LIBRARY", "")).parents[2:3] or [Path("/nowhere")]
COMMAND = COMMAND[0] / "bin" / "lla"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LLA_CHECK_DIR", str(tmp_path))
    monkeypatch.setattr(lla.debug, "_warned", False)
    return tmp_path


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_call_that_went_well_is_left_alone(device, folder, dtype):
    inputs = leaves(*make_inputs(2, 20, heads=4, heads_kv=2, dtype=dtype, device=device))
    plain, checked = lla.lla_attention(*inputs), lla.lla_attention(*inputs, check="raise")
    assert torch.equal(plain, checked)
    for a, b in zip(torch.autograd.grad(plain.sum(), inputs), torch.autograd.grad(checked.sum(), inputs)):
        assert torch.equal(a, b)
    assert not list(folder.iterdir())


def test_names_the_row_of_a_solve_that_did_not_end_well(device, folder):
    inputs = make_inputs(2, 20, device=device)
    with pytest.raises(lla.debug.CheckError, match=r"forward, batch entry 0, head 0, row 1: the solve did not end well") as caught:
        lla.lla_attention(*inputs, check="raise", **UNSOLVED)
    error = caught.value
    assert "status max_iterations, 1 iterations" in str(error) and error.path in str(error)
    assert (error.where["head"], error.where["position"], error.where["batch"]) == (0, 1, 0)
    assert Path(error.path).read_bytes().startswith(b"LLACASE1")


def test_says_what_it_found_where_no_file_can_be_written(device, folder, monkeypatch):
    monkeypatch.setenv("LLA_CHECK_DIR", str(folder / "missing"))
    with pytest.raises(lla.debug.CheckError, match=r"row 1: the solve did not end well.*could not be saved.*missing") as caught:
        lla.lla_attention(*make_inputs(2, 20, device=device), check="raise", **UNSOLVED)
    assert caught.value.path is None and caught.value.where["position"] == 1


def test_names_the_head_whose_output_is_not_finite(device):
    q, k, v, ridge = make_inputs(2, 20, heads=4, heads_kv=2, dtype=torch.float32, device=device)
    k[1, 7, 1, 3] = float("nan")
    with pytest.raises(lla.debug.CheckError, match=r"batch entry 1, head 2, row 7: o is not finite.*Not finite before the call: k"):
        lla.lla_attention(q, k, v, ridge, check="raise")


def test_backward_is_checked_too(device):
    q, k, v, ridge = leaves(*make_inputs(1, 20, heads=2, dtype=torch.float32, device=device))
    x = torch.zeros_like(q).requires_grad_()
    o = lla.parallax_attention(q, k, v * 1e30, x, check="raise")
    with pytest.raises(lla.debug.CheckError, match="backward.* is not finite"):
        o.backward(torch.full_like(o, 1e30))
    # What comes in as Inf is GradScaler's business.
    lla.lla_attention(q, k, v, ridge, check="raise").backward(torch.full_like(o, float("inf")))


def test_packed_rows_behind_the_last_sequence_do_not_count(device):
    q, k, v, ridge = (t[0] for t in make_inputs(1, 20, device=device))
    cu = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    q, k, v, ridge = leaves(q, k, v, ridge)
    with lla.debug.count_rows() as rows:
        o = lla.lla_attention_varlen(q, k, v, ridge, cu, cu, 7, 7, check="raise")
        o[:12].sum().backward()
    assert rows.read()["forward"]["ok"] == 20 * 4
    with pytest.raises(lla.debug.CheckError, match="head 0, row 1:"):
        lla.lla_attention_varlen(q, k, v, ridge, cu, cu, 7, 7, check="raise", **UNSOLVED)


def test_warns_once(device):
    inputs = make_inputs(1, 20, device=device)
    with pytest.warns(lla.debug.CheckWarning, match="the solve did not end well") as caught:
        lla.lla_attention(*inputs, check="warn", **UNSOLVED)
    assert caught[0].filename == __file__  # the caller's line, not one of ours
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lla.lla_attention(*inputs, check="warn", **UNSOLVED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_file_runs_again(device, dtype):
    if not COMMAND.exists():
        pytest.skip("the lla command is not built here")
    inputs = leaves(*make_inputs(2, 30, heads=4, heads_kv=2, dim=16, value_dim=8, dtype=dtype, device=device, ridge="dimension"))
    with pytest.raises(lla.debug.CheckError) as caught:
        lla.lla_attention(*inputs, check="raise", causal=False, window_size=(9, 2), **UNSOLVED)
    again = subprocess.run([COMMAND, "check", "--replay", caught.value.path], capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr  # finite; that rows are not solved is said
    name = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    assert f"{name}, Lq 30, Lk 30, D 16, Dv 8" in again.stdout and "saved without a gradient" in again.stdout
    assert "rows not solved: 0" not in again.stdout


@pytest.mark.cpu_only
def test_the_environment_turns_it_on():
    code = "import torch, lla; q = torch.randn(1, 9, 1, 4); lla.lla_attention(q, q + 1, q, 0.1, solver='cg', max_iterations=1, tol=1e-9)"
    environment = {**os.environ, "PYTHONPATH": str(Path(lla.__file__).parents[1])}
    for value, expected in (("raise", "CheckError"), ("warn", "CheckWarning"), ("maybe", "LLA_CHECK must be")):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**environment, "LLA_CHECK": value})
        assert expected in run.stderr, run.stderr


def test_layer_and_bad_values(device):
    layer = lla.LocalLinearAttention(32, 2, check="raise", solver="cg", max_iterations=1, tol=1e-9, device=device)
    with pytest.raises(lla.debug.CheckError):
        layer(torch.randn(1, 12, 32, device=device))
    with pytest.raises(ValueError, match="check must be"):
        lla.LocalLinearAttention(32, 2, check="maybe")
    q, k, v, ridge = make_inputs(1, 5, device=device)
    with pytest.raises(ValueError, match="check must be"):
        lla.lla_attention(q, k, v, ridge, check=True)


def test_compiled_code_breaks_its_graph_there(device):
    inputs = make_inputs(1, 20, dtype=torch.float32, device=device)

    def twice(q, k, v, ridge, **options):
        return 2 * lla.lla_attention(q + 0, k, v, ridge, **options)

    compiled = torch.compile(lambda *a: twice(*a, check="raise"), backend="eager")
    assert torch.equal(compiled(*inputs), twice(*inputs))
    with pytest.raises(lla.debug.CheckError):
        torch.compile(lambda *a: twice(*a, check="raise", **UNSOLVED), backend="eager")(*inputs)
    with pytest.raises(Exception, match="(?i)graph break|unsupported|disable"):
        torch.compile(lambda *a: twice(*a, check="raise"), backend="eager", fullgraph=True)(*inputs)


def test_counts(device):
    inputs = leaves(*make_inputs(2, 20, device=device, dtype=torch.float32))
    with lla.debug.count_rows() as rows:
        lla.lla_attention(*inputs).sum().backward()
        with torch.no_grad():
            lla.lla_attention(*inputs, **UNSOLVED)
    lla.lla_attention(*inputs)
    counts = rows.read()
    assert counts["backward"] == {"ok": 160, "max_iterations": 0, "breakdown": 0, "nan": 0, "precision": 0, "invalid": 0}
    assert sum(counts["forward"].values()) == 320 and counts["forward"]["max_iterations"] > 100
    rows.clear()
    assert sum(rows.read()["forward"].values()) == 0


def test_counting_does_not_wait_for_the_device(device):
    if device != "cuda":
        pytest.skip("needs a GPU")
    inputs = leaves(*make_inputs(2, 100, dim=64, dtype=torch.bfloat16, device=device))
    with lla.debug.count_rows():
        lla.lla_attention(*inputs).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            lla.lla_attention(*inputs).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
