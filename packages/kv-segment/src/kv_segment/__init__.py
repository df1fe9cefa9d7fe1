"""Token ids, text or surprisal to segment offsets, with numpy alone."""

from kv_segment.delimiters import (
    DELIMITERS_CLAUSE,
    DELIMITERS_SEMANTICACHE,
    DELIMITERS_SENTENCE,
    is_delimiter,
)
from kv_segment.offsets import check_offsets, fixed, segment_ids
from kv_segment.punkt import sentences
from kv_segment.split import by_delimiters, by_punctuation
from kv_segment.surprisal import by_surprisal
from kv_segment.tracker import SentenceTracker
from kv_segment.vocabulary import delimiter_table, token_texts

__version__ = "0.1.0"

__all__ = [
    "DELIMITERS_CLAUSE",
    "DELIMITERS_SEMANTICACHE",
    "DELIMITERS_SENTENCE",
    "SentenceTracker",
    "by_delimiters",
    "by_punctuation",
    "by_surprisal",
    "check_offsets",
    "delimiter_table",
    "fixed",
    "is_delimiter",
    "segment_ids",
    "sentences",
    "token_texts",
]
