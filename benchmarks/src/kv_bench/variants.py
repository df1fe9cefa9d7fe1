"""Which methods run with which budgets: ours and a user's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from kv_bench.grid import Variant
from kv_integration import METHODS, Method
from kv_integration.cli.inputs import make_method, parse_budget

Registry = Mapping[str, type[Method]]


def parse_budgets(text: str) -> list[int | float]:
    """Budgets with commas between, each once.

    Raises:
        ValueError: none, or a wrong one.
    """
    named = [parse_budget(part.strip()) for part in text.split(",") if part.strip()]
    granted = list({str(budget): budget for budget in named}.values())
    if not granted:
        raise ValueError(f"--budgets must name at least one budget, got {text!r}")
    return granted


def make_variants(
    names: Sequence[str], budgets: str, registry: Registry = METHODS
) -> list[Variant]:
    """Every method with every budget that is not its own; full KV once.

    Raises:
        ValueError: no budget, or one that a method does not take.
    """
    variants = {}
    for name in names:
        for budget in parse_budgets(budgets):
            # whose budget may be another: full KV's, or one of its options
            variant = Variant(name, make(Variant(name, budget), registry).budget)
            variants[variant.label] = variant
    return list(variants.values())


def make(variant: Variant, registry: Registry = METHODS) -> Method:
    """The method of `variant`, which has `variant.budget` unless its options name another."""
    return method_named(variant.method, variant.budget, registry)


def method_named(name: str, budget: int | float | None, registry: Registry = METHODS) -> Method:
    """The method that `name` writes, with that budget or, where it is None, its own.

    Raises:
        ValueError: `name` is transformers' own cache, or as `make_method`.
    """
    method = make_method(name, budget, methods=registry)
    if method is None:
        raise ValueError(f"{name} is a cache of transformers, wanted a method")
    return method


def parse_lengths(text: str) -> list[int]:
    """Prompt lengths with commas between, each once.

    Raises:
        ValueError: none, or something else than positive integers.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--contexts must be positive integers with commas between, got {text!r}")
    return list(dict.fromkeys(int(part) for part in parts))


def own_method(place: str) -> tuple[str, type[Method], bytes]:
    """A user's method from `file.py:Name`: its name on the command line, its class, its source.

    Raises:
        ValueError: there is no such file or class, the class is no method, or its name is taken.
    """
    path, _, name = place.rpartition(":")
    file = Path(path)
    if not name.isidentifier() or not file.is_file():
        raise ValueError(
            f"--method-module must be FILE.py:NAME of a file that exists, got {place!r}"
        )
    spec = importlib.util.spec_from_file_location(f"kv_bench_own_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"--method-module must name a Python file, got {file}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file may raise
        raise ValueError(f"{file} cannot be imported: {error!r}") from error
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ValueError(f"{file} has no method class {name}; a method is a kv_integration.Method")
    called = name.lower()
    if called in METHODS:
        raise ValueError(f"{name} in {file} is called as a method that exists, {called}: rename it")
    return called, found, file.read_bytes()


def own_methods(places: Sequence[str]) -> dict[str, tuple[type[Method], bytes]]:
    """Class and source of each user's method, by its name on the command line.

    Raises:
        ValueError: two have the same name, or as `own_method`.
    """
    found: dict[str, tuple[type[Method], bytes]] = {}
    for place in places:
        name, kind, source = own_method(place)
        if name in found:
            raise ValueError(f"--method-module {place} is the second method named {name}")
        found[name] = kind, source
    return found
