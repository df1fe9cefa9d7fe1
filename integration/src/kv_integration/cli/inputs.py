"""What the commands are given: budget, methods, model, prompt; each checked before any work."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from kv_integration import Method, haystack
from kv_integration.budget import check_budget
from kv_integration.cli.spec import DYNAMIC as DYNAMIC
from kv_integration.cli.spec import KNOWN, Known, parse_spec, parse_specs
from kv_integration.embedded import model_path

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONTEXT, DEPTH = 8192, 0.5


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer and the folder they came from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path


def parse_budget(text: str) -> int | float:
    """`1024` is a number of entries, `0.1` a share of the prompt.

    Raises:
        ValueError: neither, or not positive, or a share above 1.
    """
    budget: int | float
    try:
        budget = int(text)
    except ValueError:
        try:
            budget = float(text)
        except ValueError:
            raise ValueError(
                f"budget must be a number of entries such as 1024 or a share of the prompt such "
                f"as 0.1, got {text!r}"
            ) from None
    check_budget(budget)
    return budget


def parse_names(texts: Sequence[str], *, known: Known = KNOWN) -> list[str]:
    """Methods, with options or without, as `str(Spec)` writes them; each once.

    Raises:
        ValueError: as `parse_specs`.
    """
    return [str(spec) for spec in parse_specs(texts, known=known)]


def make_method(name: str, budget: int | float | None, *, methods: Known = KNOWN) -> Method | None:
    """The method that `name` writes, such as `sablock(lam=0)`; None for transformers' own cache."""
    return parse_spec(name, known=methods).make(budget, methods)


def load_model(folder: Path | None, *, dtype: str, device: str) -> Loaded:
    """The model in `folder`, or the embedded one.

    Raises:
        ValueError: there is no such folder, it holds no causal language model with all its
            weights, or there is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no CUDA GPU")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # Small matrix products in half precision are slow on most CPUs.
    wanted = DTYPES.get(dtype, "auto" if device == "cuda" else torch.float32)
    folder = model_path() if folder is None else folder
    if not folder.is_dir():
        raise ValueError(f"there is no model folder {folder}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no model folder: it has no config.json")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model: Any
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        load: Any = AutoModelForCausalLM.from_pretrained
        model, info = load(folder, dtype=wanted, local_files_only=True, output_loading_info=True)
    except Exception as error:  # what a broken folder raises depends on what is broken in it
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"no causal language model can be loaded from {folder}: {reason}"
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{folder} lacks {len(missing)} weights of its model, first {missing[0]}")
    return Loaded(model.to(device).eval(), tokenizer, folder)


def read_text(path: Path, what: str) -> str:
    """A text file in UTF-8.

    Raises:
        ValueError: it is missing, empty or not UTF-8.
    """
    if not path.is_file():
        raise ValueError(f"there is no {what} {path}")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {path} is not UTF-8 at byte {error.start}") from error
    if not text.strip():
        raise ValueError(f"{what} {path} is empty")
    return text


@dataclass(frozen=True)
class Request:
    """What is asked: a document and a question, or a haystack of a length, with its needle."""

    document: Path | None
    question: str | None
    context: int | None
    depth: float | None
    seed: int

    def check(self) -> None:
        """Raise ValueError if options do not go together or are out of range."""
        if self.document is not None:
            if self.question is None:
                raise ValueError("--document needs --question")
            if self.context is not None or self.depth is not None:
                raise ValueError(
                    "--context and --depth are of the haystack that is built without --document"
                )
        elif self.question is not None:
            raise ValueError("--question needs --document: a haystack comes with its own question")
        if self.context is not None and self.context < 1:
            raise ValueError(f"--context must be at least 1, got {self.context}")
        if self.depth is not None and not 0 <= self.depth <= 1:
            raise ValueError(f"--depth must be between 0 (start) and 1 (end), got {self.depth}")

    def text(self) -> str | None:
        """The document's text, if there is one."""
        return None if self.document is None else read_text(self.document, "document")


def make_prompt(
    request: Request, text: str | None, loaded: Loaded, max_new_tokens: int
) -> haystack.Prompt:
    """The prompt that `request` asks for.

    Raises:
        ValueError: prompt and answer need more positions than the model has.
    """
    if text is None:
        context = CONTEXT if request.context is None else request.context
        check_positions(loaded.model, context, max_new_tokens)
        return haystack.needle_prompt(
            loaded.tokenizer,
            context=context,
            depth=DEPTH if request.depth is None else request.depth,
            seed=request.seed,
            keys=haystack.read_keys(loaded.folder),
        )
    prompt = haystack.document_prompt(
        loaded.tokenizer, text, request.question or "", name=str(request.document)
    )
    check_positions(loaded.model, len(prompt.ids), max_new_tokens)
    return prompt


def check_positions(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise ValueError unless prompt and answer fit into the model's positions."""
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and prompt_tokens + max_new_tokens > limit:
        raise ValueError(
            f"the prompt's {prompt_tokens} tokens and {max_new_tokens} of the answer are more than "
            f"the model's {limit} positions"
        )


def settle(seed: int, threads: int | None, max_new_tokens: int) -> None:
    """Set what holds for the whole process.

    Raises:
        ValueError: `threads` or `max_new_tokens` is below 1.
    """
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads must be at least 1, got {threads}")
        torch.set_num_threads(threads)
    random.seed(seed)
    torch.manual_seed(seed % 2**63)
