"""What cannot be attached or done says so, names the reason and changes nothing."""

from __future__ import annotations

import pytest
import torch
from families import SHAPE, build, generate, prompt
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kv_integration import FullKV, SABlock, SentenceKV, attach

EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
REFUSED = {
    "latent": (
        lambda: DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **{k: v for k, v in SHAPE.items() if k != "head_dim"}
                | {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1},
                q_lora_rank=8,
                kv_lora_rank=8,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=16,
                moe_intermediate_size=16,
            )
        ),
        "latent cache",
    ),
    "softcap": (lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE)), "caps the logits"),
    "sinks": (lambda: GptOssForCausalLM(GptOssConfig(**SHAPE | EXPERTS)), "sink logits"),
    "linear": (
        lambda: MambaForCausalLM(
            MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, state_size=4)
        ),
        "MambaForCausalLM cannot be attached",
    ),
    "encoder-decoder": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=96, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
        ),
        "encoder-decoder",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_be_held_are_refused_by_name(kind, tokenizer):
    make, reason = REFUSED[kind]
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=reason):
        attach(model, tokenizer)
    assert model.config._attn_implementation == before
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_attaching_twice_is_refused_and_leaves_the_first(tokenizer):
    model = build("llama")
    with attach(model, tokenizer) as kv:
        with pytest.raises(ValueError, match="attached already"):
            attach(model, tokenizer)
        generate(model, prompt(20), kv.cache(FullKV()))


def test_what_is_no_model_or_method_is_refused(tokenizer):
    with pytest.raises(TypeError, match="PreTrainedModel, got str"):
        attach("llama", tokenizer)
    with attach(build("llama"), tokenizer) as kv:
        with pytest.raises(TypeError, match="kv_integration method"):
            kv.cache("sablock")
        with pytest.raises(ValueError, match="prompt_length must be at least 1, got 0"):
            kv.cache(FullKV(), prompt_length=0)


@pytest.mark.parametrize("method", [SABlock(budget=8), SentenceKV(budget=8)], ids=lambda m: m.name)
def test_punctuation_needs_the_tokenizer(method):
    model = build("llama")
    with attach(model) as kv, pytest.raises(ValueError, match=r"use attach\(model, tokenizer\)"):
        generate(model, prompt(20), kv.cache(method))


def test_a_cache_outside_its_block_says_so(tokenizer):
    model = build("llama")
    with attach(model, tokenizer) as kv:
        cache = kv.cache(FullKV())
    with pytest.raises(ValueError, match="not attached"):
        generate(model, prompt(20), cache)


def test_padding_on_the_right_is_refused(tokenizer):
    model = build("llama")
    inputs = prompt(20, 20)
    inputs["attention_mask"][0, -3:] = 0
    with attach(model, tokenizer) as kv, pytest.raises(ValueError, match="zeros on the left"):
        model(**inputs, past_key_values=kv.cache(FullKV()))


def test_an_empty_row_is_refused(tokenizer):
    inputs = prompt(20, 20)
    inputs["attention_mask"][1] = 0
    with attach(build("llama"), tokenizer) as kv, pytest.raises(ValueError, match="without any"):
        kv.model(**inputs, past_key_values=kv.cache(FullKV()))


def test_more_tokens_than_the_prompt_was_said_to_have_lose_nothing(tokenizer):
    ids = prompt(20)["input_ids"]
    with attach(build("llama"), tokenizer) as kv, torch.no_grad():
        cache = kv.cache(FullKV(), prompt_length=15)
        kv.model(ids[:, :10], past_key_values=cache)
        with pytest.raises(ValueError, match="prompt_length is 15, but 20 tokens"):
            kv.model(ids[:, 10:], past_key_values=cache)
        kv.model(ids[:, 10:15], past_key_values=cache)
        assert cache.get_seq_length() == 15


def test_a_mask_of_its_own_is_refused(tokenizer):
    inputs = {"input_ids": prompt(4)["input_ids"], "attention_mask": torch.ones(1, 1, 4, 4).bool()}
    with (
        attach(build("llama"), tokenizer) as kv,
        pytest.raises(ValueError, match=r"\[1, 1, 4, 4\]"),
    ):
        kv.model(**inputs, past_key_values=kv.cache(FullKV()))


def test_embeddings_instead_of_ids_are_refused(tokenizer):
    with attach(build("llama"), tokenizer) as kv, pytest.raises(ValueError, match="inputs_embeds"):
        kv.model(inputs_embeds=torch.zeros(1, 4, 64), past_key_values=kv.cache(FullKV()))


def test_sentencekv_does_not_pretend_to_crop(tokenizer):
    model = build("llama")
    with attach(model, tokenizer) as kv:
        cache = kv.cache(SentenceKV(budget=8))
        generate(model, prompt(20), cache)
        with pytest.raises(ValueError, match="SentenceKV cannot crop"):
            cache.crop(-1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"keep": 0.5}, "keep must be at least 1, got 0.5"),
        ({"retrieve": "token"}, "retrieve must be 'step' or 'sentence', got 'token'"),
        ({"pooling": "sum"}, "pooling must be 'none', 'avg' or 'max', got 'sum'"),
        ({"kernel": 4}, "kernel must be odd and at least 1, got 4"),
        ({"tier": "cloud"}, "tier must be 'host' or 'disk', got 'cloud'"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        SentenceKV(**options)
