"""The training loop: AdamW over windows of text, with checkpoints that a run goes on from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kv_integration.budget import budget_entries
from kv_integration.fingerprint import model_fingerprint
from kv_integration.router import Router, leading_directions
from kv_integration.router_training import checkpoint
from kv_integration.router_training.checkpoint import Run
from kv_integration.router_training.forward import record, taken_over
from kv_integration.router_training.interrupt import interrupt_noted
from kv_integration.router_training.log import Log
from kv_integration.router_training.losses import Losses
from kv_integration.router_training.settings import Training
from kv_integration.router_training.texts import Texts, draws
from kv_integration.router_training.window import window_losses

CHECKPOINT, LOG = "checkpoint.safetensors", "log.csv"
VALIDATION = 1 << 31  # stands for the step where held-out windows are drawn


class DivergedError(ValueError):
    """A loss or a gradient is no finite number."""


def train_router(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    settings: Training | None = None,
    held_out: Sequence[str] = (),
    folder: Path | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> Router:
    """Train SeKV's router for `model`, which stays as it is.

    Args:
        model: a model that `attach` takes.
        tokenizer: the model's.
        texts: documents, each at least as long as the longest window for it to be used there.
        settings: the paper's where not given.
        held_out: documents that are never trained on; with them, training stops early when their
            loss no longer falls, and the router with the lowest is returned.
        folder: for the checkpoint and `log.csv`. A run that was stopped goes on from there, with
            the same result as if it had never stopped.
        on_step: is given each step's row of the log.

    Returns:
        The router, on the model's device, not in training mode.

    Raises:
        TextTooShortError: no text is as long as the longest window.
        DivergedError: a loss or gradient is not finite; the last checkpoint is kept.
        ValueError: the model's attention is not supported, windows are longer than its positions
            or too short for their budgets, or `folder` holds a run with other settings or texts.
        KeyboardInterrupt: Ctrl-C; the step that ran is finished and saved first.
    """
    settings = Training() if settings is None else settings
    check_lengths(model, settings)
    corpus = Texts(tokenizer, texts, settings.lengths[-1])
    kept_back = Texts(tokenizer, held_out, settings.lengths[-1]) if held_out else None
    fingerprint = model_fingerprint(model)
    recipe: dict[str, Any] = settings.as_dict() | {
        "texts": corpus.digest(),
        "held_out": kept_back.digest() if kept_back else None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        router = Router.for_model(
            model, routing_dim=settings.routing_dim, max_rank=settings.max_rank
        )
    run = Run(router, make_optimizer(router, settings))
    saved = None if folder is None else folder / CHECKPOINT
    with frozen(model), taken_over(model), interrupt_noted() as interrupted:
        if saved is not None and saved.exists():
            checkpoint.restore(saved, run, fingerprint=fingerprint, recipe=recipe)
        else:
            start_projections(model, router, corpus, settings)
        log = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            log = Log(folder / LOG, run.step)

        def save() -> None:
            if saved is not None:
                checkpoint.save(saved, run, fingerprint=fingerprint, recipe=recipe)

        while run.step < settings.steps and run.worse < settings.patience:
            row = train_step(model, run, corpus, settings, saved)
            if kept_back is not None and run.step % settings.validate_every == 0:
                row["validation"] = validate(model, run, kept_back, settings)
            if log is not None:
                log.add(row)
            if on_step is not None:
                on_step(row)
            if run.step % settings.checkpoint_every == 0 or interrupted():
                save()
            if interrupted():
                raise KeyboardInterrupt
        save()
    if run.best:
        router.load_state_dict(run.best)
    return router.eval().requires_grad_(False)


def train_step(
    model: PreTrainedModel, run: Run, corpus: Texts, settings: Training, saved: Path | None
) -> dict[str, Any]:
    """One step of the optimizer over `batch` windows; the row for the log."""
    step = run.step
    weight, length = settings.cost_weight(step), settings.length(step)
    rows = []
    run.optimizer.zero_grad(set_to_none=True)
    for index in range(settings.batch):
        losses = drawn_losses(model, run.router, corpus, length, settings, step, index)
        total = losses.total(settings, weight)
        values = torch.stack((total, *losses)).detach().tolist()
        if not all(map(math.isfinite, values)):
            named = dict(zip(("loss", *Losses._fields), values, strict=True))
            raise DivergedError(diverged(step, f"losses {named}", saved))
        rows.append(values)
        (total / settings.batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(
        run.router.parameters(), settings.clip if settings.clip else math.inf
    )
    if not math.isfinite(float(norm)):
        raise DivergedError(diverged(step, f"a gradient of norm {float(norm)}", saved))
    for group in run.optimizer.param_groups:
        group["lr"] = settings.rate(step)
    run.optimizer.step()
    run.step += 1
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return {
        "step": run.step,
        "length": length,
        "learning_rate": settings.rate(step),
        "cost_weight": weight,
        **dict(zip(("loss", *Losses._fields), means, strict=True)),
        "threshold": float(run.router.thresholds.detach().mean()),
        "validation": None,
    }


def drawn_losses(
    model: PreTrainedModel,
    router: Router,
    corpus: Texts,
    length: int,
    settings: Training,
    step: int,
    index: int,
) -> Losses:
    """Losses of the window that `step` and `index` draw."""
    rng = draws(settings, step, index)
    ids = corpus.window(length, rng).to(model.device)
    return window_losses(model, router, ids, settings, rng)


@torch.no_grad()
def validate(model: PreTrainedModel, run: Run, texts: Texts, settings: Training) -> float:
    """Mean loss over one window per held-out text, always the same ones; keeps the best router."""
    losses = [
        drawn_losses(
            model, run.router, texts, settings.lengths[-1], settings, VALIDATION, index
        ).total(settings, settings.budget_weight)
        for index in range(len(texts.ids))
    ]
    mean = float(torch.stack(losses).mean())
    if run.lowest is None or mean < run.lowest:
        run.lowest, run.worse = mean, 0
        run.best = {name: value.clone() for name, value in run.router.state_dict().items()}
    else:
        run.worse += 1
    return mean


def start_projections(
    model: PreTrainedModel, router: Router, corpus: Texts, settings: Training
) -> None:
    """W starts from the leading right singular vectors of the keys of the first step's windows."""
    keys: list[list[Tensor]] = [[] for _ in range(router.layers)]
    for index in range(settings.batch):
        ids = corpus.window(settings.lengths[0], draws(settings, 0, index))
        with torch.autocast(model.device.type, torch.bfloat16):
            recording = record(model, ids.to(model.device))
        for layer, number in recording.numbers.items():
            keys[number].append(recording.keys[layer])
    for number, parts in enumerate(keys):
        directions = leading_directions(torch.cat(parts, 1), router.routing_dim)
        router.set_projection(number, directions)


def make_optimizer(router: Router, settings: Training) -> torch.optim.AdamW:
    """AdamW over all that the router learns."""
    decayed = [p for name, p in router.named_parameters() if name != "threshold_logits"]
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": [router.threshold_logits], "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
    )


def check_lengths(model: PreTrainedModel, settings: Training) -> None:
    """Raise ValueError unless windows fit into the model's positions and spans into all budgets."""
    config = model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and settings.lengths[-1] > positions:
        raise ValueError(
            f"lengths must be within the model's {positions} positions, got {settings.lengths[-1]}"
        )
    for length in settings.lengths:
        for budget in settings.budgets:
            granted = budget_entries(budget, length)
            settings.segmentation(anchors=True).check(length, granted)


def diverged(step: int, what: str, saved: Path | None) -> str:
    """The text of a `DivergedError`."""
    kept = f"; {saved} is the last good checkpoint" if saved and saved.exists() else ""
    return f"training stopped at step {step + 1}: {what}{kept}"


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """The model in evaluation mode and without gradients of its own; afterwards as it was."""
    training = model.training
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval()
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
        model.train(training)
