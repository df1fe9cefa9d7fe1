"""The state of a training run as one file: written whole, checked when it is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kv_integration.router import Router
from kv_offload import CacheFileError, load_cache, save_cache

METHOD = "sekv-router-training"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass
class Run:
    """What training goes on from.

    step: steps that are done. best: the router with the lowest held-out loss so far, empty without
    held-out texts. worse: validations since then.
    """

    router: Router
    optimizer: torch.optim.Optimizer
    step: int = 0
    best: dict[str, Tensor] = field(default_factory=dict)
    lowest: float | None = None
    worse: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """All numbers by name."""
        out = {f"router.{name}": p.detach() for name, p in self.router.named_parameters()}
        for name, parameter in self.router.named_parameters():
            for moment, value in self.optimizer.state[parameter].items():
                out[f"{moment}.{name}"] = value
        return out | {f"best.{name}": value for name, value in self.best.items()}


def save(path: Path, run: Run, *, fingerprint: str, recipe: dict[str, Any]) -> None:
    """Write the run; `recipe` says what must be the same for it to go on.

    Raises:
        OSError: the file cannot be written; an old one is as it was.
    """
    progress = {"step": run.step, "lowest": run.lowest, "worse": run.worse}
    extra = {"recipe": recipe, "progress": progress}
    save_cache(path, run.tensors(), method=METHOD, fingerprint=fingerprint, extra=extra)


def restore(path: Path, run: Run, *, fingerprint: str, recipe: dict[str, Any]) -> None:
    """Make `run` what was saved.

    Raises:
        FingerprintError: it was a run of another model.
        CacheFileError: the file is no checkpoint, or truncated or altered.
        ValueError: the run had other settings or texts; the text names the first that differs.
    """
    file = load_cache(path, fingerprint=fingerprint)
    if file.method != METHOD:
        raise CacheFileError(f"{path} holds {file.method!r}, wanted {METHOD!r}")
    for name, value in recipe.items():
        if file.extra["recipe"].get(name) != value:
            raise ValueError(
                f"{path} is of a run with {name} {file.extra['recipe'].get(name)!r}, now it is "
                f"{value!r}: use the same, or another folder"
            )
    with torch.no_grad():
        for name, parameter in run.router.named_parameters():
            parameter.copy_(file.tensors[f"router.{name}"])
            moments = {m: f"{m}.{name}" for m in MOMENTS if f"{m}.{name}" in file.tensors}
            # AdamW counts its steps on the CPU.
            run.optimizer.state[parameter] = {
                moment: file.tensors[key]
                .clone()
                .to("cpu" if moment == "step" else parameter.device)
                for moment, key in moments.items()
            }
    best = {n: t.clone() for n, t in file.tensors.items() if n.startswith("best.")}
    run.best = {name.removeprefix("best."): tensor for name, tensor in best.items()}
    progress = file.extra["progress"]
    run.step, run.lowest, run.worse = progress["step"], progress["lowest"], progress["worse"]
