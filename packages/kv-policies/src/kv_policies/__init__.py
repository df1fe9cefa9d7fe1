"""Scores, segment offsets and a budget to what a KV cache keeps, merges, retrieves and expands."""

from kv_policies.blocks import adaptive_blocks
from kv_policies.budgets import head_budgets, pyramid_budgets
from kv_policies.clusters import greedy_clusters
from kv_policies.filling import fill_segments
from kv_policies.merging import Merged, merge
from kv_policies.segments import top_segments
from kv_policies.spans import Expansion, expand_spans, select_spans
from kv_policies.threshold import Threshold, threshold_for_budget
from kv_policies.tokens import keep_sinks, keep_window, stream_window, top_tokens

__version__ = "0.1.0"

__all__ = [
    "Expansion",
    "Merged",
    "Threshold",
    "adaptive_blocks",
    "expand_spans",
    "fill_segments",
    "greedy_clusters",
    "head_budgets",
    "keep_sinks",
    "keep_window",
    "merge",
    "pyramid_budgets",
    "select_spans",
    "stream_window",
    "threshold_for_budget",
    "top_segments",
    "top_tokens",
]
