"""The Python data generator gives the golden values its C++ twin gives. Needs numpy only."""

import pathlib
import runpy
import types

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
data = types.SimpleNamespace(**runpy.run_path(str(ROOT / "python" / "lla" / "_data.py")))


def golden():
    lines = (ROOT / "tests" / "golden" / "data.txt").read_text().splitlines()
    head = lines[0].split()
    sizes = {name: int(value) for name, value in zip(head[::2], head[1::2])}
    return sizes.pop("seed"), sizes, [line.split() for line in lines[1:]]


@pytest.mark.parametrize("kind", data.KINDS + data.PEAKED_KINDS + data.DEGENERATE_KINDS)
def test_golden_values(kind):
    seed, sizes, rows = golden()
    made = dict(zip("qkv", data.make(kind, seed, **sizes)))
    wanted = [row for row in rows if row[0] == kind]
    assert len(wanted) == 15
    for _, tensor, *index, value in wanted:
        assert made[tensor][tuple(map(int, index))] == pytest.approx(float(value), rel=1e-12, abs=1e-12)


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="nonsense"):
        data.make("nonsense", 0, 1, 1, 1, 1, 1, 1, 1)


def test_zero_lengths():
    for kind in data.KINDS + data.PEAKED_KINDS + data.DEGENERATE_KINDS:
        q, k, v = data.make(kind, 0, batch=1, length_q=3, length_k=0, heads_q=2, heads_kv=1, dim=4, value_dim=2)
        assert q.shape == (1, 3, 2, 4) and k.shape == (1, 0, 1, 4) and v.shape == (1, 0, 1, 2)
        assert np.isfinite(q).all()
