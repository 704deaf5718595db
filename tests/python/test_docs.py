"""The Python code in the documentation runs."""
import re

import pytest
from conftest import REPOSITORY

pytestmark = pytest.mark.cpu_only
FILES = ["README.md", "docs/python.md"]


def blocks():
    for name in FILES:
        code = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / name).read_text(), re.MULTILINE | re.DOTALL)
        assert code, f"{name} has no Python code"
        yield from (pytest.param(text, id=f"{name}:{i}") for i, text in enumerate(code))


@pytest.mark.parametrize("code", list(blocks()))
def test_block_runs(code):
    if "transformers" in code:
        pytest.importorskip("transformers")
    exec(compile(code, "documentation", "exec"), {"__name__": "documentation"})


def test_every_public_name_is_documented():
    import lla

    text = (REPOSITORY / "docs/python.md").read_text()
    missing = [name for name in lla.__all__ if name not in text and name not in ("AttentionInfo", "KVCache", "version")]
    assert not missing
