"""Which tokens are kept, segment by segment."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kv_policies import _check, _offsets
from kv_policies._select import indices_of, per_row, top_mask


def top_segments(
    segment_scores: Float[Tensor, "B H S"],
    token_scores: Float[Tensor, "B H N"],
    offsets: Int64[Tensor, "*rows S1"],
    budget: int | Sequence[int],
    *,
    check: bool = True,
) -> Int64[Tensor, "B H K"]:
    """Whole segments in falling order of score until `budget`; the last is cut to its best tokens.

    `take_k = clamp(budget - sum of lengths of the better segments, 0, length_k)`: segment k gives
    its `take_k` tokens of highest token score. A length counts the segment's allowed tokens.

    Args:
        segment_scores: [B, H, S], higher = first, -inf = never.
        token_scores: [B, H, N], ranks the tokens of the segment that is cut, -inf = never.
        offsets: int64[S + 1], or int64[B, S + 1] where rows differ. Rows may end in repeats of N,
            which are segments without tokens.
        budget: entries per row and head, at least 0; or one such int for each of the B rows.
        check: also check values, which makes the host wait for a GPU: pass False in a decode step.
            Wrong values then give an unspecified selection.

    Returns:
        int64[B, H, K], `K = min(budget, N)` (the largest budget), ascending, -1 padded where fewer
        tokens are granted or allowed. Of equal scores the earlier segment, and the earlier token,
        comes first.

    Raises:
        TypeError: wrong dtype.
        ValueError: shapes or devices that do not fit, negative budget, NaN or +inf in the scores,
            offsets that do not cover the tokens in order.

    Source: SentenceKV, section 4.2 (sentences in falling order of similarity until the budget).
    """
    _check.shape("segment_scores", segment_scores, (None, None, None), "[B, H, S]")
    _check.shape("token_scores", token_scores, (None, None, None), "[B, H, N]")
    _check.same_device("token_scores", token_scores, "segment_scores", segment_scores)
    budgets = _check.budgets(budget, segment_scores.shape[0])
    rank = _check.scores("segment_scores", segment_scores, check=check)
    keys = _check.scores("token_scores", token_scores, check=check)
    b, h, n = keys.shape
    table = _offsets.rows(offsets, keys, "token_scores", n, check=check)
    budgets = [min(k, n) for k in budgets]
    _check.shape("segment_scores", rank, (b, h, table.shape[1] - 1), "[B, H, S]")

    allowed = keys > -math.inf
    counted = torch.nn.functional.pad(allowed.cumsum(-1), (1, 0))
    length = counted.gather(-1, table[:, None].expand(b, h, -1)).diff(dim=-1)
    length = length * (rank > -math.inf)
    order = rank.sort(dim=-1, descending=True, stable=True).indices
    filled = length.gather(-1, order).cumsum(-1)
    better = torch.empty_like(filled).scatter_(-1, order, filled) - length

    # A whole segment lifts its tokens to +inf, the cut one leaves them, the others drop to -inf.
    most = max(budgets, default=0)
    granted = most if len(set(budgets)) <= 1 else budgets
    room = (granted if isinstance(granted, int) else per_row(granted, better)) - better
    lift = torch.where(room >= length, math.inf, torch.where(room > 0, 0.0, -math.inf))
    lift = lift.to(keys.dtype).masked_fill(length == 0, -math.inf)
    ids = _offsets.segment_ids(table, n)[:, None].expand(b, h, n)
    lifted = (keys + lift.gather(-1, ids)).masked_fill_(~allowed, -math.inf)
    return indices_of(top_mask(lifted, granted), most)
