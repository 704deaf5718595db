"""lla.distributed under torchrun, with 2 and 4 processes: on the CPU with Gloo, on that many GPUs (or one) with NCCL."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lla
from lla import distributed

HERE = Path(__file__).parent


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_sharded_equals_single(device, processes):
    if device == "cuda" and torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs")
    if device == "cpu" and processes == 1:
        pytest.skip("one process is for machines with one GPU: NCCL at least runs")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
               HERE / "distributed_worker.py", device]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(lla.__file__).parents[1]), str(HERE)]),
                   "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{processes} processes: equal" in result.stdout


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", [1, 2, 4, 7])
def test_zigzag_balances_causal_work(world):
    pieces = distributed._pieces(world, "zigzag")
    assert sorted(sum(pieces, [])) == list(range(2 * world))
    assert len({sum(held) for held in pieces}) == 1, "a causal piece costs as much as its index"


@pytest.mark.cpu_only
@pytest.mark.parametrize("left,right", [(-1, 0), (-1, -1), (3, 0), (2, 5), (-1, 4), (30, 30), (0, 0)])
def test_key_range_shows_each_query_its_own_keys(left, right):
    total = 24
    visible = distributed_visible(total, total, left, right)
    for start, stop in ((0, 6), (6, 12), (12, 24), (23, 24)):
        begin, end, piece_left, piece_right = distributed._key_range(start, stop, total, left, right)
        piece = distributed_visible(stop - start, end - begin, piece_left, piece_right)
        padded = torch.zeros(stop - start, total, dtype=torch.bool)
        padded[:, begin:end] = piece
        assert torch.equal(padded, visible[start:stop])


def distributed_visible(length_q, length_k, left, right):
    return lla.reference._visible(length_q, length_k, False, (left, right), "cpu")


@pytest.mark.cpu_only
def test_needs_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        distributed.shard_sequence(torch.zeros(1, 4, 2))
    with pytest.raises(TypeError, match="group"):
        distributed.shard_sequence(torch.zeros(1, 4, 2), group="world")
