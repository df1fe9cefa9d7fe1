"""Sentences by NLTK's Punkt, without downloaded data."""

from __future__ import annotations

from array import array
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kv_segment import _check


def sentences(
    text: str, char_spans: ArrayLike, *, train_on_text: bool = False
) -> NDArray[np.int64]:
    """`offsets` of the tokens of each Punkt sentence: a token goes with its last character.

    Punkt ends sentences at `.`, `?` and `!` only; for marks of other scripts see
    `by_punctuation`.

    White space after a sentence belongs to it. Tokens without a character, such as special
    tokens with the span (0, 0), go with the token before them. A sentence whose characters
    are no token's last one gets no segment.

    Args:
        text: the text that was tokenised.
        char_spans: int[T, 2], first character and one past the last of each token, as the
            `offset_mapping` of a Hugging Face tokenizer gives it.
        train_on_text: learn abbreviations and frequent sentence starts from `text` itself first
            (several times slower; useful for long texts with unusual abbreviations).

    Returns:
        int64[S + 1] offsets over the T tokens; `[0]` for no token.

    Raises:
        TypeError: `text` is no str or `char_spans` does not hold integers.
        ValueError: wrong shape, a span outside the text, or spans out of the order of the text.

    Source: Kiss and Strunk, Unsupervised Multilingual Sentence Boundary Detection, 2006;
    SentenceKV, section 7, names NLTK for texts where punctuation does not do.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a str, got {text!r}")
    ends = _check_spans(char_spans, len(text))
    if len(ends) == 0:
        return np.zeros(1, dtype=np.int64)

    from nltk.tokenize.punkt import PunktSentenceTokenizer  # slow to import, only needed here

    punkt = PunktSentenceTokenizer(text if train_on_text else None)
    starts = np.fromiter((start for start, _ in punkt.span_tokenize(text)), dtype=np.int64)
    # Characters before the first start are white space and go with the first sentence. The others
    # begin with the first token that ends after their start; several may begin with one token.
    first = np.searchsorted(ends, starts[1:], side="right")
    return np.unique(np.concatenate(([0], first, [len(ends)]))).astype(np.int64, copy=False)


def _check_spans(char_spans: ArrayLike, n: int) -> NDArray[np.int64]:
    """Ends of the spans, those of empty spans taken from the token before: int64[T], rising."""
    spans = _pairs(char_spans)
    if spans.size == 0:
        spans = spans.reshape(-1, 2).astype(np.int64)
    if spans.ndim != 2 or spans.shape[1] != 2:
        raise ValueError(f"char_spans must have shape [T, 2], got {spans.shape}")
    if spans.dtype.kind not in "iu":
        raise TypeError(f"char_spans must hold integers, got dtype {spans.dtype}")
    first, last = spans[:, 0].astype(np.int64), spans[:, 1].astype(np.int64)
    wrong = np.flatnonzero((first < 0) | (last < first) | (last > n))
    if wrong.size:
        i = int(wrong[0])
        raise ValueError(
            f"char_spans[{i}] must be a span within the {n} characters of text, "
            f"got ({first[i]}, {last[i]})"
        )
    ends = np.maximum.accumulate(np.where(last > first, last, 0))
    back = np.flatnonzero((last > first) & (ends != last))
    if back.size:
        i = int(back[0])
        raise ValueError(
            f"char_spans must follow the text, got ({first[i]}, {last[i]}) at {i} "
            f"after a token that ends at {ends[i]}"
        )
    return ends


def _pairs(char_spans: ArrayLike) -> NDArray[Any]:
    """`char_spans` as an array; a list of pairs of ints, as tokenizers give it, the fast way."""
    if isinstance(char_spans, (list, tuple)):
        try:
            if set(map(len, char_spans)) == {2}:
                flat = array("q", chain.from_iterable(char_spans))
                return np.frombuffer(flat, dtype=np.int64).reshape(-1, 2)
        except (TypeError, OverflowError):  # not sequences, or not of ints: np.asarray shows what
            pass
    return _check.as_array("char_spans", char_spans)
