"""One bool per vocabulary entry: is this token a delimiter?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kv_segment import _check
from kv_segment.delimiters import compiled_rule

_BATCH = 16384
_METASPACE = "▁"


def delimiter_table(tokenizer: Any, delimiters: Sequence[str]) -> NDArray[np.bool_]:
    """`table[i] = is_delimiter(text of token i, delimiters)`: bool[V].

    The text of a token is what it adds to decoded text when it follows a word, so that byte-level
    BPE, SentencePiece (BPE and Unigram, byte fallback) and WordPiece vocabularies are read alike
    and a leading space is seen. Special tokens and ids that name no token are never delimiters.
    Bytes that are no whole character on their own decode to U+FFFD and are none either.

    Args:
        tokenizer: a Hugging Face `transformers` tokenizer or a `tokenizers.Tokenizer`: anything
            with `decode(ids, skip_special_tokens=...)` and either `len()` or `get_vocab_size()`.
        delimiters: the strings that count, for instance `DELIMITERS_SENTENCE`; the rule for
            merged tokens and look-alikes is `is_delimiter`'s.

    Returns:
        bool[V], V the number of ids: `len(tokenizer)`, or more where ids have gaps.

    Raises:
        TypeError: `tokenizer` lacks these methods, or `delimiters` holds something else than str.
        ValueError: `delimiters` is empty or holds an empty string.
    """
    rule = compiled_rule(delimiters)
    size = _vocabulary_size(tokenizer)
    table = np.zeros(size, dtype=np.bool_)
    for start in range(0, size, _BATCH):
        ids = range(start, min(start + _BATCH, size))
        table[start : ids.stop] = [rule(text) for text in _texts(tokenizer, size, ids)]
    return table


def token_texts(tokenizer: Any, ids: ArrayLike) -> list[str]:
    """What each token adds to decoded text: joined, a text that the tokens cut exactly.

    With the lengths of these texts as spans it is what `sentences` asks for, whether or not the
    tokenizer can give offsets. A special token adds nothing. Of a character whose bytes are spread
    over tokens each of these adds U+FFFD.

    Args:
        tokenizer: as for `delimiter_table`.
        ids: int[T], each an id of the vocabulary; every id is decoded once.

    Raises:
        TypeError: `tokenizer` cannot decode, or `ids` does not hold integers.
        ValueError: `ids` is not of one dimension, or holds an id outside the vocabulary.
    """
    tokens = _check.integers("ids", ids)
    size = _vocabulary_size(tokenizer)
    unique, place = np.unique(tokens, return_inverse=True)
    if len(unique) and not 0 <= unique[0] <= unique[-1] < size:
        wrong = unique[0] if unique[0] < 0 else unique[-1]
        raise ValueError(f"ids must be within the vocabulary of {size} entries, got {wrong}")
    texts = _texts(tokenizer, size, unique.tolist())
    return [texts[i] for i in place.tolist()]


def _texts(tokenizer: Any, size: int, ids: Sequence[int]) -> list[str]:
    """Text of each of `ids` as it stands after a word; none of a special token."""
    special = _special_ids(tokenizer)
    anchor, prefix = _find_word(tokenizer, size, special)
    decoded = _decode(tokenizer, [[*anchor, i] for i in ids])
    return [
        "" if i in special else _own_text(text, prefix)
        for i, text in zip(ids, decoded, strict=True)
    ]


def _own_text(text: str, prefix: str) -> str:
    """What the token added after the word `prefix`."""
    own = text[len(prefix) :] if text.startswith(prefix) else text
    return own.replace(_METASPACE, " ")


def _find_word(tokenizer: Any, size: int, special: set[int]) -> tuple[list[int], str]:
    """One token that is a word, as ids and text: decoders drop the space of a first token.

    A vocabulary without any word leaves every token to be decoded alone.
    """
    for start in range(0, size, 512):
        ids = [i for i in range(start, min(start + 512, size)) if i not in special]
        for i, text in zip(ids, _decode(tokenizer, [[i] for i in ids]), strict=True):
            if text.isalpha():
                return [i], text
    return [], ""


def _vocabulary_size(tokenizer: Any) -> int:
    if not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(
            "tokenizer must be a transformers or tokenizers tokenizer with a decode method, "
            f"got {tokenizer!r}"
        )
    if hasattr(tokenizer, "__len__"):
        size = len(tokenizer)
    elif hasattr(tokenizer, "get_vocab_size"):
        size = int(tokenizer.get_vocab_size())
    else:
        raise TypeError(f"tokenizer must have len() or get_vocab_size(), got {tokenizer!r}")
    if hasattr(tokenizer, "get_vocab"):
        size = max(size, 1 + max(tokenizer.get_vocab().values(), default=-1))
    return size


def _special_ids(tokenizer: Any) -> set[int]:
    special = {int(i) for i in getattr(tokenizer, "all_special_ids", ())}
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if added is None and hasattr(tokenizer, "get_added_tokens_decoder"):
        added = tokenizer.get_added_tokens_decoder()
    return special | {int(i) for i, token in (added or {}).items() if token.special}


def _decode(tokenizer: Any, batch: list[list[int]]) -> list[str]:
    """Texts of `batch`, by the compiled tokenizer in one call where there is one."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "decode_batch"):
        texts: list[str] = backend.decode_batch(batch, skip_special_tokens=False)
        return texts
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in batch]
