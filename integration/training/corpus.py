"""English prose for training: docstrings of CPython and of the project's own dependencies.

Every file is one that `pip install kv-integration` puts on the machine, so the corpus needs no
download. The topics that `kv_integration.haystack` holds out are never part of it.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from kv_integration import haystack

LIBRARIES = ("numpy", "torch", "transformers", "nltk", "hypothesis")
PROSE_SHARE = 0.8


def docstrings(path: Path) -> Iterator[str]:
    """Docstrings of one source file that are longer than a line or two."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and len(text) > 200:
            yield text


def is_prose(paragraph: str) -> bool:
    """Whether letters and spaces make up most of the paragraph and it has several words."""
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    return letters >= PROSE_SHARE * len(paragraph) and len(paragraph.split()) >= 8


def prose(text: str) -> str:
    """The prose paragraphs of a docstring, the code and tables left out."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(p.strip() for p in paragraphs if ">>>" not in p and is_prose(p))


def roots() -> list[Path]:
    """Folders whose sources are read: the standard library and the installed dependencies."""
    specs = [importlib.util.find_spec(name) for name in LIBRARIES]
    folders = [Path(s.submodule_search_locations[0]) for s in specs if s is not None]
    return [Path(sysconfig.get_path("stdlib")), *folders]


def held_out_guard() -> set[str]:
    """Lines of the held-out topics, so that no docstring that quotes them gets in."""
    return {
        line.strip()
        for text in haystack.topics(held_out=True)
        for line in text.splitlines()
        if len(line.strip()) > 60
    }


def library_texts() -> list[str]:
    """Prose of the docstrings, every paragraph once, none that stands in a held-out topic."""
    guard, seen, texts = held_out_guard(), set(), []
    for root in roots():
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root).parts
            if "site-packages" in inside or "pydoc_data" in inside or "test" in inside:
                continue
            for text in docstrings(path):
                fresh = []
                for paragraph in prose(text).split("\n\n"):
                    lines = {line.strip() for line in paragraph.splitlines()}
                    if paragraph and paragraph not in seen and not lines & guard:
                        seen.add(paragraph)
                        fresh.append(paragraph)
                if fresh:
                    texts.append("\n\n".join(fresh))
    return texts
