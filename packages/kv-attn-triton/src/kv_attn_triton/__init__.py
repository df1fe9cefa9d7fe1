"""Decode attention over selected, merged, low-rank and ragged KV-cache entries."""

from .attention import attention, selected_attention
from .clustering import cluster
from .lowrank import lowrank_attention
from .merge import merge_states
from .ragged import ragged_attention
from .scoring import landmark_topk, window_scores
from .spans import span_attention

__version__ = "0.1.0"

__all__ = [
    "attention",
    "cluster",
    "landmark_topk",
    "lowrank_attention",
    "merge_states",
    "ragged_attention",
    "selected_attention",
    "span_attention",
    "window_scores",
]
