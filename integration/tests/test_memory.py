"""Memory is real: reports equal the tensors that exist, and what was evicted is gone."""

from __future__ import annotations

import gc

import pytest
import torch
from cases import FORGETS_ON, RECOMPRESSES, ROOMY, SMALL, each, in_families
from families import SHAPE, generate, llama, prompt, shared
from live import Watch, storages
from torch.multiprocessing.reductions import StorageWeakRef

from kv_integration import (
    D2O,
    H2O,
    TOVA,
    CaM,
    ChunkKV,
    FullKV,
    InfiniGen,
    Loki,
    PyramidKV,
    Quest,
    SABlock,
    SeKV,
    SemantiCache,
    SentenceKV,
    ShadowKV,
    ShadowKVPlus,
    SnapKV,
    StreamingLLM,
    attach,
)
from kv_integration.layer import CompressedLayer, SlidingLayer

TOKENS = 600
LONG = {
    "full": FullKV(),
    "sentencekv": SentenceKV(budget=40),
    "semanticache": SemantiCache(budget=200),
    "sablock": SABlock(budget=40),
    "shadowkv": ShadowKV(budget=40, window=8, rank=16),
    "shadowkvplus": ShadowKVPlus(budget=40, window=8, rank=16, recent=8),
    "sekv": SeKV(budget=80, window=16, sinks=1, max_rank=8),
    "streamingllm": StreamingLLM(budget=40),
    "h2o": H2O(budget=40),
    "tova": TOVA(budget=40),
    "snapkv": SnapKV(budget=40),
    "pyramidkv": PyramidKV(budget=40),
    "chunkkv": ChunkKV(budget=40),
    "cam": CaM(budget=40),
    "d2o": D2O(budget=40),
    "quest": Quest(budget=40),
    "loki": Loki(budget=40),
    "infinigen": InfiniGen(budget=40),
}
# Methods that hold all of the prompt somewhere.
WHOLE = ("shadowkv", "shadowkvplus", "quest", "loki", "infinigen")
ENTRY = 2 * 16 * 4  # bytes of one key and one value in float32


@pytest.fixture(autouse=True)
def quick_collection():
    """Collections look at what a test makes, not at all the modules that were imported before."""
    gc.freeze()
    yield
    gc.unfreeze()


def told(cache) -> int:
    report = cache.report()
    return report.device_bytes + report.host_bytes + report.disk_bytes


@each(LONG)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_report_counts_the_tensors_that_exist(family, tokenizer, method):
    model = shared(family)
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(method)
        inputs = prompt(400, 250)
        out = model(**inputs, past_key_values=cache, logits_to_keep=1)
        del out
        assert told(cache) == pytest.approx(sum(storages(cache).values()), rel=0.01)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
        for _ in range(3):
            model(torch.tensor([[5], [6]]), attention_mask=mask, past_key_values=cache)
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        assert told(cache) == pytest.approx(sum(storages(cache).values()), rel=0.01)
    report = cache.report()
    kv_heads = 2 * ENTRY
    full = 2 * 403 * (2 if family == "gemma3" else 3) * kv_heads
    compressed = sum(x.full_kv_bytes for x in report.layers if x.kind == "compressed")
    assert compressed == full
    assert (report.prompt_tokens, report.tokens_seen) == (400, 403)


@pytest.mark.parametrize(
    ("method", "options"),
    [(method, {}) for method in LONG.values()]
    + [(LONG[name], {"recompress_after": 8}) for name in RECOMPRESSES],
    ids=[*LONG, *(f"{name}-recompressed" for name in RECOMPRESSES)],
)
def test_the_bytes_that_a_process_holds_are_the_reports(tokenizer, method, options):
    """Every storage that any operation made and that is still alive, wherever it hides."""
    model = shared("llama")
    with attach(model, tokenizer) as kv, torch.no_grad():
        model(**prompt(8), past_key_values=kv.cache(method))  # whatever is made once
        cache, inputs = kv.cache(method, **options), prompt(TOKENS)
        gc.collect()
        with Watch() as watch:
            model(**inputs, past_key_values=cache, logits_to_keep=1)
            gc.collect()
            assert watch.live() == pytest.approx(told(cache), rel=0.01)
            for token in range(12):
                model(torch.tensor([[token]]), past_key_values=cache)
            gc.collect()
            assert watch.live() == pytest.approx(told(cache), rel=0.01)
            whole = watch.live()
            assert whole > 0
            cache.reset()
            gc.collect()
            assert watch.live() <= 0.01 * whole


