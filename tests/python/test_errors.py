"""Wrong arguments raise TypeError or ValueError and name the argument."""
import math

import pytest
import torch
from helpers import make_inputs

import lla

WRONG = {  # what to change in a good call: (exception, word in the message)
    "q type": (dict(q=[1.0]), TypeError, "q must be"),
    "k type": (dict(k=None), TypeError, "k must be"),
    "v type": (dict(v=3), TypeError, "v must be"),
    "ridge type": (dict(ridge="0.1"), TypeError, "ridge must be"),
    "ridge bool": (dict(ridge=True), TypeError, "ridge must be"),
    "ridge none": (dict(ridge=None), TypeError, "ridge must be"),
    "ridge negative": (dict(ridge=-0.5), ValueError, "ridge"),
    "ridge nan": (dict(ridge=math.nan), ValueError, "ridge"),
    "ridge shape": (dict(ridge=torch.ones(3)), ValueError, "ridge"),
    "q rank": (dict(q=torch.ones(2, 9, 16)), ValueError, "q"),
    "q rank 5": (dict(q=torch.ones(1, 2, 9, 4, 16)), ValueError, "q"),
    "q integer": (dict(q=torch.ones(2, 9, 4, 16, dtype=torch.int32)), ValueError, "q"),
    "q complex": (dict(q=torch.ones(2, 9, 4, 16, dtype=torch.complex64)), ValueError, "q"),
    "k head dimension": (dict(k=torch.ones(2, 9, 2, 15)), ValueError, "k"),
    "k batch": (dict(k=torch.ones(3, 9, 2, 16)), ValueError, "k"),
    "k dtype": (dict(k=torch.ones(2, 9, 2, 16, dtype=torch.float64)), ValueError, "k"),
    "k heads": (dict(k=torch.ones(2, 9, 3, 16), v=torch.ones(2, 9, 3, 16)), ValueError, "head"),
    "v length": (dict(v=torch.ones(2, 8, 2, 16)), ValueError, "v"),
    "v empty": (dict(v=torch.ones(2, 9, 2, 0)), ValueError, "v"),
    "scale type": (dict(scale="1"), TypeError, "scale"),
    "scale nan": (dict(scale=math.nan), ValueError, "scale"),
    "scale infinite": (dict(scale=math.inf), ValueError, "scale"),
    "causal type": (dict(causal=1), TypeError, "causal"),
    "window type": (dict(window_size=3), TypeError, "window_size"),
    "window value": (dict(window_size=(-2, 0)), ValueError, "window_size"),
    "window float": (dict(window_size=(1.0, 0)), TypeError, "window_size"),
    "tol type": (dict(tol="small"), TypeError, "tol"),
    "tol negative": (dict(tol=-1e-3), ValueError, "tol"),
    "tol nan": (dict(tol=math.nan), ValueError, "tol"),
    "max_iterations type": (dict(max_iterations=2.5), TypeError, "max_iterations"),
    "max_iterations value": (dict(max_iterations=0), ValueError, "max_iterations"),
    "max_iterations huge": (dict(max_iterations=2**40), ValueError, "max_iterations"),
    "solver type": (dict(solver=2), TypeError, "solver"),
    "solver value": (dict(solver="lu"), ValueError, "solver"),
    "implementation type": (dict(implementation=1), TypeError, "implementation"),
    "implementation value": (dict(implementation="none such"), ValueError, "implementation"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case):
    change, exception, word = WRONG[case]
    q, k, v, ridge = make_inputs(2, 9, heads=4, heads_kv=2, dim=16, dtype=torch.float32)
    arguments = {**dict(q=q, k=k, v=v, ridge=ridge), **change}
    arguments = {name: a.to(device) if isinstance(a, torch.Tensor) else a for name, a in arguments.items()}
    with pytest.raises(exception, match=word):
        lla.lla_attention(**arguments)


def test_devices_must_agree():
    q, k, v, ridge = make_inputs(2, 9)
    with pytest.raises(ValueError, match="k"):
        lla.lla_attention(q, k.to("meta"), v, ridge)


@pytest.mark.parametrize("case", ["both", "dtype", "order", "max_seqlen", "length"])
def test_wrong_varlen(device, case):
    q, k, v, _ = (t[0] if isinstance(t, torch.Tensor) else t
                  for t in make_inputs(1, 9, dtype=torch.float32, device=device, ridge="number"))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    if case == "both":
        with pytest.raises(TypeError, match="cu_seqlens_k"):
            lla.lla_attention_varlen(q, k, v, 0.1, cu, None, 5, 5)
    elif case == "dtype":
        with pytest.raises(ValueError, match="cu_seqlens_q"):
            lla.lla_attention_varlen(q, k, v, 0.1, cu.long(), cu, 5, 5)
    elif device == "cpu":  # on a GPU the contents are not read on the host
        wrong = {"order": [0, 6, 4], "max_seqlen": [0, 4, 9], "length": [0, 4, 12]}[case]
        wrong = torch.tensor(wrong, dtype=torch.int32)
        with pytest.raises(ValueError, match="seqlen"):
            lla.lla_attention_varlen(q, k, v, 0.1, wrong, wrong, 3 if case == "max_seqlen" else 9, 9)


def test_operators_without_the_wrappers_refuse_too(device):
    q, k, v, ridge = make_inputs(2, 9, device=device)
    options = (None, None, 0, 0, None, True, -1, -1, 1e-3, 0, "auto", None, False, False)
    cache = (None, None, None, 0)
    with pytest.raises(RuntimeError, match="ridge"):
        torch.ops.lla.forward(q, k, v, None, None, *options, *cache, False, False)
    with pytest.raises(RuntimeError, match="ridge"):
        torch.ops.lla.backward(q, q, k, v, None, None, q, *options, True, True, True, True, False)
    q.requires_grad_()
    o, *_ = torch.ops.lla.forward(q, k, v, ridge, None, *options, *cache, False, False)
    with pytest.raises(RuntimeError, match="save=False"):
        o.sum().backward()


@pytest.mark.cpu_only
def test_out_of_memory():
    q = torch.zeros(1, 1, 1, 8).expand(1, 1 << 37, 1, 8)  # one row seen often: the output would be real
    k = torch.zeros(1, 1, 1, 8)
    with pytest.raises(torch.OutOfMemoryError, match="allocate"):
        lla.lla_attention(q, k, k, 0.1)


def test_precision_is_one_of_two_words(device):
    q, k, v, ridge = make_inputs(1, 5, device=device)
    with pytest.raises(ValueError, match='"full", "tf32" or None'):
        lla.lla_attention(q, k, v, ridge, precision="bf16")
