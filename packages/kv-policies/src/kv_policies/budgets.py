"""One total, divided over layers or heads."""

from __future__ import annotations

import math

from jaxtyping import Float, Int64
from torch import Tensor

from kv_policies import _check
from kv_policies._select import top_mask


def pyramid_budgets(
    total: int,
    layers: int,
    *,
    beta: float = 20.0,
    minimum: int = 0,
    capacity: int | None = None,
) -> list[int]:
    """`k_l = k_first + (k_last - k_first) l / (L - 1)`, `k_last = mean / beta`, mean = total / L.

    Budgets fall from the first layer to the last along a line whose mean is `total / layers`.
    They are rounded so that they sum to `total` exactly and never rise.

    Args:
        total: entries over all layers, per row and head.
        layers: number of layers, at least 1.
        beta: how much less than the mean the last layer gets, at least 1; 1 is the same for all.
        minimum: what each layer gets at least.
        capacity: what a layer can use at most, such as the length of the prompt. What is above it
            goes to the next layers.

    Returns:
        `layers` ints that sum to `total`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `total` negative, below `layers * minimum` or above `layers * capacity`,
            `layers < 1`, `beta < 1`.

    Source: PyramidKV, section 4.2 (beta = 20 in its code).
    """
    total = _check.integer("total", total, least=0)
    layers = _check.integer("layers", layers, least=1)
    beta = _check.real("beta", beta, 1.0, 1e12)
    minimum = _check.integer("minimum", minimum, least=0)
    if total < layers * minimum:
        raise ValueError(
            f"total must be at least layers * minimum = {layers * minimum}, got {total}"
        )
    if capacity is not None:
        capacity = _check.integer("capacity", capacity, least=0)
        if total > layers * capacity:
            raise ValueError(
                f"total must be at most layers * capacity = {layers * capacity}, got {total}"
            )

    mean = total / layers
    last = max(float(minimum), mean / beta)
    step = 2 * (mean - last) / max(layers - 1, 1)
    budgets = [math.floor(last + step * (layers - 1 - i)) for i in range(layers)]
    if layers == 1:
        budgets = [total]
    rest = total - sum(budgets)  # in [0, layers], since each entry was rounded down
    budgets = [k + rest // layers + (i < rest % layers) for i, k in enumerate(budgets)]
    return budgets if capacity is None else _under(budgets, capacity)


def _under(budgets: list[int], capacity: int) -> list[int]:
    """What a layer cannot use goes to the next one; falling budgets stay falling."""
    carried, capped = 0, []
    for wanted in budgets:
        capped.append(min(capacity, wanted + carried))
        carried += wanted - capped[-1]
    return capped


def head_budgets(
    scores: Float[Tensor, "B H N"], total: int, *, floor: float = 0.2, check: bool = True
) -> Int64[Tensor, "B H"]:
    """`k_h = number of head h's tokens among the best total of all heads of the row`.

    Each head's best `m = int(floor * total / H)` tokens count as best of all.

    Args:
        scores: [B, H, N], comparable between the heads of a row, -inf = never.
        total: entries over all heads of a row, at most H * N.
        floor: share of an even division that every head gets, in [0, 1]; 1 divides evenly.
        check: also check values, which makes the host wait for a GPU.

    Returns:
        int64[B, H] that sums to `total` in each row, or to the row's allowed tokens if it has
        fewer; no head gets more than it has. Equal scores: the earlier head and token.

    Raises:
        TypeError: wrong dtype.
        ValueError: wrong shape, `total` negative or above H * N, `floor` outside [0, 1], NaN or
            +inf in `scores`.

    Source: Ada-KV, Algorithm 1; there the safeguard is a blend with the even division.
    """
    keys = _check.scores("scores", scores, check=check)
    total = _check.integer("total", total, least=0)
    floor = _check.real("floor", floor, 0.0, 1.0)
    b, h, n = keys.shape
    if total > h * n:
        raise ValueError(f"total must be at most H * N = {h * n}, got {total}")
    if h == 0:
        return keys.new_zeros((b, 0)).long()
    keys = keys.masked_fill(top_mask(keys, int(floor * total / h)), math.inf)
    return top_mask(keys.reshape(b, h * n), total).reshape(b, h, n).sum(-1)