@in_families(LONG, families=["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("chunk", [None, 128])
def test_nothing_keeps_the_prompt_alive(family, tokenizer, method, chunk, monkeypatch):
    made: list[StorageWeakRef] = []
    model = shared(family)
    attend, update = CompressedLayer.attend, SlidingLayer.update

    def updating(layer, keys, values, *more, **options):
        states = update(layer, keys, values, *more, **options)
        made.extend(StorageWeakRef(x.untyped_storage()) for x in (keys, values, *states))
        return states

    def remembering(layer, queries, keys, values, **options):
        made.extend(StorageWeakRef(x.untyped_storage()) for x in (queries, keys, values))
        return attend(layer, queries, keys, values, **options)

    monkeypatch.setattr(CompressedLayer, "attend", remembering)
    monkeypatch.setattr(SlidingLayer, "update", updating)
    ids = prompt(450)["input_ids"]
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(method, prompt_length=450)
        for part in ids.split(chunk or 450, dim=1):
            model(part, past_key_values=cache, logits_to_keep=1)
        gc.collect()
        assert made
        assert all(storage.expired() for storage in made)


@each(LONG, but=["full", "semanticache", "sekv", *WHOLE])
def test_memory_is_what_the_budget_says(tokenizer, method):
    model = shared("llama")
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(method)
        model(**prompt(TOKENS), past_key_values=cache, logits_to_keep=1)
        layers = cache.report().layers
    # 40 entries in two heads; room for 64 more, or a score and a position; sentence means
    for layer in layers:
        assert layer.device_bytes <= 2 * ENTRY * (
            40 * (3 if method.name == "pyramidkv" else 1) + 64
        )
    assert sum(x.device_bytes + x.host_bytes for x in layers) < 0.5 * 3 * TOKENS * 2 * ENTRY


@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize("method", [SemantiCache(theta=0.3), SemantiCache(budget=0.6)], ids=str)
def test_unequal_heads_are_stored_without_padding(tokenizer, method, track):
    model, options = shared("llama"), {"recompress_after": 100} if track else {}
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(method, **options)
        model(**prompt(400, 250), past_key_values=cache, logits_to_keep=1)
        states = [layer.state for layer in cache.compressed]
    for state in states:
        lengths = state.entries()
        assert len(lengths.unique()) > 1
        entries = int(lengths.sum())
        size = entries * (ENTRY + 4 + 8 * track) + 4 * (8 + 4)
        assert state.nbytes()["device"] == size
        assert sum(storages(state).values()) == size


@each(LONG, but=["sekv"])  # which needs the whole forward pass before it can compress
def test_while_a_layer_is_filled_those_before_it_are_compressed(tokenizer, method):
    """Peak of a prefill: as without any cache, one layer whole, and what is left of the others."""
    torch.manual_seed(0)
    model = llama(num_hidden_layers=6)().eval()
    inputs, live = prompt(TOKENS), []

    def note(*_):
        live.append(watch.live())

    with attach(model, tokenizer) as kv, torch.no_grad():
        model(**inputs, past_key_values=kv.cache(method))
        hooks = [layer.self_attn.register_forward_pre_hook(note) for layer in model.model.layers]
        with Watch() as watch:
            model(**inputs, use_cache=False)
        bare = list(live)
        live.clear()
        cache = kv.cache(method)
        with Watch() as watch:
            model(**inputs, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    done, report = cache.plan.nbytes, cache.report()
    for number, layer in enumerate(report.layers):
        # less the mask of [T, T], which a model without a cache makes
        extra = live[number] - bare[number]
        assert extra <= 1.02 * done + 1024, (number, extra, done)
        done += layer.device_bytes + layer.host_bytes


@each(SMALL, FORGETS_ON)
def test_what_goes_on_forgetting_never_grows(tokenizer, method):
    model = shared("llama")
    with attach(model, tokenizer) as kv:
        cache = kv.cache(method)
        generate(model, prompt(40, 20), cache, new=2)
        before = told(cache)
        generate_more(model, cache, 60)
        assert told(cache) == before
        assert cache.report().entries_attended == 12


def generate_more(model, cache, steps):
    seen = cache.get_seq_length()
    mask = torch.ones(2, seen, dtype=torch.long)
    with torch.no_grad():
        for _ in range(steps):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
            model(torch.tensor([[5], [6]]), attention_mask=mask, past_key_values=cache)


def test_a_buffer_is_made_for_what_is_granted_not_for_the_whole_budget(tokenizer):
    """They count what is generated: their slots are made at once."""
    model = shared("llama")
    with attach(model, tokenizer) as kv:
        for method, slot in (
            (StreamingLLM(budget=ROOMY), ENTRY),
            (H2O(budget=ROOMY), ENTRY + 12),
            (TOVA(budget=ROOMY), ENTRY + 2),
        ):
            cache = kv.cache(method)
            generate(model, prompt(40), cache)
            assert cache.report().device_bytes == SHAPE["num_hidden_layers"] * 2 * ROOMY * slot
