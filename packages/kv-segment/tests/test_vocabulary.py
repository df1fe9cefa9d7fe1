from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from conftest import byte_level, unigram
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

import kv_segment as ks

Build = Callable[[Sequence[str]], tuple[Tokenizer, list[int], list[str]]]
SETS = [ks.DELIMITERS_SENTENCE, ks.DELIMITERS_CLAUSE, ks.DELIMITERS_SEMANTICACHE]

YES = [".", "?!", "...", "。", "！", "؟", "।", ".\n\n", " .", '."', "end!"]
NO = ["3.14", "e.g.", "U.S.", ":)", "Mr.", "the", " cat", "很", "है", ".com"]
pieces = st.lists(
    st.text(alphabet="abZ3.?!:,)' \n。很है", min_size=1, max_size=5), min_size=1, max_size=12
)


SEGMENTS = {
    "english": [
        ["Mr.", " Smith", " paid", " 3.14", ",", " e.g.", " for", " tea", ".\n\n"],
        [" Why", "?!"],
        [" The", " U.S.", " team", " won", " :)", " again", "...", " "],
        ["So", " what", " ."],
    ],
    "chinese": [
        ["今天", "天气", "很好", "。"],
        ["我们", "去", "公园", "，", "好吗", "？", "！"],
        ["明天见", "……\n"],
        ["他说：", "「", "再见", "。」"],
        ["好"],
    ],
    "arabic": [
        ["كيف", " حالك", "؟"],
        [" أنا", " بخير", "،", " شكرا", "؛", " هذا", " جيد", "."],
        [" وداعا", "!"],
    ],
    "hindi": [
        ["यह", " एक", " वाक्य", " है", "।"],
        [" क्या", " आप", " ठीक", " हैं", "?"],
        [" हाँ", ",", " धन्यवाद।"],
        ["इति", " ॥"],
    ],
}


class TransformersLike:
    """The part of a transformers tokenizer that is used, fast (a backend) or slow (none)."""

    def __init__(self, tokenizer: Tokenizer, special: list[int], fast: bool) -> None:
        self._tokenizer = tokenizer
        self.all_special_ids = special
        if fast:
            self.backend_tokenizer = tokenizer

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("marks", SETS[:2])
@pytest.mark.parametrize(("texts", "expected"), [(YES, True), (NO, False)])
def test_merged_tokens_and_look_alikes(
    build: Build, texts: list[str], expected: bool, marks: tuple[str, ...]
) -> None:
    tokenizer, ids, _ = build(texts)
    table = ks.delimiter_table(tokenizer, marks)
    assert table[ids].tolist() == [expected] * len(ids)


@pytest.mark.parametrize("language", list(SEGMENTS))
def test_segments_of_each_language(build: Build, language: str) -> None:
    """The tokens of each segment, written by hand, come out as that segment."""
    segments = [[t for t in tokens if t.strip()] for tokens in SEGMENTS[language]]
    tokenizer, ids, _ = build([token for tokens in segments for token in tokens])
    table = ks.delimiter_table(tokenizer, ks.DELIMITERS_SENTENCE)
    ids = ids[: sum(map(len, segments))]  # WordPiece gives each token twice
    expected = [0, *np.cumsum([len(tokens) for tokens in segments]).tolist()]
    assert ks.by_punctuation(ids, table).tolist() == expected


def test_segments_of_python_source() -> None:
    """Lines are the segments; `.` inside a name or a number ends none, WordPiece has no lines."""
    lines = [
        ["def", " f", "(", "x", ":", " int", "):", "\n"],
        ["    ", "y", " =", " 3.14", " *", " np", ".sum", "(", "x", ")", "  #", " e.g.", "\n\n"],
        ["    ", "return", " y", "\n"],
    ]
    flat = [token for line in lines for token in line]
    for build in (byte_level, unigram):
        tokenizer, ids, _ = build(flat)
        table = ks.delimiter_table(tokenizer, ks.DELIMITERS_SENTENCE)
        expected = [0, *np.cumsum([len(line) for line in lines]).tolist()]
        assert ks.by_punctuation(ids, table).tolist() == expected


@given(parts=pieces, marks=st.sampled_from(SETS))
def test_every_token_is_judged_by_its_text(
    build: Build, parts: list[str], marks: tuple[str, ...]
) -> None:
    tokenizer, ids, texts = build(parts)
    table = ks.delimiter_table(tokenizer, marks)
    assert table.dtype == np.bool_ and table.shape == (tokenizer.get_vocab_size(),)
    assert table[ids].tolist() == [ks.is_delimiter(text, marks) for text in texts]


@given(parts=pieces, fast=st.booleans())
def test_transformers_tokenizers_give_the_same_table(
    build: Build, parts: list[str], fast: bool
) -> None:
    tokenizer, ids, _ = build(parts)
    expected = ks.delimiter_table(tokenizer, ks.DELIMITERS_CLAUSE)
    expected[ids[0]] = False
    wrapped = TransformersLike(tokenizer, [ids[0]], fast)
    assert (ks.delimiter_table(wrapped, ks.DELIMITERS_CLAUSE) == expected).all()


