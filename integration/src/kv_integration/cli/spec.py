"""A method with its options as one writes it on a command line: `sablock(lam=0, max_block=1)`.

Names and calls of Python's grammar, read without running anything: an option's value is a number, a
string, `True`, `False` or `None`, and a plain word is a string.
"""

from __future__ import annotations

import ast
import keyword
import types
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kv_integration import METHODS, Method

DYNAMIC = "dynamic"  # transformers' own cache, for comparison
Known = Mapping[str, type[Method] | None]
KNOWN: Known = {DYNAMIC: None, **METHODS}


@dataclass(frozen=True)
class Spec:
    """A method's name and the options given with it; `str` writes it in one canonical way."""

    name: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        given = ",".join(f"{name}={_word(value)}" for name, value in self.options.items())
        return f"{self.name}({given})" if given else self.name

    def make(self, budget: int | float | None, known: Known = KNOWN) -> Method | None:
        """The method, with `budget` unless it has one of its own or knows none; None: its default.

        None for transformers' own cache.

        Raises:
            ValueError, TypeError: as the method says of a wrong value.
        """
        method = known[self.name]
        if method is None:
            return None
        takes = budget is not None and "budget" in options_of(self.name, known)
        given = {"budget": budget} if takes else {}
        return method(**given | dict(self.options))


def parse_specs(texts: Sequence[str], *, known: Known = KNOWN) -> list[Spec]:
    """Methods with commas between, each once; several texts are read one after the other.

    Raises:
        ValueError: not of that form, an unknown method or option, a value of a wrong type, or
            there is no method at all.
    """
    specs: dict[str, Spec] = {}
    for text in texts:
        for node in _calls(text):
            spec = _spec(node, text, known)
            specs.setdefault(str(spec), spec)
    if not specs:
        raise ValueError(f"no method is given; wanted some of {', '.join(known)}")
    return list(specs.values())


def parse_spec(text: str, *, known: Known = KNOWN) -> Spec:
    """One method with its options; errors as for `parse_specs`."""
    specs = parse_specs([text], known=known)
    if len(specs) > 1:
        raise ValueError(f"wanted one method, got {text!r}")
    return specs[0]


def options_of(name: str, known: Known = KNOWN) -> dict[str, Any]:
    """Options of the method called `name` and their types, in the order of its docstring."""
    method: Any = known[name]
    if method is None:
        return {}
    hints = get_type_hints(method)
    return {field.name: hints[field.name] for field in fields(method) if field.init}


def _calls(text: str) -> Iterator[ast.expr]:
    """The comma-separated parts of `text`."""
    inner = text.strip().strip(",")
    if not inner:
        return
    try:
        parsed = ast.parse(f"({inner},)", mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ValueError(_form(text)) from error
    if not isinstance(parsed, ast.Tuple):
        raise ValueError(_form(text))
    yield from parsed.elts


def _form(text: str) -> str:
    return f"methods must be names such as sablock or sablock(lam=0, max_block=1), got {text!r}"


def _spec(node: ast.expr, text: str, known: Known) -> Spec:
    called = node.func if isinstance(node, ast.Call) else node
    if not isinstance(called, ast.Name) or (isinstance(node, ast.Call) and node.args):
        raise ValueError(_form(text))
    name = called.id
    if name not in known:
        raise ValueError(f"unknown method {name!r}; wanted one of {', '.join(known)}")
    given = {}
    types_of = options_of(name, known)
    for option in node.keywords if isinstance(node, ast.Call) else []:
        if option.arg is None:  # **
            raise ValueError(_form(text))
        if option.arg not in types_of:
            own = ", ".join(types_of) or "none"
            raise ValueError(f"{name} has no option {option.arg!r}; its options: {own}")
        if option.arg in given:
            raise ValueError(f"option {option.arg} is given twice in {text!r}")
        value, wanted = _value(option.value, text), types_of[option.arg]
        if not _fits(value, wanted):
            raise ValueError(f"{option.arg} of {name} must be {_name(wanted)}, got {value!r}")
        given[option.arg] = value
    return Spec(name, {option: given[option] for option in types_of if option in given})


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"an option must be a number, a word, True, False or None, got "
            f"{ast.unparse(node)!r} in {text!r}"
        ) from error


def _fits(value: object, wanted: Any) -> bool:
    origin = get_origin(wanted)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in get_args(wanted))
    if origin is Literal:
        return value in get_args(wanted)
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, wanted if isinstance(wanted, type) else object)


def _name(wanted: Any) -> str:
    """A type for people: `int or float`, `one of none, avg, max`."""
    origin = get_origin(wanted)
    if origin in (Union, types.UnionType):
        return " or ".join(_name(one) for one in get_args(wanted))
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(wanted)))}"
    return "None" if wanted is type(None) else str(getattr(wanted, "__name__", wanted))


def _word(value: object) -> str:
    """A value as `_value` reads it back."""
    if not isinstance(value, str) or keyword.iskeyword(value):
        return repr(value)
    # Python's parser puts the letters of a plain word in a normal form (NFKC).
    plain = value.isidentifier() and unicodedata.is_normalized("NFKC", value)
    return value if plain else repr(value)
