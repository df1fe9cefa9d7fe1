from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nltk.tokenize.punkt import PunktSentenceTokenizer
from tokenizers import Tokenizer

import kv_segment as ks

words = st.sampled_from(
    ["The", " cat", " sat", ".", "!", "?", " Mr", " Dr.", "\n", "\n\n", " ", " 3.14", " e.g.", " I"]
)
token_lists = st.lists(words, max_size=40)
# Empty tokens stand for special tokens, whose span is (0, 0).
with_specials = st.lists(st.one_of(words, st.just("")), max_size=40)


def spans_of(tokens: list[str]) -> tuple[str, list[tuple[int, int]]]:
    text, spans = "", []
    for token in tokens:
        spans.append((len(text), len(text) + len(token)) if token else (0, 0))
        text += token
    return text, spans


def slow(text: str, spans: list[tuple[int, int]], train: bool) -> list[int]:
    """Each token, one after the other, asks in which sentence its last character lies."""
    punkt = PunktSentenceTokenizer(text) if train else PunktSentenceTokenizer()
    starts = [start for start, _ in punkt.span_tokenize(text)]
    ids: list[int] = []
    for start, end in spans:
        if end > start:
            ids.append(max(0, sum(s <= end - 1 for s in starts) - 1))
        else:
            ids.append(ids[-1] if ids else 0)
    return [
        0,
        *(t for t in range(1, len(ids)) if ids[t] != ids[t - 1]),
        *([len(ids)] if ids else []),
    ]


@given(with_specials, st.booleans())
def test_equals_asking_token_by_token(tokens: list[str], train: bool) -> None:
    text, spans = spans_of(tokens)
    got = ks.sentences(text, spans, train_on_text=train)
    assert got.tolist() == slow(text, spans, train)
    assert got.dtype == np.int64


@given(token_lists)
def test_segments_cover_and_their_text_is_the_text(tokens: list[str]) -> None:
    text, spans = spans_of(tokens)
    offsets = ks.check_offsets(ks.sentences(text, spans), len(tokens))
    parts = ["".join(tokens[a:b]) for a, b in itertools.pairwise(offsets)]
    assert "".join(parts) == text


@given(token_lists, st.integers(1, 3))
def test_finer_tokens_move_no_sentence(tokens: list[str], size: int) -> None:
    text, spans = spans_of(tokens)
    finer = [(a, min(a + size, end)) for start, end in spans for a in range(start, end, size)]
    coarse = [spans[t - 1][1] for t in ks.sentences(text, spans)[1:]]
    fine = [finer[t - 1][1] for t in ks.sentences(text, finer)[1:]]
    # White space may now be a token of its own, which stays with the sentence before it.
    assert [text[:end].rstrip() for end in coarse] == [text[:end].rstrip() for end in fine]


def test_numbers_do_not_end_a_sentence_and_specials_follow() -> None:
    tokens = ["", "Take", " 3.14", " of", " these", ".", " It", " was", " fun", ".", "\n", ""]
    text, spans = spans_of(tokens)
    assert ks.sentences(text, spans).tolist() == [0, 6, 12]


def test_training_on_the_text_learns_its_abbreviations() -> None:
    text = "Look at fig. 4 and fig. 5 again. Dr. Jones and dr. who saw it there. " * 20
    spans = [m.span() for m in re.finditer(r"\s*\S+", text)]
    untrained = ks.sentences(text, spans)
    trained = ks.sentences(text, spans, train_on_text=True)
    last_words = {text[slice(*spans[t - 1])].strip() for t in trained[1:]}
    assert last_words == {"again.", "there."}
    assert {text[slice(*spans[t - 1])].strip() for t in untrained[1:]} > last_words


def test_real_tokenizers(trained: Tokenizer, text: str) -> None:
    encoding = trained.encode(text)
    offsets = ks.sentences(text, encoding.offsets)
    assert offsets.tolist() == slow(text, list(encoding.offsets), False)
    ks.check_offsets(offsets, len(encoding.ids))


def test_nothing() -> None:
    assert ks.sentences("Hi", [(0, 2)]).tolist() == [0, 1]
    assert ks.sentences("", []).tolist() == [0]
    assert ks.sentences("Words.", np.zeros((0, 2), dtype=np.int64)).tolist() == [0]
    assert ks.sentences("  \n ", [(0, 2), (2, 4)]).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("spans", "error", "message"),
    [
        ([(0, 9)], ValueError, r"char_spans\[0\] must be a span within the 5 .* got \(0, 9\)"),
        ([(0, 1), (3, 2)], ValueError, r"char_spans\[1\] .* got \(3, 2\)"),
        ([(2, 4), (0, 2)], ValueError, r"follow the text, got \(0, 2\) at 1 .* ends at 4"),
        ([(0, 1), (2,)], ValueError, r"char_spans must be an array, got \[\(0, 1\), \(2,\)\]"),
        ([(0, 1, 2)], ValueError, r"shape \[T, 2\], got \(1, 3\)"),
        ([(0.0, 1.0)], TypeError, "integers, got dtype float64"),
    ],
)
def test_refuses(spans: list[tuple[int, int]], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ks.sentences("Word.", spans)
