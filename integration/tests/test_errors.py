"""What cannot be attached or done says so, names the reason and changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from cases import FORGETS_ON, SMALL, close, each
from families import SHAPE, build, full_kv, generate, prompt, shared
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kv_integration import (
    D2O,
    H2O,
    METHODS,
    CaM,
    ChunkKV,
    FullKV,
    InfiniGen,
    Loki,
    PyramidKV,
    Quest,
    SABlock,
    SemantiCache,
    SentenceKV,
    SnapKV,
    StreamingLLM,
    attach,
)

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
    "bart": (
        lambda: BartForConditionalGeneration(
            BartConfig(
                vocab_size=96,
                d_model=32,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=32,
                decoder_ffn_dim=32,
            )
        ),
        "encoder-decoder",
    ),
    "some layers linear": (
        lambda: BambaForCausalLM(
            BambaConfig(
                **SHAPE,
                attn_layer_indices=[1],
                mamba_n_heads=4,
                mamba_d_head=32,
                mamba_d_state=8,
                mamba_expand=2,
            )
        ),
        "only full and sliding-window attention are supported",
    ),
    "alibi": (
        lambda: BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=2)),
        "no exchangeable attention function",
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


def test_attention_that_turns_out_to_do_more_is_refused(tokenizer):
    """A family of tomorrow may hand its attention function something that is left out here."""
    model = build("llama")

    def capped(module, args, kwargs):
        return args, {**kwargs, "softcap": 50.0}

    hooks = [
        layer.self_attn.register_forward_pre_hook(capped, with_kwargs=True)
        for layer in model.model.layers
    ]
    with attach(model, tokenizer) as kv:
        with pytest.raises(ValueError, match="LlamaAttention asks its attention for 'softcap'"):
            generate(model, prompt(20), kv.cache(FullKV()))
        for hook in hooks:
            hook.remove()
        generate(model, prompt(20), kv.cache(FullKV()))


LATE = {
    "mask": (
        lambda: DogeForCausalLM(DogeConfig(**SHAPE)),
        "DogeAttention gives its attention a mask of its own",
    ),
    "twice": (
        lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**SHAPE)),
        "layers whose attention runs more than once are not supported",
    ),
}


@pytest.mark.parametrize("kind", LATE)
def test_what_shows_only_in_the_first_forward_is_refused_there(kind, tokenizer):
    make, reason = LATE[kind]
    model = make().eval()
    before = model(**prompt(20)).logits
    with attach(model, tokenizer) as kv:
        with pytest.raises(ValueError, match=reason):
            generate(model, prompt(20), kv.cache(FullKV()))
        assert torch.equal(model(**prompt(20)).logits, before)


def test_attention_of_an_unknown_kind_is_refused():
    model = build("llama")
    model.model.layers[1].self_attn = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"3 layers, but attention of a known kind only in \[0, 2"):
        attach(model)


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


def test_a_cache_of_another_model_is_refused(tokenizer):
    one, other, inputs = build("llama"), build("llama", seed=1), prompt(20)
    with attach(one, tokenizer) as kv, attach(other, tokenizer):
        cache = kv.cache(FullKV())
        with pytest.raises(ValueError, match="made for another model"):
            generate(other, inputs, cache)
        expected = generate(one, inputs, kv.cache(FullKV()))[1]
        assert torch.equal(generate(one, inputs, cache)[1], expected)


def test_two_models_of_one_config_are_told_apart(tokenizer):
    one = build("llama")
    other = type(one)(one.config).eval()
    with attach(one, tokenizer) as kv:
        cache = kv.cache(FullKV())
        with pytest.raises(ValueError, match="shares its config object, is attached already"):
            attach(other, tokenizer)
    with attach(other, tokenizer), pytest.raises(ValueError, match="made for another model"):
        generate(other, prompt(20), cache)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_second_prompt_with_a_different_batch_size_is_refused(tokenizer, rows):
    model = shared("llama")
    with attach(model, tokenizer) as kv:
        cache = kv.cache(SABlock(budget=8))
        tokens, _ = generate(model, prompt(20, 20), cache)
        text = f"input_ids has {rows} rows, but this cache holds a batch of 2; reset"
        longer = torch.cat([tokens, tokens])[:rows, [*range(26), 5, 6, 7]]
        for new in (prompt(*[30] * rows)["input_ids"], longer):
            with pytest.raises(ValueError, match=text):
                generate(model, {"input_ids": new}, cache)
        with pytest.raises(ValueError, match=text):
            model(prompt(*[5] * rows)["input_ids"], past_key_values=cache)
        assert cache.report().tokens_seen == 25
        cache.reset()
        generate(model, prompt(*[30] * rows), cache)


@pytest.mark.parametrize("tokens", [1, 12, 25])
def test_a_second_prompt_without_the_first_is_refused(tokenizer, tokens):
    model = shared("llama")
    with attach(model, tokenizer) as kv:
        cache = kv.cache(SABlock(budget=8))
        generate(model, prompt(20), cache)
        text = f"input_ids has {tokens} tokens, but this cache has seen 25: a later turn brings"
        with pytest.raises(ValueError, match=text):
            generate(model, prompt(tokens), cache)
        with pytest.raises(ValueError, match=text):
            model.generate(prompt(tokens)["input_ids"], past_key_values=cache, max_new_tokens=1)


@pytest.mark.parametrize("chunk", [None, 18])
def test_padding_on_the_right_is_refused(tokenizer, chunk):
    model = shared("llama")
    inputs = prompt(20, 20)
    good = inputs["attention_mask"].clone()
    inputs["attention_mask"][0, -3:] = 0
    with attach(model, tokenizer) as kv:
        cache = kv.cache(FullKV())
        with pytest.raises(ValueError, match="zeros on the left"):
            model(**inputs, past_key_values=cache)
        with pytest.raises(ValueError, match="zeros on the left"):
            generate(model, inputs, kv.cache(FullKV()), prefill_chunk_size=chunk)
        # nothing has happened to the cache
        inputs["attention_mask"] = good
        expected = generate(model, inputs, kv.cache(FullKV()))[1]
        assert torch.equal(generate(model, inputs, cache)[1], expected)


def test_an_empty_row_is_refused(tokenizer):
    inputs = prompt(20, 20)
    inputs["attention_mask"][1] = 0
    with attach(build("llama"), tokenizer) as kv, pytest.raises(ValueError, match="without any"):
        kv.model(**inputs, past_key_values=kv.cache(FullKV()))


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


def test_sentencekv_takes_back_what_it_remembers(tokenizer):
    model = build("llama")
    with attach(model, tokenizer) as kv:
        cache = kv.cache(SentenceKV(budget=8))
        generate(model, prompt(20), cache, new=70)
        before = cache.report()
        with pytest.raises(ValueError, match="cannot take back 65 tokens: 64 are remembered"):
            cache.crop(-65)
        assert cache.report() == before
        cache.crop(-64)
        assert cache.get_seq_length() == 20 + 69 - 64


WINDOWED = (SentenceKV, SABlock, SnapKV, PyramidKV, ChunkKV)


@pytest.mark.parametrize("method", WINDOWED, ids=lambda m: m.__name__)
@pytest.mark.parametrize("budget", [1, 2, 7, 8, 9])
def test_a_budget_smaller_than_the_window_and_one_shrinks_the_window(tokenizer, method, budget):
    """The latest tokens take a quarter of it; the prompt's logits and the count are as ever."""
    model = shared("llama")
    with attach(model, tokenizer) as kv:
        cache = kv.cache(method(budget=budget, window=8))
        logits = generate(model, prompt(40), cache)[1]
        layers = cache.report().layers
    assert torch.isfinite(logits).all()
    assert sum(layer.entries_attended for layer in layers) == 3 * budget


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("tokens", [1, 2, 5, 31])
def test_a_prompt_shorter_than_the_window_stays_whole(tokenizer, name, tokens):
    """No budget given: 1024 entries, more than there is to compress."""
    model, inputs = shared("llama"), prompt(tokens)
    expected = generate(model, inputs, full_kv(model))[1]
    with attach(model, tokenizer) as kv:
        cache = kv.cache(METHODS[name]() if name != "semanticache" else SemantiCache(theta=1.0))
        close(generate(model, inputs, cache)[1], expected)
        entries = cache.report().entries_attended
    assert entries == tokens + (5 if name in FORGETS_ON else 0)


