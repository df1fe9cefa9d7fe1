from __future__ import annotations

import re
from pathlib import Path


def test_first_example_runs() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example is not None
    exec(compile(example[1], "README.md", "exec"), {"__name__": "readme"})
