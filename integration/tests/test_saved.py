"""A cache goes on from its file as if nothing had been, or says why it cannot."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from cases import RECOMPRESSES, SMALL, each
from families import build, generate, prompt, shared

from kv_integration import FullKV, Loki, SABlock, SeKV, SnapKV, attach, loki_bases
from kv_integration.kept import Kept
from kv_integration.router import Router
from kv_integration.settings import describe
from kv_offload import (
    AlteredFileError,
    CacheFileError,
    FingerprintError,
    ForeignFileError,
    TruncatedFileError,
)


def go_on(model, cache, mask, *, steps=6):
    """Logits of the same tokens after what the cache holds, the last ones several at once."""
    batch, logits = len(mask), []
    for step, new in enumerate([1] * steps + [5, 1]):
        ids = torch.full((batch, new), 7 + step) + torch.arange(batch)[:, None]
        mask = torch.cat([mask, torch.ones(batch, new, dtype=torch.long)], 1)
        place = (mask.cumsum(1) - 1)[:, -new:]
        out = model(ids, attention_mask=mask, position_ids=place, past_key_values=cache)
        logits.append(out.logits)
    return logits


def begun(kv, method, lengths, **options):
    """A cache after a prompt and three tokens, and the mask of what it saw."""
    cache, inputs = kv.cache(method, **options), prompt(*lengths)
    tokens, _ = generate(kv.model, inputs, cache, new=4)
    ones = torch.ones(len(tokens), 3, dtype=torch.long)
    return cache, torch.cat([inputs["attention_mask"], ones], 1)


@each(SMALL)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("lengths", [(40,), (40, 22)], ids=str)
def test_a_loaded_cache_goes_on_as_the_saved_one(tokenizer, family, method, lengths, tmp_path):
    model = shared(family)
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache, mask = begun(kv, method, lengths)
        cache.save(tmp_path / "cache")
        loaded = kv.load(tmp_path / "cache", method)
        report, again = cache.report(), loaded.report()
        assert again.prompt_tokens == report.prompt_tokens
        assert again.tokens_seen == report.tokens_seen == loaded.get_seq_length()
        assert again.entries_attended == report.entries_attended
        # What grows has room to do so, which no file holds: ShadowKV+ on the host, too.
        assert again.device_bytes <= report.device_bytes
        grown = method.name == "shadowkvplus" and again.host_bytes < report.host_bytes
        assert again.host_bytes == report.host_bytes or grown
        assert again.bytes_moved == report.bytes_moved
        assert again.hit_rate == report.hit_rate
        for ours, wanted in zip(go_on(model, loaded, mask), go_on(model, cache, mask), strict=True):
            assert torch.equal(ours, wanted)
        # and the file is as it was
        again = kv.load(tmp_path / "cache", method)
        assert again.report().tokens_seen == report.tokens_seen


@each(SMALL, RECOMPRESSES)
def test_it_goes_on_compressing(tokenizer, method, tmp_path):
    model = shared("llama")
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache, mask = begun(kv, method, (40, 22), recompress_after=4)
        cache.save(tmp_path / "cache")
        loaded = kv.load(tmp_path / "cache", method)
        assert loaded.recompress_after == 4
        for ours, wanted in zip(go_on(model, loaded, mask), go_on(model, cache, mask), strict=True):
            assert torch.equal(ours, wanted)
        assert all(layer.since <= 6 for layer in loaded.compressed)


@each(SMALL, ("sentencekv", "shadowkv", "shadowkvplus", "sekv"))
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_lies_on_a_tier_lies_there_again(tokenizer, method, tier, tmp_path):
    model, method = shared("llama"), dataclasses.replace(method, tier=tier)
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache, mask = begun(kv, method, (40, 22))
        cache.batch_repeat_interleave(2)
        mask = mask.repeat_interleave(2, 0)
        cache.save(tmp_path / "cache")
        loaded = kv.load(tmp_path / "cache", method)
        held = getattr(loaded.report(), f"{tier}_bytes")
        wanted = getattr(cache.report(), f"{tier}_bytes")
        assert held == wanted > 0 or (method.name == "shadowkvplus" and 0 < held < wanted)
        for ours, wanted in zip(go_on(model, loaded, mask), go_on(model, cache, mask), strict=True):
            assert torch.equal(ours, wanted)


@each(SMALL)
def test_in_bfloat16_and_where_rows_share_a_prompt_bits_stay(tokenizer, method, tmp_path):
    model = shared("llama", torch.bfloat16)
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache, mask = begun(kv, method, (40, 22))
        rows = torch.tensor([1, 0, 1])
        cache.batch_select_indices(rows)
        cache.save(tmp_path / "cache")
        loaded, mask = kv.load(tmp_path / "cache", method), mask[rows]
        for ours, wanted in zip(go_on(model, loaded, mask), go_on(model, cache, mask), strict=True):
            assert torch.equal(ours, wanted)


@pytest.mark.parametrize(
    "method",
    [
        dataclasses.replace(SMALL["shadowkv"], fp8=True),
        dataclasses.replace(SMALL["shadowkvplus"], fp8=True),
        dataclasses.replace(SMALL["sentencekv"], retrieve="sentence", sentences="punkt"),
        dataclasses.replace(SMALL["infinigen"], offload=False, alpha=2.0),
        dataclasses.replace(SMALL["quest"], offload=True),
        dataclasses.replace(SMALL["sekv"], max_rank=0),
        SeKV(budget=1.0),
    ],
    ids=["fp8", "plus-fp8", "punkt", "alpha", "offload", "rank-0", "no-spans"],
)
def test_what_a_setting_brings_comes_back(tokenizer, method, tmp_path):
    model = shared("llama")
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache, mask = begun(kv, method, (40, 22))
        cache.save(tmp_path / "cache")
        loaded = kv.load(tmp_path / "cache", method)
        for ours, wanted in zip(go_on(model, loaded, mask), go_on(model, cache, mask), strict=True):
            assert torch.equal(ours, wanted)


def test_what_comes_later_can_be_taken_back_after_loading_too(tokenizer, tmp_path):
    """Tokens from before the file as well as from after it."""
    model = shared("llama")
    for method in (SMALL[name] for name in ("sentencekv", "shadowkvplus", "sekv", "loki")):
        with attach(model, tokenizer) as kv, torch.no_grad():
            cache, mask = begun(kv, method, (40, 22))
            cache.save(tmp_path / "cache")
            loaded = kv.load(tmp_path / "cache", method)
            for one in (cache, loaded):
                one.crop(-1)
            mask = mask[:, :-1]
            logits = zip(go_on(model, loaded, mask), go_on(model, cache, mask), strict=True)
            assert all(torch.equal(ours, wanted) for ours, wanted in logits)


def test_layers_share_their_rope_tables_again(tokenizer, tmp_path):
    model, method = shared("llama"), SMALL["shadowkvplus"]
    with attach(model, tokenizer) as kv:
        cache, _ = begun(kv, method, (40, 22))
        cache.save(tmp_path / "cache")
        loaded = kv.load(tmp_path / "cache", method)
    assert len(loaded.ropes) == len(cache.ropes) == 1
    for layer in loaded.compressed:
        assert layer.rope is layer.state.rope is loaded.ropes[0]


@pytest.fixture
def routed(tokenizer, tmp_path):
    """A model, its router, SeKV with it, and the file of a cache."""
    model = build("llama")
    router = Router.for_model(model, routing_dim=4, max_rank=4)
    method = dataclasses.replace(SMALL["sekv"], router=router, threshold=0.3)
    with attach(model, tokenizer) as kv:
        begun(kv, method, (40, 22))[0].save(tmp_path / "cache")
    return model, router, method, tmp_path / "cache"


def test_a_router_is_the_same_if_its_numbers_are(routed, tokenizer, tmp_path):
    model, router, method, file = routed
    router.save(tmp_path / "router", model=model)
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache, mask = begun(kv, method, (40, 22))
        expected = go_on(model, cache, mask)
        for given in (router, copy.deepcopy(router), tmp_path / "router", str(tmp_path / "router")):
            loaded = kv.load(file, dataclasses.replace(method, router=given))
            assert loaded.report().device_bytes <= cache.report().device_bytes
            for layer in loaded.compressed:
                own = loaded.method.router.projections
                held = layer.state.routing.projection
                assert held.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
            for ours, wanted in zip(go_on(model, loaded, mask), expected, strict=True):
                assert torch.equal(ours, wanted)


def test_another_router_is_refused(routed, tokenizer):
    model, router, method, file = routed
    other = copy.deepcopy(router)
    with torch.no_grad():
        other.predictor.leave.bias[0] += 1e-3
    with attach(model, tokenizer) as kv, pytest.raises(CacheFileError) as error:
        kv.load(file, dataclasses.replace(method, router=other))
    ours, theirs = describe(method), describe(dataclasses.replace(method, router=other))
    assert ours != theirs
    assert f"was saved with method {ours}, wanted {theirs}" in str(error.value)


def test_bases_from_other_text_are_a_setting(tokenizer, tmp_path):
    model = shared("llama")
    with attach(model, tokenizer) as kv, torch.no_grad():
        bases = loki_bases(begun(kv, Loki(budget=12), (60,))[0])
        method = Loki(budget=12, bases=bases)
        cache, mask = begun(kv, method, (40, 22))
        cache.save(tmp_path / "cache")
        loaded = kv.load(tmp_path / "cache", Loki(budget=12, bases=tuple(x.clone() for x in bases)))
        for ours, wanted in zip(go_on(model, loaded, mask), go_on(model, cache, mask), strict=True):
            assert torch.equal(ours, wanted)
        changed = (bases[0].nextafter(bases[0] + 1), *bases[1:])
        for other in (None, changed):
            with pytest.raises(CacheFileError, match="was saved with method Loki"):
                kv.load(tmp_path / "cache", Loki(budget=12, bases=other))


def test_a_later_process_may_turn_the_conversation(tokenizer, tmp_path):
    """The model is built and attached anew; `generate` takes the whole conversation."""
    method, inputs = SABlock(budget=12, window=4), prompt(30)
    one = build("llama")
    with attach(one, tokenizer) as kv:
        cache = kv.cache(method)
        tokens, _ = generate(one, inputs, cache, new=4)
        cache.save(tmp_path / "cache")
        longer = {"input_ids": torch.cat([tokens, prompt(9, seed=3)["input_ids"]], 1)}
        expected = generate(one, longer, cache)[1]
    other = build("llama")
    with attach(other, tokenizer) as kv:
        loaded = kv.load(tmp_path / "cache", method)
        assert torch.equal(generate(other, longer, loaded)[1], expected)


@pytest.fixture
def saved(tokenizer, tmp_path):
    """A model, and the file of a cache of its."""
    model = build("llama")
    with attach(model, tokenizer) as kv:
        begun(kv, SABlock(budget=12), (30,))[0].save(tmp_path / "cache")
    return model, tmp_path / "cache"


def test_files_of_others_are_refused_by_name(saved, tokenizer):
    model, file = saved
    for other, error, text in (
        (build("llama", seed=1), FingerprintError, "was made for the model 'LlamaForCausalLM-"),
        (
            build("llama", torch.bfloat16),
            CacheFileError,
            "dtype torch.float32, wanted torch.bf",
        ),
    ):
        with attach(other, tokenizer) as kv, pytest.raises(error, match=text):
            kv.load(file, SABlock(budget=12))
    with attach(model, tokenizer) as kv:
        for other in (SnapKV(budget=12), SABlock(budget=13), FullKV()):
            with pytest.raises(CacheFileError) as error:
                kv.load(file, other)
            text = f"was saved with method {SABlock(budget=12)!r}, wanted {other!r}"
            assert text in str(error.value)


def test_broken_files_are_refused_by_name(saved, tokenizer, tmp_path):
    model, file = saved
    whole = file.read_bytes()
    changed = bytearray(whole)
    changed[-3] ^= 1
    with attach(model, tokenizer) as kv:
        for content, error in (
            (b"this is no file of a cache", ForeignFileError),
            (whole[:-9], TruncatedFileError),
            (bytes(changed), AlteredFileError),
        ):
            file.write_bytes(content)
            with pytest.raises(error):
                kv.load(file, SABlock(budget=12))
        with pytest.raises(FileNotFoundError):
            kv.load(tmp_path / "nothing", SABlock(budget=12))
        file.write_bytes(whole)
        kv.load(file, SABlock(budget=12))


@dataclasses.dataclass(frozen=True)
class Strange(FullKV):
    """Full KV with a state of its own that nobody said how to store."""

    def compress(self, rows, plan):
        state = super().compress(rows, plan)
        state.__class__ = type("StrangeState", (Kept,), {})
        return state


def test_what_cannot_be_saved_says_so_and_keeps_the_old_file(saved, tokenizer):
    model, file = saved
    before = file.read_bytes()
    with attach(model, tokenizer) as kv, torch.no_grad():
        text = "cache of full cannot be saved: layers.0.state is a StrangeState, which cannot be s"
        with pytest.raises(ValueError, match=text):
            begun(kv, Strange(), (30,))[0].save(file)
        with pytest.raises(ValueError, match="no whole prompt in this cache"):
            kv.cache(FullKV()).save(file)
        part = kv.cache(FullKV(), prompt_length=50)
        model(**prompt(30), past_key_values=part)
        with pytest.raises(ValueError, match="no whole prompt in this cache"):
            part.save(file)
        with pytest.raises(OSError, match="cache not saved"):
            begun(kv, FullKV(), (30,))[0].save(file / "below")
    assert file.read_bytes() == before
