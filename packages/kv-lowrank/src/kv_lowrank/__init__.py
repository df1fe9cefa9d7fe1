"""Low-rank factors of keys and values, rows back from them, and RoPE on and off."""

from kv_lowrank.factors import (
    LowRank,
    project,
    rows,
    singular_values,
    split_heads,
    subspace_similarity,
)
from kv_lowrank.packed import PackedSpans, pack_spans, packed_rows, take_spans
from kv_lowrank.rope import rotate, unrotate
from kv_lowrank.spans import SpanFactors, apply_gates, span_rows, span_svd, stored_numbers
from kv_lowrank.spectrum import effective_rank, gated_error, rank_for_energy
from kv_lowrank.svd import choose_method, truncated_svd

__version__ = "0.1.0"

__all__ = [
    "LowRank",
    "PackedSpans",
    "SpanFactors",
    "apply_gates",
    "choose_method",
    "effective_rank",
    "gated_error",
    "pack_spans",
    "packed_rows",
    "project",
    "rank_for_energy",
    "rotate",
    "rows",
    "singular_values",
    "span_rows",
    "span_svd",
    "split_heads",
    "stored_numbers",
    "subspace_similarity",
    "take_spans",
    "truncated_svd",
    "unrotate",
]
