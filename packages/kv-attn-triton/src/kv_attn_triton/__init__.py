"""Decode attention over selected, merged, low-rank and ragged KV-cache entries."""

from .attention import attention, selected_attention
from .clustering import cluster
from .lowrank import lowrank_attention
from .merge import merge_states
from .scoring import landmark_topk, window_scores

__version__ = "0.1.0"

__all__ = [
    "attention",
    "cluster",
    "landmark_topk",
    "lowrank_attention",
    "merge_states",
    "selected_attention",
    "window_scores",
]
