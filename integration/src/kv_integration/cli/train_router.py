"""`kv-integration train-router`: a router for SeKV, from a model and texts."""

from __future__ import annotations

from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import click
import torch

from kv_integration.cli.files import check_writable, whole_file
from kv_integration.cli.inputs import DTYPES, load_model, read_text
from kv_integration.cli.progress import Steps
from kv_integration.router_training import Training, plot, train_router
from kv_integration.router_training.loop import LOG

HELP = {
    "steps": "Optimizer steps.",
    "batch": "Windows of text per step.",
    "lengths": "Tokens of a window, each for an equal part of the steps.",
    "learning_rate": "Highest learning rate.",
    "weight_decay": "Of projections and gate predictor.",
    "warmup": "Share of the steps over which the learning rate rises.",
    "clip": "Largest norm of the gradient; 0 for none.",
    "seed": "Decides every draw.",
    "checkpoint_every": "Steps between checkpoints.",
    "validate_every": "Steps between validations on held-out texts.",
    "patience": "Validations without a better one before training stops.",
    "alpha": "Boundary sensitivity.",
    "min_length": "Shortest span, L_min.",
    "max_length": "Longest span.",
    "trail": "Tokens after an anchor that stay as they are, too.",
    "window": "Local window w, at most a quarter of the budget.",
    "sinks": "First tokens that are no part of a span.",
    "budgets": "Shares of a window that spans are cut for; each window draws one.",
    "absorbed": "Share of windows whose anchors belong to spans.",
    "routing_dim": "Routing dimension d'.  [default: 32, or the head's]",
    "max_rank": "Components per span, R_max.  [default: 32, or the head's]",
    "candidates": "Positions per window where the teacher's attention is read.",
    "mined": "Positions with the strongest far attention, for the zoom loss.",
    "random": "Other positions, for distillation.",
    "far_mass": "Least share of a head's attention on spans to be supervised.",
    "few": "Largest share of the spans in the target of a head that is supervised.",
    "coverage": "Share of the attention on spans that the target covers, rho.",
    "positive_weight": "Weight of relevant spans, w+.",
    "zoom_weight": "Lambda 1.",
    "recon_weight": "Lambda 2.",
    "budget_weight": "Lambda 3, reached at half of the steps.",
    "rank_cost": "Cost of a component beside an expansion, beta.",
}


class Numbers(click.ParamType):
    """Numbers with commas between, of the kind of the first default."""

    name = "numbers"

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def convert(self, value: Any, param: Any, context: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self.kind(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"wanted {self.kind.__name__}s with commas between, got {value!r}")


def setting_option(field: Field[Any]) -> Any:
    """The option of one of the settings."""
    default = field.default
    kind: Any = int if default is None else type(default)
    shown: Any = default is not None
    if isinstance(default, tuple):
        kind, shown = Numbers(type(default[0])), ",".join(map(str, default))
    name = "--" + field.name.replace("_", "-")
    return click.option(
        name, field.name, type=kind, default=default, show_default=shown, help=HELP[field.name]
    )


def setting_options(command: Any) -> Any:
    """Add an option for every setting of `Training`."""
    for field in reversed(fields(Training)):
        command = setting_option(field)(command)
    return command


@click.command("train-router")
@click.option(
    "--model",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Model folder in transformers' format.  [default: the embedded model]",
)
@click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    metavar="FILES",
    help="Text file (UTF-8), or a folder of .txt files; may be given several times.",
)
@click.option(
    "--held-out",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILES",
    help="Texts to stop early by, as --text.  [default: none, all steps run]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE.safetensors",
    help="Write the router here.",
)
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Checkpoint, log.csv and losses.png; a run that stopped goes on.  [default: OUT-run]",
)
@click.option("--dtype", type=click.Choice(["auto", *DTYPES]), default="auto", show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--threads", type=int, help="CPU threads.  [default: torch's choice]")
@setting_options
def train_router_command(
    folder: Path | None,
    texts: tuple[Path, ...],
    held_out: tuple[Path, ...],
    out: Path,
    run: Path | None,
    dtype: str,
    device: str,
    threads: int | None,
    **values: Any,
) -> None:
    """Train SeKV's router for a model; the model itself does not change.

    The same command again goes on where it was stopped. Defaults are the paper's.

    \b
    Examples:
      kv-integration train-router --model DIR --text books/ --out router.safetensors
      kv-integration train-router --text a.txt --text b.txt --lengths 1024,2048 --steps 200 \\
          --batch 2 --out router.safetensors
    """
    settings = Training(**values)
    check_writable("--out", out, suffixes=(".safetensors",))
    run = out.with_name(f"{out.stem}-run") if run is None else run
    if run.exists() and not run.is_dir():
        raise ValueError(f"--run is no folder: {run}")
    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads must be at least 1, got {threads}")
        torch.set_num_threads(threads)
    documents, kept_back = read_texts(texts), read_texts(held_out)
    with Steps() as steps:
        with steps.step("loading the model"):
            loaded = load_model(folder, dtype=dtype, device=device)
        with steps.step("training the router", total=settings.steps) as done:
            reached = 0

            def on_step(row: dict[str, Any]) -> None:
                nonlocal reached
                done.advance(row["step"] - reached)
                reached = row["step"]

            router = train_router(
                loaded.model,
                loaded.tokenizer,
                documents,
                settings=settings,
                held_out=kept_back,
                folder=run,
                on_step=on_step,
            )
        with steps.step("drawing the losses"), whole_file(run / "losses.png") as temporary:
            plot(run / LOG, temporary)
        out.parent.mkdir(parents=True, exist_ok=True)
        router.save(out, model=loaded.model)
    share = router.trainable / sum(p.numel() for p in loaded.model.parameters())
    click.echo(f"router      {out}, {router.trainable:,} parameters, {share:.3%} of the model's")
    click.echo(f"run         {run}: {LOG}, losses.png, the last checkpoint")


def read_texts(paths: tuple[Path, ...]) -> list[str]:
    """The texts of files and of folders of .txt files, in the order of their names.

    Raises:
        ValueError: one is missing, empty or not UTF-8, or a folder holds no .txt file.
    """
    texts = []
    for path in paths:
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"there is no .txt file in {path}")
        texts += [read_text(file, "text") for file in files]
    return texts
