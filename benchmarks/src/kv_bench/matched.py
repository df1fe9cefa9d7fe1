"""Budgets that give methods equal bytes on the device, one per method and prompt length."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import click
import torch

from kv_bench.grid import Variant
from kv_bench.variants import make
from kv_integration import attach
from kv_integration.cli.files import write_text
from kv_integration.cli.inputs import Loaded
from kv_integration.planner import ShareTooSmallError, device_share, for_device_share

FILE = "budgets.json"
Key = tuple[str, int]  # label of the variant as it was asked for, context


@dataclass(frozen=True)
class Match:
    """What a step of a method may attend so that it keeps within `share` of full KV's bytes.

    entries: None where no budget does. reached: bytes on the device over those of full KV, the
    most after any step; the least that the method comes to where it cannot keep within the share.
    """

    method: str
    context: int
    share: float
    entries: int | None
    reached: float

    @property
    def key(self) -> Key:
        return (Variant(self.method, self.share).label, self.context)


def match_option(command: Callable[..., None]) -> Callable[..., None]:
    """`--match`: what a budget counts."""
    return click.option(
        "--match",
        type=click.Choice(["entries", "device"]),
        default="entries",
        show_default=True,
        help="Budgets are entries that a step attends, or shares of full KV's bytes on the device.",
    )(command)


def check_shares(variants: Iterable[Variant], match: str) -> None:
    """Raise ValueError if a budget is to be found for a variant that does not leave it open."""
    for variant in variants:
        if match == "device" and variant.method != "full":
            if isinstance(variant.budget, int):
                raise ValueError(
                    "--match device wants shares of full KV in (0, 1] as budgets, got "
                    f"{variant.budget} for {variant.method}"
                )
            if "budget=" in variant.method:
                raise ValueError(f"--match device finds the budget, but it is in {variant.method}")


def find(loaded: Loaded, variant: Variant, ids: Sequence[int], *, steps: int) -> Match:
    """The largest budget of `variant` within its share on one prompt; full KV is as it is."""
    prompt = torch.tensor([list(ids)], device=loaded.model.device)
    method, tokens, entries = make(variant), len(ids), len(ids)
    with attach(loaded.model, loaded.tokenizer) as kv:
        if variant.method != "full":
            try:
                method = for_device_share(kv, method, prompt, float(variant.budget), steps=steps)
            except ShareTooSmallError as error:
                return Match(variant.method, tokens, float(variant.budget), None, error.least)
            entries = int(method.budget)
        reached = device_share(kv, method, prompt, steps=steps)
    return Match(variant.method, tokens, float(variant.budget), entries, reached)


def find_all(
    loaded: Loaded,
    variants: Sequence[Variant],
    prompts: Mapping[int, Sequence[int]],
    *,
    steps: int,
    folder: Path | None = None,
    advance: Callable[[], object] = lambda: None,
) -> dict[Key, Match]:
    """A match for every variant and context.

    prompts: ids of one prompt per context. folder: has the matches of earlier calls in its
    `budgets.json`, and those of this one afterwards.
    """
    known = {} if folder is None else {match.key: match for match in read(folder / FILE)}
    for context, ids in prompts.items():
        for variant in variants:
            if (variant.label, context) not in known:
                match = find(loaded, variant, ids, steps=steps)
                known[variant.label, context] = replace(match, context=context)
                if folder is not None:
                    records = [asdict(known[key]) for key in sorted(known)]
                    write_text(folder / FILE, json.dumps(records, indent=1) + "\n")
            advance()
    return known


def read(file: Path) -> list[Match]:
    """Matches of a `budgets.json`, none if there is no such file.

    Raises:
        ValueError: it is not one.
    """
    if not file.exists():
        return []
    try:
        names = [field.name for field in fields(Match)]
        records: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        return [Match(**{name: record[name] for name in names}) for record in records]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is no list of budgets: {error!r}") from error


def as_run(
    variants: Iterable[Variant], contexts: Iterable[int], found: Mapping[Key, Match] | None
) -> dict[Key, Variant]:
    """How each variant runs at each context: as it is, or with the budget found, if one was."""
    variants, runs = list(variants), {}
    for context in contexts:
        for variant in variants:
            entries: int | float | None = variant.budget
            if found is not None and variant.method != "full":
                entries = found[variant.label, context].entries
            if entries is not None:
                runs[variant.label, context] = Variant(variant.method, entries)
    return runs
