"""The same tests on a CPU or a GPU: `pytest tests/python --device cuda`."""
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

REPOSITORY = Path(__file__).parents[2]
settings.register_profile("lla", deadline=None, derandomize=True, max_examples=40, print_blob=True)
settings.load_profile("lla")


def pytest_addoption(parser):
    parser.addoption("--device", default=os.environ.get("LLA_TEST_DEVICE", "cpu"), choices=("cpu", "cuda"))


def pytest_configure(config):
    config.addinivalue_line("markers", "cpu_only: does not depend on the device; skipped with --device cuda")


def pytest_sessionstart(session):
    if session.config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        pytest.exit("--device cuda, but torch finds no GPU", returncode=77)  # ctest's "skipped"


def pytest_collection_modifyitems(config, items):
    if config.getoption("--device") == "cpu":
        return
    skip = pytest.mark.skip(reason="tested on the CPU")
    for item in items:
        if "cpu_only" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device(request):
    return request.config.getoption("--device")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)
