"""benchmarks -> integration -> packages: no import, requirement or README example against it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from check_wheels import readme_example
from monorepo import ALL, BENCHMARKS, INTEGRATION, PRIMITIVES, Distribution


def imported(source: str) -> set[str]:
    """Top-level names of the modules that `source` imports, wherever it does so."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return {str(name).split(".")[0] for name in names}


def forbidden(distribution: Distribution) -> set[str]:
    """Import names that `distribution` may not use."""
    if distribution in PRIMITIVES:
        return {other.import_name for other in ALL if other != distribution}
    return {BENCHMARKS.import_name} if distribution == INTEGRATION else set()


def python_files(distribution: Distribution) -> list[Path]:
    return [
        file
        for folder in ("src", "tests", "examples", "training")
        for file in sorted((distribution.path / folder).rglob("*.py"))
    ]


def test_imports_are_seen_wherever_they_are() -> None:
    source = (
        "import a.b, c\nfrom d.e import f\nfrom . import g\n"
        "def h():\n    import i\n    importlib.import_module('j.k')\n"
    )
    assert imported(source) == {"a", "c", "d", "i", "j"}


@pytest.mark.parametrize("distribution", (*PRIMITIVES, INTEGRATION), ids=lambda d: d.name)
def test_no_import_goes_up_or_sideways(distribution: Distribution) -> None:
    files = python_files(distribution)
    sources = {file: file.read_text(encoding="utf-8") for file in files}
    sources[distribution.path / "README.md"] = readme_example(distribution)
    assert len(files) > 1
    wrong = {
        str(file): names
        for file, source in sources.items()
        if (names := imported(source) & forbidden(distribution))
    }
    assert wrong == {}


@pytest.mark.parametrize("distribution", (*PRIMITIVES, INTEGRATION), ids=lambda d: d.name)
def test_no_requirement_goes_up_or_sideways(distribution: Distribution) -> None:
    text = (distribution.path / "pyproject.toml").read_text(encoding="utf-8")
    required = set(re.findall(r'"(kv-[a-z-]+)(?=[^"a-z-]|")', text))
    wrong = {name.replace("_", "-") for name in forbidden(distribution)}
    assert required & wrong == set()


def test_every_package_folder_is_known() -> None:
    folders = {path.parent.name for path in PRIMITIVES[0].path.parent.glob("*/pyproject.toml")}
    assert folders == {distribution.name for distribution in PRIMITIVES}
