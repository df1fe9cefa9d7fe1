from __future__ import annotations

import re
from pathlib import Path

import kv_policies as kp

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


def test_the_example_runs() -> None:
    example = re.search(r"```python\n(.*?)```", README, re.S)
    assert example
    exec(compile(example[1], "README.md", "exec"), {})


def test_every_public_name_is_documented() -> None:
    for name in kp.__all__:
        assert getattr(kp, name).__doc__
        assert f"`{name}(" in README
