"""How a model's layers turn their keys is found by trying; its tables are held once."""

from __future__ import annotations

import weakref

import pytest
import torch
from families import SHAPE, build, full_kv, generate, prompt, shared
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
)

from kv_integration import FullKV, ShadowKV, ShadowKVPlus, attach
from kv_integration.rope import RopeTables, Rotation, Turn, rotation_of, spread
from kv_lowrank import unrotate

HALF, GLM = Rotation("half", "half"), Rotation("interleaved", "half")
FOUND = {
    "llama": [HALF] * 3,
    "yarn": [HALF] * 3,
    "gpt-neox": [HALF] * 3,
    "glm4": [GLM] * 3,
    "gemma3": [HALF] * 2,  # the first layer has a window: nobody asks
    "cohere2": [None, None],
    "smollm3": [HALF, None, HALF],
}


@pytest.mark.parametrize("family", FOUND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_layers_way_is_found(family, dtype, tokenizer):
    model = shared(family, dtype)
    state = torch.random.get_rng_state()
    with attach(model, tokenizer) as kv:
        model(**prompt(5), past_key_values=kv.cache(ShadowKV()))
        assert list(kv.context.rotations.values()) == FOUND[family]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_pairs_and_tables_may_both_be_interleaved(tokenizer):
    torch.manual_seed(0)
    model = CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=1.0)).eval()
    expected = generate(model, prompt(40, 21), None)[1]
    with attach(model, tokenizer) as kv:
        ours = generate(model, prompt(40, 21), kv.cache(ShadowKV(budget=1.0, window=4)))[1]
        assert set(kv.context.rotations.values()) == {Rotation("interleaved", "interleaved")}
    torch.testing.assert_close(ours, expected, atol=5e-5, rtol=2e-4)


def test_keys_that_are_more_than_turned_are_refused(tokenizer):
    """HunYuan normalises its keys after RoPE, each channel with a weight of its own."""
    torch.manual_seed(0)
    model = HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**SHAPE)).eval()
    for name, weight in model.named_parameters():
        if "layernorm" in name:
            nn.init.uniform_(weight, 0.2, 3.0)
    with attach(model, tokenizer) as kv:
        cache = kv.cache(ShadowKV())
        with pytest.raises(ValueError, match="HunYuanDenseV1Attention does not turn its keys in"):
            generate(model, prompt(40), cache)
        generate(model, prompt(40), kv.cache(FullKV()))


class Attention(nn.Module):
    """Stands for a family of which no keys reach the cache."""

    layer_idx = 0

    def forward(self, hidden_states, position_embeddings, past_key_values):
        return hidden_states


def test_a_module_that_stores_nothing_is_refused():
    hidden = torch.zeros(1, 3, 8)
    tables = torch.ones(1, 3, 4), torch.zeros(1, 3, 4)
    given = {"hidden_states": hidden, "position_embeddings": tables, "past_key_values": None}
    with pytest.raises(ValueError, match="Attention stores no keys in its cache"):
        rotation_of(Attention(), (), given, object())


@given(st.data())
def test_tables_are_those_of_each_rows_own_tokens(data):
    """Whatever the padding, the parts a prompt comes in, the rows chosen and the tokens cropped."""
    rotation = data.draw(st.sampled_from([HALF, GLM, Rotation("interleaved", "interleaved")]))
    batch, width = data.draw(st.integers(1, 3)), 2 * data.draw(st.integers(1, 3))
    tables, rows = None, [[] for _ in range(batch)]
    for _ in range(data.draw(st.integers(1, 5))):
        action = data.draw(st.sampled_from(["append", "padded", "crop", "select"]))
        if action in ("append", "padded") or tables is None:
            count = data.draw(st.integers(1, 4))
            shared_rows = action == "append" and data.draw(st.booleans())
            pairs = torch.rand(1 if shared_rows else len(rows), count, width // 2)
            cos, sin = (spread(x, rotation.table) for x in (pairs.cos(), pairs.sin()))
            if tables is None:
                turn = Turn(weakref.ref(cos), cos, sin, rotation)
                tables = RopeTables(turn, torch.device("cpu"), grows=True)
            valid = None
            skip = [0] * len(rows)
            if action == "padded":
                skip = [data.draw(st.integers(0, count)) for _ in rows]
                valid = torch.tensor([[i >= s for i in range(count)] for s in skip])
            tables.append(cos, sin, valid, batch=len(rows))
            for row, s in enumerate(skip):
                rows[row] = rows[row] + list(pairs[0 if shared_rows else row, s:])
        elif action == "crop":
            count = data.draw(st.integers(0, min(len(row) for row in rows)))
            tables.crop(count)
            rows = [row[: len(row) - count] for row in rows]
        else:
            order = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=3))
            tables.select_rows(torch.tensor(order))
            rows = [rows[row] for row in order]
    for index, row in enumerate(rows):
        cos, sin = tables.row(index, slice(None))
        assert cos.shape == sin.shape == (1, len(row), width)
        for n, pairs in enumerate(row):
            assert torch.equal(cos[0, n], spread(pairs.cos(), rotation.layout))
            assert torch.equal(tables.sin[index, n], spread(pairs.sin(), rotation.layout))


