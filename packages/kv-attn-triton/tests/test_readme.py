"""The README's example runs."""

from __future__ import annotations

import re
from pathlib import Path


def test_first_example_runs():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block is not None
    exec(compile(block.group(1), "README.md", "exec"), {})
