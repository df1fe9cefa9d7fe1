from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from kv_integration import METHODS

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_first_example_runs() -> None:
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert example is not None
    exec(compile(example[1], "README.md", "exec"), {"__name__": "readme"})


def value(text: str) -> Any:
    return None if text == "none" else ast.literal_eval(text.strip("`"))


def test_the_table_of_methods_states_all_parameters_and_their_defaults() -> None:
    table = README.partition("| method | parameter | default | |\n|---|---|---|---|\n")[2]
    table = table.partition("\n\n")[0]
    stated: dict[str, dict[str, Any]] = {}
    texts: dict[str, str] = {}
    name = ""
    for row in table.splitlines():
        method, parameters, defaults, text = (cell.strip() for cell in row.split("|", 4)[1:])
        name = method.strip("`") or name
        names = re.findall(r"`(\w+)`", parameters)
        given = [value(default) for default in defaults.split(", ") if default]
        stated.setdefault(name, {}).update(zip(names, given, strict=True))
        texts[name] = texts.get(name, "") + text
    methods = {method.__name__: method for method in METHODS.values()}
    assert {"SentenceKV", "SemantiCache", "SABlock", "ShadowKVPlus", "SeKV"} < stated.keys()
    for name, own in stated.items():
        default = {field.name: field.default for field in fields(methods[name])}  # type: ignore[arg-type]
        assert own.items() <= default.items()
        parent: Any = methods[name].__base__
        inherited = stated.get(parent.__name__, {})
        missing = default.keys() - own.keys() - inherited.keys()
        assert all(f"`{option}=" in texts[name] for option in missing), (name, missing)
