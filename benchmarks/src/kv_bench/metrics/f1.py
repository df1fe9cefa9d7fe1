"""F1 over tokens, for English (SQuAD's) and Chinese, as LongBench and InfiniteBench define it.

Sources: LongBench `metrics.py` and InfiniteBench `src/compute_scores.py`, both MIT.
"""

from __future__ import annotations

import logging
import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from types import ModuleType

ARTICLES = re.compile(r"\b(a|an|the)\b")
# LongBench's list; it adds the ASCII punctuation.
CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿"
    "–—‘’‛“”„‟…‧﹏."
)
_NO_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation + CHINESE_PUNCTUATION)


def normalize(text: str) -> str:
    """Lower case, without ASCII punctuation, articles and superfluous white space."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(_NO_ASCII_PUNCTUATION)).split())


def normalize_chinese(text: str) -> str:
    """Lower case, without punctuation and white space."""
    return "".join(text.lower().translate(_NO_PUNCTUATION).split())


def f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of tokens, counted with multiplicity; 0 without any in
    common."""
    same = (Counter(prediction) & Counter(reference)).total()
    return 2 * same / (len(prediction) + len(reference)) if same else 0.0


def qa_f1(prediction: str, reference: str) -> float:
    """F1 over the words of the normalised texts."""
    return f1(normalize(prediction).split(), normalize(reference).split())


def qa_f1_chinese(prediction: str, reference: str) -> float:
    """F1 over jieba's words, each normalised (LongBench)."""
    return f1(_chinese_tokens(prediction), _chinese_tokens(reference))


def qa_f1_chinese_characters(prediction: str, reference: str) -> float:
    """F1 over the characters of the normalised texts (InfiniteBench)."""
    return f1(normalize_chinese(prediction), normalize_chinese(reference))


def chinese_words(text: str) -> list[str]:
    """jieba's words in its exact mode."""
    return list(_jieba().lcut(text))


def _chinese_tokens(text: str) -> list[str]:
    words = (normalize_chinese(word) for word in chinese_words(text))
    return [word for word in words if word]


@cache
def _jieba() -> ModuleType:
    """jieba, which takes a second to load and reports on stderr that it does."""
    import jieba

    jieba.setLogLevel(logging.WARNING)
    jieba.initialize()
    return jieba
