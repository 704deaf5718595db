"""bench/decode_sums.py, the emulation of decode's sums: near fp64 where sums are short, and worse the longer they are."""
import pathlib
import runpy
import types

import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "bench" / "decode_sums.py"
sums = types.SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_a_step_cuts_toward_zero():
    big, small = np.array([1.0, -1.0]), 2.0**-26
    assert np.array_equal(sums.add_step(big, np.full((1, 2), small)), np.array([1.0, -1.0]))
    assert np.array_equal(sums.add_step(np.zeros(2), np.array([[0.5, 0.25], [0.5, -1.0]])), np.array([1.0, -0.75]))


@pytest.mark.parametrize("kind", ["randn", "cluster", "mean30", "queries6", "distinct40"])
def test_ordinary_rows_are_within_decodes_gate(kind):
    assert sums.errors(kind, 16, 512, [1.0, 0.1, 0.01], [256], 1).max() < 2.5e-3


def test_longer_sums_lose_more():
    def lost(steps):
        total, products = np.zeros(1), np.full((sums.STEP, 1), 1 / 3)
        for _ in range(steps):
            total = sums.add_step(total, products)
        return 1 - total[0] / (steps * products.sum())
    assert 0 < 4 * lost(64) < lost(1024) < 1e-3
