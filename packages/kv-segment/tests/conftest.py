from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
from beartype.claw import beartype_package
from hypothesis import settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

beartype_package("kv_segment")

settings.register_profile(
    "default", max_examples=200, deadline=None, derandomize=bool(os.environ.get("CI"))
)
settings.register_profile("quick", max_examples=20, deadline=None)
settings.register_profile("thorough", max_examples=5000, deadline=None)
settings.load_profile("default")

TEXTS = {
    "english": (
        'Mr. Smith paid $3.14, e.g. for tea; then he left. "Why?" she asked... '
        "The U.S. team won! See: www.example.com :) End\n\nNew paragraph, no stop"
    ),
    "chinese": "今天天气很好。我们去公园，好吗？太好了！明天见……\n再见",
    "arabic": "كيف حالك؟ أنا بخير، شكرا؛ هذا جيد. وداعا!",
    "hindi": "यह एक वाक्य है। क्या आप ठीक हैं? हाँ, बिल्कुल! धन्यवाद।",
    "python": 'def f(x: int) -> str:\n    """Doc."""\n    return "a.b"  # done.\n\n\nprint(f(3))\n',
}

Pieces = Sequence[str]
Built = tuple[Tokenizer, list[int], list[str]]


def byte_level(pieces: Pieces) -> Built:
    """A byte-level BPE vocabulary that holds each piece as one token: it, the ids, their texts."""
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = ["".join(part for part, _ in to_bytes.pre_tokenize_str(p)) for p in pieces]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*alphabet, *spelled]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = to_bytes
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, [vocabulary[s] for s in spelled], list(pieces)


def unigram(pieces: Pieces) -> Built:
    """A SentencePiece-style vocabulary (meta space, byte fallback) with each piece as one token."""
    spelled = [p.replace(" ", "▁") for p in pieces]
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    tokens = list(dict.fromkeys(["<unk>", "▁the", "▁", *byte_tokens, *spelled]))
    tokenizer = Tokenizer(
        models.Unigram([(t, -float(i)) for i, t in enumerate(tokens)], 0, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer, [tokens.index(s) for s in spelled], list(pieces)


def wordpiece(pieces: Pieces) -> Built:
    """A WordPiece vocabulary with each piece once as a start and once as a continuation."""
    stripped = [p.strip() or "x" for p in pieces]
    joined = [f"##{p}" for p in stripped]
    tokens = list(dict.fromkeys(["[UNK]", "[SEP]", "##s", "the", *stripped, *joined]))
    vocabulary = {t: i for i, t in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return tokenizer, [vocabulary[p] for p in [*stripped, *joined]], stripped * 2


@pytest.fixture(scope="session", params=[byte_level, unigram, wordpiece])
def build(request: pytest.FixtureRequest) -> Callable[[Pieces], Built]:
    return request.param


@pytest.fixture(scope="session", params=list(TEXTS))
def text(request: pytest.FixtureRequest) -> str:
    return TEXTS[request.param]


@pytest.fixture(scope="session", params=["bpe", "unigram", "wordpiece"])
def trained(request: pytest.FixtureRequest) -> Tokenizer:
    """A tokenizer trained on the texts of this suite, as real vocabularies are."""
    from tokenizers import trainers

    corpus = list(TEXTS.values())
    if request.param == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=500,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|end|>"],
            show_progress=False,
        )
    elif request.param == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=400, special_tokens=["[UNK]"], show_progress=False
        )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer
