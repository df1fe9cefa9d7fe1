"""One side of `kv-bench peers`: runs caches of one environment, told what to do line by line.

Started twice, by the interpreter of this project and by one with kvpress; it imports nothing of
this project before a side asks for it, so that both are measured by the same lines. Each request
and each reply is one line of JSON:

    {"op": "load", "model": folder, "dtype": "float32", "threads": 1}      -> versions
    {"op": "run", "side": name, "kept": n, "context": ids, "question": ids, "tokens": n,
     "aware": whether the question is compressed with the context}
        -> tokens, ttft_s, steps_s, live_bytes, kept; or {"unavailable": why}
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

WINDOW, KERNEL, CHUNK, SINKS = 32, 5, 10, 4  # the same on both sides


def ours(name: str, model: Any, tokenizer: Any, kept: int) -> tuple[Any, Any]:
    """A context manager and a cache, of this project."""
    from kv_integration import METHODS, attach

    observed = {"window": window_of(kept), "pooling": "avg", "kernel": KERNEL}
    settings: dict[str, dict[str, Any]] = {
        "snapkv": observed,
        "pyramidkv": observed,
        "chunkkv": {**observed, "chunk": CHUNK},
        "streamingllm": {"sinks": SINKS},
    }
    if name not in METHODS:
        raise LookupError(f"there is no {name} here")
    make: Any = METHODS[name]
    own = settings.get(name, {})
    attached = attach(model, tokenizer)
    return attached, attached.cache(make() if name == "full" else make(budget=kept, **own))


def window_of(kept: int) -> int:
    """Tokens of the observation window: ours takes no more than a quarter of what is kept."""
    return min(WINDOW, max(kept // 4, 1))


def kvpress(name: str, model: Any, prompt: int, kept: int) -> tuple[Any, Any]:
    """A press as context manager and a DynamicCache, of kvpress.

    name: of a press; `:nope` after it leaves out RoPE in layers that have none.
    """
    import kvpress as theirs
    from transformers import DynamicCache

    name, _, corrected = name.partition(":")
    # so that int(prompt * (1 - ratio)) is what is to be kept
    ratio = 1 - (kept + 0.5) / prompt
    snap = {"compression_ratio": ratio, "window_size": window_of(kept), "kernel_size": KERNEL}
    make: dict[str, Callable[[], Any]] = {
        "snapkv": lambda: theirs.SnapKVPress(**snap),
        "pyramidkv": lambda: theirs.PyramidKVPress(**snap),
        "chunkkv": lambda: theirs.ChunkKVPress(theirs.SnapKVPress(**snap), chunk_length=CHUNK),
        "streamingllm": lambda: theirs.StreamingLLMPress(compression_ratio=ratio, n_sink=SINKS),
        "tova": lambda: theirs.TOVAPress(compression_ratio=ratio),
    }
    press = make[name]()
    if corrected:
        leave_unrotated(getattr(press, "press", press))
    return press(model), DynamicCache(config=model.config)


def leave_unrotated(press: Any) -> None:
    """Let `press` score as the model attends in layers without RoPE.

    kvpress rotates the window's queries in every layer, and there compares them with keys that were
    never rotated.
    """
    score = press.score

    def corrected(module: Any, hidden: Any, keys: Any, values: Any, given: Any, kwargs: Any) -> Any:
        if not getattr(module, "use_rope", True):
            cos, sin = kwargs["position_embeddings"]
            none = torch.ones_like(cos), torch.zeros_like(sin)
            kwargs = {**kwargs, "position_embeddings": none}
        return score(module, hidden, keys, values, given, kwargs)

    press.score = corrected


def transformers_cache(name: str, model: Any) -> Any:
    """A cache of transformers."""
    from transformers import DynamicCache, QuantizedCache

    if name == "dynamic":
        return DynamicCache(config=model.config)
    if name == "offloaded":
        if model.device.type == "cpu":
            raise LookupError("offloads from a GPU to the host, and there is no GPU")
        return DynamicCache(config=model.config, offloading=True)
    return QuantizedCache(backend=name.removeprefix("quantized-"), config=model.config, nbits=4)


class Worker:
    """Holds the model and answers requests."""

    model: Any
    tokenizer: Any

    def load(self, *, model: str, dtype: str, threads: int) -> dict[str, Any]:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        load: Any = AutoModelForCausalLM.from_pretrained
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = load(model, dtype=getattr(torch, dtype)).to(device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        names = ("torch", "transformers", "kvpress", "kv-integration", "optimum-quanto", "hqq")
        return {name: found for name in names if (found := installed(name))}

    def run(
        self,
        *,
        side: str,
        kept: int,
        context: list[int],
        question: list[int],
        tokens: int,
        aware: bool,
    ) -> dict[str, Any]:
        """The context is compressed, with the question (`aware`) or before it; then `tokens` greedy
        tokens."""
        gc.collect()
        owner, _, name = side.partition(":")
        compressing: Any = contextlib.nullcontext()
        whole: Any = contextlib.nullcontext()
        prompt = [*context, *question] if aware else context
        try:
            if owner == "ours":
                whole, cache = ours(name, self.model, self.tokenizer, kept)
            elif owner == "kvpress":
                compressing, cache = kvpress(name, self.model, len(prompt), kept)
            else:
                cache = transformers_cache(name, self.model)
        except (ImportError, LookupError) as error:
            return {"unavailable": str(error)}
        device = self.model.device
        read, asked = (torch.tensor([ids], device=device) for ids in (prompt, question))
        position = torch.arange(len(prompt), len(prompt) + len(question) + tokens, device=device)
        with torch.no_grad(), whole:
            wait()
            start = time.perf_counter()
            with compressing:
                logits = self.model(read, past_key_values=cache, logits_to_keep=1).logits
            ids, at, new = asked, 0, []
            if aware:
                ids = logits[:, -1:].argmax(-1)
                new.append(int(ids))
            wait()
            prefill = time.perf_counter() - start
            held = sorted(entries(cache))
            times = [time.perf_counter()]
            while len(new) < tokens:
                logits = self.model(
                    ids,
                    past_key_values=cache,
                    position_ids=position[None, at : at + ids.shape[1]],
                    logits_to_keep=1,
                ).logits
                at += ids.shape[1]
                ids = logits[:, -1:].argmax(-1)
                new.append(int(ids))
                times.append(time.perf_counter())
            steps = [after - before for before, after in pairwise(times)]
            asking = 0 if aware else 1  # the first pass reads the question
            return {
                "tokens": new,
                "ttft_s": prefill + sum(steps[:asking]),
                "steps_s": steps[asking:],
                "live_bytes": live_bytes(cache),
                "kept": held,
            }


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def entries(cache: Any) -> Iterator[int]:
    """Entries per KV head that each layer holds after the context."""
    if hasattr(cache, "report"):
        yield from (layer.entries_attended for layer in cache.report().layers)
        return
    for layer in cache.layers:
        yield layer.get_seq_length()


def live_bytes(cache: Any) -> int:
    """Bytes of all tensors that a cache holds, wherever they are."""
    if hasattr(cache, "report"):
        report = cache.report()
        return int(report.device_bytes + report.host_bytes)
    found: dict[int, int] = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            _collect(value, found)
    return sum(found.values())


def _collect(value: Any, found: dict[int, int]) -> None:
    if isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        _collect(list(value.values()), found)
    elif isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        # a quantized tensor is made of plain ones
        _collect([getattr(value, name) for name in value.__tensor_flatten__()[0]], found)
    elif isinstance(value, Tensor) and value.numel():
        storage = value.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()


def main() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no reply
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        reply = getattr(worker, request.pop("op"))(**request)
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