@each(SMALL)
def test_a_prompt_of_one_token(tokenizer, method):
    model = shared("llama")
    expected = generate(model, prompt(1), full_kv(model))[1]
    with attach(model, tokenizer) as kv:
        close(generate(model, prompt(1), kv.cache(method))[1], expected)


BUDGETED = [cls for cls in METHODS.values() if cls is not FullKV]


@pytest.mark.parametrize("method", BUDGETED, ids=lambda m: m.__name__)
@pytest.mark.parametrize("budget", [0, -1, 0.0, -0.1, 1.5, math.nan, math.inf])
def test_a_wrong_budget_is_refused(method, budget):
    with pytest.raises(ValueError, match=r"budget as a (number|share)"):
        method(budget=budget)


@pytest.mark.parametrize("method", BUDGETED, ids=lambda m: m.__name__)
@pytest.mark.parametrize("budget", ["10%", None, True])
def test_a_budget_of_a_wrong_type_is_refused(method, budget):
    with pytest.raises(TypeError, match=f"budget must be an int or a float, got {budget!r}"):
        method(budget=budget)


def test_full_kv_has_no_budget():
    with pytest.raises(TypeError, match="budget"):
        FullKV(budget=10)


WRONG = [
    *((cls, {"window": 0}, "window must be at least 1, got 0") for cls in WINDOWED),
    *(
        (cls, {"kernel": 4}, "kernel must be odd and at least 1, got 4")
        for cls in (SentenceKV, SABlock, SnapKV, PyramidKV)
    ),
    *(
        (cls, {"pooling": "sum"}, "pooling must be 'none', 'avg' or 'max', got 'sum'")
        for cls in (SentenceKV, SABlock, SnapKV, PyramidKV)
    ),
    *(
        (cls, {"recent": wrong}, rf"recent must be in \(0, 1\], got {wrong}")
        for cls in (H2O, CaM, D2O)
        for wrong in (0.0, 1.5, -1, math.nan)
    ),
    (SentenceKV, {"keep": 0.5}, "keep must be finite and at least 1, got 0.5"),
    (SentenceKV, {"keep": math.inf}, "keep must be finite and at least 1, got inf"),
    (SentenceKV, {"sentences": "words"}, "sentences must be 'punctuation' or 'punkt', got 'words'"),
    (SentenceKV, {"per": "head"}, "per must be 'layer' or 'kv_head', got 'head'"),
    (SentenceKV, {"group": "sum"}, "group must be 'mean' or 'max', got 'sum'"),
    (Quest, {"page": 0}, "page must be at least 1, got 0"),
    (Quest, {"whole_layers": -1}, "whole_layers must be at least 0, got -1"),
    (Loki, {"share": 0.0}, r"share must be in \(0, 1\], got 0.0"),
    (Loki, {"share": math.nan}, r"share must be in \(0, 1\], got nan"),
    (InfiniGen, {"share": 1.5}, r"share must be in \(0, 1\], got 1.5"),
    (InfiniGen, {"observe": 0}, "observe must be at least 1, got 0"),
    (InfiniGen, {"alpha": -1.0}, "alpha must be finite and at least 0, got -1.0"),
    (InfiniGen, {"alpha": math.inf}, "alpha must be finite and at least 0, got inf"),
    (SentenceKV, {"retrieve": "token"}, "retrieve must be 'step' or 'sentence', got 'token'"),
    (SentenceKV, {"tier": "cloud"}, "tier must be 'host' or 'disk', got 'cloud'"),
    (SemantiCache, {"theta": 1.5}, r"theta must be in \[-1, 1\], got 1.5"),
    (SemantiCache, {"theta": math.nan}, r"theta must be in \[-1, 1\], got nan"),
    (SemantiCache, {"chunks": "words"}, "chunks must be 'delimiters', 'fixed' or 'none', got 'wo"),
    (SemantiCache, {"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
    (SABlock, {"beta": -0.1}, "beta must be finite and at least 0, got -0.1"),
    (SABlock, {"lam": -1.0}, "lam must be finite and at least 0, got -1.0"),
    (SABlock, {"lam": math.inf}, "lam must be finite and at least 0, got inf"),
    (SABlock, {"max_block": 0}, "max_block must be at least 1, got 0"),
    (SABlock, {"delta": 1.1}, r"delta must be in \[0, 1\], got 1.1"),
    (SABlock, {"delta": math.nan}, r"delta must be in \[0, 1\], got nan"),
    (StreamingLLM, {"sinks": -1}, "sinks must be at least 0, got -1"),
    (PyramidKV, {"beta": 0.5}, "beta must be at least 1, got 0.5"),
    (ChunkKV, {"chunk": 0}, "chunk must be at least 1, got 0"),
    (CaM, {"spread": 0}, "spread must be at least 1, got 0"),
]


@pytest.mark.parametrize(
    ("method", "options", "text"),
    WRONG,
    ids=[f"{cls.__name__}-{options}" for cls, options, _ in WRONG],
)
def test_wrong_options_are_refused(method, options, text):
    with pytest.raises(ValueError, match=text):
        method(**options)
