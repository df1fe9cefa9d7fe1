"""Which tokens are kept, segment by segment, where each segment's best tokens stand first."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kv_policies import _check
from kv_policies._select import one_or_per_row


def fill_segments(
    segment_scores: Float[Tensor, "B H S"],
    offsets: Int64[Tensor, "*lists S1"],
    budget: int | Sequence[int],
    *,
    size: int,
) -> Int64[Tensor, "B H K"]:
    """`top_segments` where tokens stand in falling order of score inside their segment.

    The segment that is cut then gives its first tokens, and no token has to be looked at: the work
    grows with the segments and with what is kept, not with the tokens there are. Values are not
    checked, so that nothing waits for a GPU.

    Args:
        segment_scores: [B, H, S], higher = first, -inf = never.
        offsets: int64[S + 1], int64[B, S + 1], or int64[B, 1 or H, S + 1] where heads differ, too.
            Equal neighbours are segments without tokens.
        budget: entries per row and head, at least 0; or one such int for each of the B rows.
        size: K of the result, which no budget exceeds.

    Returns:
        int64[B, H, K], ascending, -1 padded. Of equal scores the earlier segment comes first.

    Raises:
        TypeError: wrong dtype.
        ValueError: shapes or devices that do not fit, negative budget or size.

    Source: SentenceKV, section 4.2 (sentences in falling order of similarity until the budget).
    """
    _check.shape("segment_scores", segment_scores, (None, None, None), "[B, H, S]")
    _check.floating("segment_scores", segment_scores)
    _check.dtype("offsets", offsets, torch.int64)
    _check.same_device("offsets", offsets, "segment_scores", segment_scores)
    batch, heads, count = segment_scores.shape
    size = _check.integer("size", size, least=0)
    budgets = [min(each, size) for each in _check.budgets(budget, batch)]
    table = offsets[:, None] if offsets.ndim == 2 else offsets
    given = (1, 1, *table.shape)[-3:]
    if offsets.ndim not in (1, 2, 3) or any(
        n not in (1, wanted) for n, wanted in zip(given[:2], (batch, heads), strict=True)
    ):
        raise ValueError(
            f"offsets must have shape [S + 1], [B, S + 1] or [B, 1 or H, S + 1] for {batch} rows "
            f"and {heads} heads, got {list(offsets.shape)}"
        )
    if given[2] != count + 1:
        raise ValueError(
            f"offsets must have S + 1 = {count + 1} entries for segment_scores, got {given[2]}"
        )
    starts = table[..., :-1]
    lengths = (table[..., 1:] - starts).expand_as(segment_scores)
    ranked, order = segment_scores.sort(dim=-1, descending=True, stable=True)
    sizes = lengths.gather(-1, order).masked_fill_(ranked == -math.inf, 0)
    most = one_or_per_row(budgets, sizes)
    filled = torch.clamp(sizes.cumsum(-1), max=most)
    taken = torch.diff(filled, prepend=filled.new_zeros(batch, heads, 1))
    taken = torch.empty_like(taken).scatter_(-1, order, taken)

    # Each segment's tokens are a run: its first token, less the place in the result where it goes.
    ends = taken.cumsum(-1)
    first = starts - ends + taken
    rest = size - taken.sum(-1, keepdim=True)
    none = torch.full_like(rest, -1 - size)  # what is left over stays below 0
    runs = torch.cat([first.expand_as(taken), none], dim=-1)
    times = torch.cat([taken, rest], dim=-1)
    ids = torch.repeat_interleave(
        runs.flatten(), times.flatten(), output_size=batch * heads * size
    ).view(batch, heads, size)
    return ids.add_(torch.arange(size, device=ids.device)).clamp_(min=-1)