def test_segments_of_real_text(trained: Tokenizer, text: str) -> None:
    """Each boundary lies right after a delimiter of the text, and no mark is missed."""
    encoding = trained.encode(text)
    table = ks.delimiter_table(trained, ks.DELIMITERS_SENTENCE)
    offsets = ks.by_punctuation(encoding.ids, table)
    ks.check_offsets(offsets, len(encoding.ids))
    ends = [encoding.offsets[t - 1][1] for t in offsets[1:-1]]
    assert ends
    for end in ends:
        assert text[:end].rstrip(" \"')").endswith(ks.DELIMITERS_SENTENCE)
    for mark in "?!。？！؟।":
        for position in (i for i, c in enumerate(text) if c == mark):
            token = next(t for t, (a, b) in enumerate(encoding.offsets) if a <= position < b)
            # The last byte of a character that was cut into bytes is no character by itself.
            if trained.decode([encoding.ids[token]]).strip(" ▁#").endswith(mark):
                assert table[encoding.ids[token]]


def test_segment_texts_join_to_the_text(trained: Tokenizer, text: str) -> None:
    encoding = trained.encode(text)
    table = ks.delimiter_table(trained, ks.DELIMITERS_CLAUSE)
    for cut in (ks.by_punctuation, ks.by_delimiters):
        parts = list(itertools.pairwise(cut(encoding.ids, table)))
        if isinstance(trained.model, models.BPE):
            assert "".join(trained.decode(encoding.ids[a:b]) for a, b in parts) == text
        elif isinstance(trained.model, models.Unigram):
            spelled = "".join("".join(encoding.tokens[a:b]) for a, b in parts)
            assert spelled.replace("▁", " ") in (text, f" {text}")
        else:  # no token holds white space
            spelled = "".join(text[s:e] for a, b in parts for s, e in encoding.offsets[a:b])
            assert spelled == "".join(text.split())


def test_special_tokens_and_missing_ids_are_no_delimiters() -> None:
    vocabulary = {"the": 0, ".": 1, "!": 7}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="the"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("?", special=True)])
    tokenizer.add_tokens([AddedToken("\n\n", special=False)])
    table = ks.delimiter_table(tokenizer, ks.DELIMITERS_SENTENCE)
    found = {tokenizer.id_to_token(i) for i in np.flatnonzero(table)}
    assert found == {".", "!", "\n\n"}
    assert len(table) == 1 + max(tokenizer.get_vocab().values())


def test_a_vocabulary_without_words_or_without_anything() -> None:
    tokenizer = Tokenizer(models.WordLevel({".": 0, "3": 1, "?!": 2}, unk_token="3"))
    assert ks.delimiter_table(tokenizer, ks.DELIMITERS_SENTENCE).tolist() == [True, False, True]
    assert ks.delimiter_table(Tokenizer(models.BPE()), ["."]).shape == (0,)


def test_bytes_that_are_no_character_are_none(build: Build) -> None:
    tokenizer, _, _ = build(["x"])
    table = ks.delimiter_table(tokenizer, ks.DELIMITERS_SENTENCE)
    for byte in ("<0xE3>", "<0x82>"):
        i = tokenizer.token_to_id(byte)
        assert i is None or not table[i]
    newline = tokenizer.token_to_id("<0x0A>")
    assert newline is None or table[newline]


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [(object(), "with a decode method, got <object"), (type("T", (), {"decode": print})(), "len")],
)
def test_refuses_what_is_no_tokenizer(tokenizer: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ks.delimiter_table(tokenizer, ks.DELIMITERS_SENTENCE)


def test_refuses_delimiters_that_are_none(build: Build) -> None:
    tokenizer, _, _ = build(["x"])
    with pytest.raises(ValueError, match="non-empty strings"):
        ks.delimiter_table(tokenizer, [])


@given(st.data(), pieces)
def test_texts_of_tokens_join_to_what_they_decode_to(data: st.DataObject, texts: list[str]) -> None:
    """After a word, so that no decoder drops a leading space; a special token adds nothing."""
    build = data.draw(st.sampled_from([byte_level, unigram]))
    tokenizer, ids, _ = build(["word", *texts])
    tokenizer.add_special_tokens(["<end>"])
    said = [ids[0], *data.draw(st.lists(st.sampled_from(ids), max_size=20))]
    own = ks.token_texts(tokenizer, said)
    assert len(own) == len(said)
    assert "".join(own).strip() == tokenizer.decode(said).replace("▁", " ").strip()
    end = tokenizer.token_to_id("<end>")
    assert ks.token_texts(tokenizer, [end, ids[0], end]) == ["", "word", ""]


def test_texts_are_the_spans_that_sentences_wants() -> None:
    texts = ["One", " is", " here", ".", " Two", " is", "!", " Three"]
    tokenizer, ids, _ = byte_level(texts)
    own = ks.token_texts(tokenizer, ids)
    ends = np.cumsum([len(text) for text in own])
    spans = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)
    assert ks.sentences("".join(own), spans).tolist() == [0, 4, 7, 8]


def test_texts_of_no_token_and_of_wrong_ones() -> None:
    tokenizer, ids, _ = byte_level(["One"])
    assert ks.token_texts(tokenizer, []) == []
    size = tokenizer.get_vocab_size()
    with pytest.raises(ValueError, match=f"vocabulary of {size} entries, got {size}"):
        ks.token_texts(tokenizer, [ids[0], size])
    with pytest.raises(ValueError, match="got -1"):
        ks.token_texts(tokenizer, [ids[0], -1])
    with pytest.raises(TypeError, match="ids must hold integers"):
        ks.token_texts(tokenizer, [0.5])
    with pytest.raises(TypeError, match="tokenizer must be a transformers"):
        ks.token_texts(object(), ids)