@pytest.mark.parametrize("method", [ShadowKV(budget=20), ShadowKVPlus(budget=20)], ids=str)
@pytest.mark.parametrize("family", ["llama", "glm4", "smollm3", "gemma3"])
def test_layers_share_one_copy_that_the_report_counts(family, tokenizer, method):
    model = shared(family)
    with attach(model, tokenizer) as kv:
        cache = kv.cache(method)
        generate(model, prompt(100), cache, new=5)
        (tables,) = cache.ropes
        report = cache.report()
        cache.reset()
        assert cache.ropes == []
    width = model.config.head_dim // (2 if family == "glm4" else 1)
    tokens = 104 if tables.grows else 100
    assert tables.cos.shape == (1, tokens, width)
    assert tables.nbytes >= 2 * tokens * width * 4
    assert report.device_bytes >= sum(x.device_bytes for x in report.layers) + tables.nbytes


def test_layers_with_tables_of_their_own_do_not_share(tokenizer):
    """Tables are made for each layer alone, in memory that the last one left; some are slower."""
    model = build("llama")
    rotary = model.model.rotary_emb

    def own(module, args, kwargs):
        """Tables of this layer alone, the same values as the model's."""
        kwargs["position_embeddings"] = tuple(x.clone() for x in kwargs["position_embeddings"])
        return args, kwargs

    def slower(module, args, kwargs):
        x = kwargs["position_embeddings"][0]
        place = torch.arange(100)[None, : x.shape[1]] if x.shape[1] > 1 else torch.tensor([[43]])
        kwargs["position_embeddings"] = rotary(x, place * 0.5)
        return args, kwargs

    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(slower if index % 2 else own, with_kwargs=True)
    expected = generate(model, prompt(40), full_kv(model), new=2)[1]
    with attach(model, tokenizer) as kv:
        cache = kv.cache(ShadowKV(budget=1.0, window=4))
        ours = generate(model, prompt(40), cache, new=2)[1]
        assert len(cache.ropes) == 3
    torch.testing.assert_close(ours, expected, atol=5e-5, rtol=2e-4)


def test_keys_before_rope_are_the_projections(tokenizer, monkeypatch):
    """What the method factors is what `k_proj` gave, in a padded batch that comes in chunks."""
    model, inputs, seen = shared("llama"), prompt(40, 23), []
    compress = ShadowKV.compress

    def remembering(self, rows, plan):
        seen.append([unrotate(r.keys, *r.rope.row(r.index, slice(r.tokens))) for r in rows])
        return compress(self, rows, plan)

    monkeypatch.setattr(ShadowKV, "compress", remembering)
    layer, given = model.model.layers[0], []
    hook = layer.self_attn.k_proj.register_forward_hook(lambda m, a, out: given.append(out))
    try:
        with attach(model, tokenizer) as kv:
            cache = kv.cache(ShadowKV(budget=20))
            generate(model, inputs, cache, new=1, prefill_chunk_size=16)
    finally:
        hook.remove()
    # the first two calls were the search for the way it turns
    plain = torch.cat([x for x in given if x.shape[1] in (16, 8) and len(x) == 2], 1)
    for row, length in enumerate((40, 23)):
        expected = plain[row, 40 - length :].unflatten(-1, (2, 16)).transpose(0, 1)
        torch.testing.assert_close(seen[0][row][0], expected, atol=1e-5, rtol=1e-4)
