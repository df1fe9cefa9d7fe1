"""SeKV's memory of a prompt: which tokens stay as they are, and the spans of the others."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_integration.budget import BudgetTooSmallError, split_window
from kv_integration.storable import storable
from kv_offload import storage_bytes
from kv_segment import by_surprisal, fixed

Mask = NDArray[np.bool_]
Offsets = NDArray[np.int64]
LEAST_WEIGHT = 1e-6  # nats: a span of certain tokens has a mean, too


@storable
@dataclass(frozen=True)
class Spans:
    """One row's prompt. Positions ascend.

    exact: int64[A], tokens kept as they are: sinks, anchors, short spans, window. tokens:
    int64[N], all others. offsets: int64[S + 1], the spans over `tokens`. weights: float32[N], of
    each token in its span's means. room: entries that a step has left for expanded tokens.
    """

    exact: Tensor
    tokens: Tensor
    offsets: Tensor
    weights: Tensor
    room: int

    @property
    def expands(self) -> bool:
        """Whether a step has room for any span; the host waits for the answer."""
        return bool((self.offsets.diff() <= self.room + 1).any())

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that exist."""
        return storage_bytes(self.exact, self.tokens, self.offsets, self.weights)


@storable
@dataclass(frozen=True)
class Segmentation:
    """How a prompt is cut; `SeKV` says what each option means."""

    window: int
    sinks: int
    alpha: float
    min_length: int
    max_length: int | None
    trail: int
    kind: Literal["surprisal", "fixed"]
    chunk_size: int
    anchors: bool
    weights: Literal["surprisal", "uniform"]
    fit: float | None

    def check(self, tokens: int, granted: int) -> None:
        """Raise if `granted` entries cannot hold what is attended even without any anchor.

        Raises:
            BudgetTooSmallError: with the least budget that a prompt of so many tokens needs.
        """
        if tokens > granted:
            longest = None if self._fits else self.max_length
            self._refuse(np.zeros(tokens, dtype=np.bool_), granted, longest)

    def spans(self, surprisal: Tensor, granted: int) -> Spans:
        """Cut a prompt of surprisal float32[T] for steps of `granted` entries.

        Raises:
            BudgetTooSmallError: what is always attended is more than `granted`.
        """
        h = surprisal.cpu().numpy()
        tokens, device = len(h), surprisal.device
        if tokens <= granted:
            every, none = np.arange(tokens), np.empty(0, dtype=np.int64)
            return _as_spans(every, none, np.zeros(1, dtype=np.int64), h, 0, device)
        body, limit = self._body(tokens, granted)
        boundaries, longest = by_surprisal(h, self.alpha, 1)[1], self.max_length
        if self._fits:
            boundaries[body], longest = self._fitted(h[body], boundaries[body], limit)
        self._refuse(boundaries, granted, longest)
        offsets, kept = self._cut(boundaries[body], longest)
        lengths = np.diff(offsets)
        exact = np.ones(tokens, dtype=np.bool_)
        exact[body] = np.repeat(kept, lengths)
        own = np.concatenate([[0], lengths[~kept].cumsum()])
        weights = h if self.weights == "surprisal" else np.ones_like(h)
        places = np.flatnonzero(exact), np.flatnonzero(~exact)
        return _as_spans(*places, own, weights, limit - _resident(offsets, kept), device)

    def _body(self, tokens: int, granted: int) -> tuple[slice, int]:
        """The tokens between sinks and window, and the entries that are left for them."""
        window, rest = split_window(granted, self.window)
        sinks = min(self.sinks, rest)
        return slice(sinks, tokens - window), granted - window - sinks

    @property
    def _fits(self) -> bool:
        """Whether alpha and the spans' length give way to the budget."""
        return self.fit is not None and self.kind == "surprisal"

    def _fitted(
        self, h: NDArray[np.float32], boundaries: Mask, limit: int
    ) -> tuple[Mask, int | None]:
        """Boundaries and the longest span, in tokens, for `limit` entries.

        A share `fit` of the entries is for what is always attended, spans uncut; what they leave is
        for cutting spans and expanding them. Where that does not reach for a single span of at most
        `max_length`, nothing can be expanded, and all entries are for what is always attended.
        """
        share = limit if self.fit is None else int(self.fit * limit)
        fitted = self._most(h, boundaries, share)
        longest = self._longest(fitted, limit)
        if longest is None and self.max_length is not None:
            fitted = self._most(h, boundaries, limit)
        return fitted, longest

    def _most(self, h: NDArray[np.float32], boundaries: Mask, limit: int) -> Mask:
        """The boundaries, or as many of the most surprising ones as `limit` entries hold: alpha
        rises from one token's surprisal to the next one's."""
        order = np.argsort(-h, kind="stable")
        low, high = 0, int(boundaries.sum())

        def first(count: int) -> Mask:
            mask = np.zeros(len(h), dtype=np.bool_)
            mask[order[:count]] = True
            return mask

        if _resident(*self._cut(boundaries, None)) <= limit:
            return boundaries
        while low + 1 < high:
            middle = (low + high) // 2
            if _resident(*self._cut(first(middle), None)) <= limit:
                low = middle
            else:
                high = middle
        return first(low)

    def _longest(self, boundaries: Mask, limit: int) -> int | None:
        """Tokens of the longest span, from twice `min_length` to `max_length`, with which a step
        can expand the largest share of the spans. None: it can expand no such span."""
        if self.max_length is None:
            return None
        offsets, kept = self._cut(boundaries, None)
        lengths = np.diff(offsets)[~kept]
        sizes = np.arange(2 * self.min_length, self.max_length + 1)
        means = (-(-lengths[:, None] // sizes)).sum(0)
        room = limit - int(np.diff(offsets)[kept].sum()) - means
        spans = np.minimum(room // (sizes - 1), means)  # in place of its mean
        best = int((spans / np.maximum(means, 1)).argmax())
        return int(sizes[best]) if spans[best] > 0 else None

    def _cut(self, boundaries: Mask, longest: int | None) -> tuple[Offsets, Mask]:
        """Segments of the tokens between sinks and window, and which of them are kept as they are.

        longest: tokens of a span; longer ones are cut into equal parts. Returns offsets
        int64[K + 1] and bool[K].
        """
        count = len(boundaries)
        if self.kind == "fixed":
            offsets, kept = fixed(count, self.chunk_size), np.zeros(count, dtype=np.bool_)
        else:
            kept, starts = np.zeros(count, dtype=np.bool_), boundaries.copy()
            if self.anchors:
                kept = boundaries.copy()
                for after in range(1, min(self.trail, count - 1) + 1):
                    kept[after:] |= boundaries[:-after]
                starts = kept.copy()
                starts[1:] |= kept[:-1]  # a span begins after what is kept
            starts[:1] = True
            offsets = np.append(np.flatnonzero(starts), count)
        lengths = np.diff(offsets)
        short = lengths < (self.min_length if len(lengths) > 1 else 0)
        exact = kept[offsets[:-1]] | short
        if longest is None:
            return offsets, exact
        parts = np.where(exact, 1, -(-lengths // longest))
        owner = np.repeat(np.arange(len(parts)), parts)
        place = np.arange(len(owner)) - np.repeat(parts.cumsum() - parts, parts)
        starts = offsets[owner] + place * lengths[owner] // parts[owner]
        return np.append(starts, count), exact[owner]

    def _least(self, boundaries: Mask, granted: int, longest: int | None) -> int:
        """Entries that are always attended with these boundaries [T]."""
        body, limit = self._body(len(boundaries), granted)
        return granted - limit + _resident(*self._cut(boundaries[body], longest))

    def _refuse(self, boundaries: Mask, granted: int, longest: int | None) -> None:
        least = self._least(boundaries, granted, longest)
        if least <= granted:
            return
        tokens = len(boundaries)

        def holds(budget: int) -> bool:
            return self._least(boundaries, budget, longest) <= budget

        # The window grows with the budget, so what is attended does, too: by less, but for a short
        # run that comes and goes at the window's edge.
        wanted = bisect_left(range(tokens), True, granted, key=holds)
        near = range(max(granted, wanted - 2 * self.min_length), wanted)
        wanted = next((budget for budget in near if holds(budget)), wanted)
        raise BudgetTooSmallError(
            f"budget grants {granted} entries of this prompt of {tokens} tokens, but {least} are "
            "always attended (sinks, anchors, short spans, window and one entry per span): SeKV "
            f"needs a budget of at least {wanted} here, or a smaller window, or longer spans",
            least=wanted,
        )


def _resident(offsets: Offsets, kept: Mask) -> int:
    """Entries that are always attended: tokens that are kept, and one per span."""
    return int(np.diff(offsets)[kept].sum() + (~kept).sum())


def _as_spans(
    exact: Offsets,
    tokens: Offsets,
    offsets: Offsets,
    weights: NDArray[np.float32],
    room: int,
    device: torch.device,
) -> Spans:
    def tensor(x: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(device)

    own = np.maximum(weights[tokens], np.float32(LEAST_WEIGHT))
    return Spans(tensor(exact), tensor(tokens), tensor(offsets), tensor(own), room)
