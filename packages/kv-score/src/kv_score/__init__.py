"""Importance of tokens, segments, chunks and pages from queries, keys and hidden states."""

from kv_score.attention import accumulated_attention, window_attention
from kv_score.chunks import chunk_cosine, chunk_distance, chunk_mean, chunk_outliers
from kv_score.pages import bound_scores, page_bounds, page_mask
from kv_score.pooling import pool
from kv_score.received import attend_and_accumulate
from kv_score.retrieval import landmark_scores, segment_scores
from kv_score.segments import segment_guided, segment_mean, segment_statistics
from kv_score.surprise import surprisal

__version__ = "0.1.0"

__all__ = [
    "accumulated_attention",
    "attend_and_accumulate",
    "bound_scores",
    "chunk_cosine",
    "chunk_distance",
    "chunk_mean",
    "chunk_outliers",
    "landmark_scores",
    "page_bounds",
    "page_mask",
    "pool",
    "segment_guided",
    "segment_mean",
    "segment_scores",
    "segment_statistics",
    "surprisal",
    "window_attention",
]
