"""ShadowKV+: ShadowKV that holds what is generated as factors and offloaded values, too.

Source: "ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference", section 4.1
and A.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kv_integration.method import LayerState, Plan, Row
from kv_integration.methods.shadowkv import ShadowKV, ShadowRow, ShadowState
from kv_integration.storable import storable
from kv_lowrank import LowRank, project, unrotate
from kv_score import chunk_mean


@dataclass(frozen=True)
class ShadowKVPlus(ShadowKV):
    """ShadowKV whose tokens beyond the `recent` latest become chunks like those of the prompt.

    Their keys before RoPE are projected on the right factor of the prompt's keys, their values are
    offloaded, and their landmarks stand beside the prompt's. They come on top of the budget: of
    them, a step retrieves the share of chunks that it does of the prompt's.

    Args:
        recent: latest tokens, of prompt and answer, that stay exact. The paper does not say how
            many. Those beyond them move when they are an eighth as many, all at once.

    The other arguments are ShadowKV's. A row whose prompt has fewer tokens than `rank` gives no
    basis for later keys: it keeps all that is generated exactly.
    """

    recent: int = 512

    rope: ClassVar[Literal["prompt", "all"]] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent < 1:
            raise ValueError(f"recent must be at least 1, got {self.recent}")

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        return ShadowPlusState([self._compress_row(row) for row in rows], rows, self)


@storable
class ShadowPlusState(ShadowState):
    """A ShadowState that grows.

    held: tokens of each row that are exact and no outliers. made: chunks of each row that have
    factors. moves: whether a row's tokens ever get factors; where some of the prompt are forgotten,
    those that are left do not go on from its chunks.
    """

    method: ShadowKVPlus

    def __init__(
        self, parts: Sequence[ShadowRow], rows: Sequence[Row], method: ShadowKVPlus
    ) -> None:
        super().__init__(parts, rows, method)
        self.held = [share.exact for share in self.shares]
        self.made = [share.chunks for share in self.shares]
        wanted = method.rank_of(rows[0].keys.shape[1] * rows[0].keys.shape[3])
        self.moves = [
            share.exact + share.chunks * method.chunk == row.tokens and part.left.shape[2] == wanted
            for share, part, row in zip(self.shares, parts, rows, strict=True)
        ]

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None, scale: float
    ) -> Tensor:
        # Not as soon as they came, but before the next ones: a draft's tokens can be taken back.
        self._move([self._movable(row) for row in range(len(self.held))])
        new = [keys.shape[2]] * len(self.held) if valid is None else valid.sum(1).tolist()
        self.held = [a + b for a, b in zip(self.held, new, strict=True)]
        return super().step(queries, keys, values, valid=valid, scale=scale)

    def _movable(self, row: int) -> int:
        """Chunks of a row that are to move now."""
        chunk, beyond = self.method.chunk, self.held[row] - self.method.recent
        enough = max(self.method.recent // 8, chunk)
        return beyond // chunk if self.moves[row] and beyond >= enough else 0

    def _move(self, counts: Sequence[int]) -> None:
        """Give each row's next `counts[b]` chunks factors, landmarks and a place in the store."""
        if max(counts) == 0:
            return
        chunk, most = self.method.chunk, max(counts)
        self._reserve(max(a + b for a, b in zip(self.made, counts, strict=True)))
        first = [share.outliers * chunk for share in self.shares]
        moved = []
        for row, count in enumerate(counts):
            part = slice(first[row], first[row] + count * chunk)
            keys, values = (x[:, :, part] for x in self.exact.row(row))
            at, end = self.made[row], self.made[row] + count
            left = self._projected(row, keys, slice(at * chunk, end * chunk))
            self.left[row, at * chunk : end * chunk] = left.to(self.left.dtype)
            means = chunk_mean(keys, chunk)
            self.landmarks[row, :, at:end] = means[0].to(self.landmarks.dtype)
            self.free[row, :, at:end] = True
            chunks = self.method.stored(values.unflatten(2, (count, chunk)).flatten(3))
            moved.append(F.pad(chunks.view(torch.uint8), (0, 0, 0, most - count)))
        rows = torch.cat(moved).view(self.store.dtype)
        self.store.append(rows, lengths=torch.tensor(counts))
        numbers = [count * chunk for count in counts]
        self.exact.drop(first, numbers)
        self.held = [a - b for a, b in zip(self.held, numbers, strict=True)]
        self.made = [a + b for a, b in zip(self.made, counts, strict=True)]
        self.chunks = max(self.made)
        self.selected = [self._granted(row) for row in range(len(self.made))]

    def _projected(self, row: int, keys: Tensor, at: slice) -> Tensor:
        """Left factor [n, r] of keys [1, H_kv, n, D] at these positions of their row."""
        if self.rope is not None:
            keys = unrotate(keys, *self.rope.row(row, at), layout=self.rope.rotation.layout)
        right = self.right[row : row + 1].to(keys.dtype)
        shared = right.new_empty(1, 1, 0, right.shape[2])
        return project(LowRank(shared, right), keys)[0, 0]

    def _granted(self, row: int) -> int:
        """Chunks that a step retrieves of a row: of the new ones as large a share as before."""
        share = self.shares[row]
        if share.chunks == 0:
            return self.made[row]
        before, now = (n - share.outliers for n in (share.chunks, self.made[row]))
        return share.selected * now // before

    def _reserve(self, chunks: int) -> None:
        """Room for so many chunks in every row."""
        room = self.free.shape[2]
        if chunks > room:
            more = max(chunks, room + room // 8) - room
            self.left = _grown(self.left, more * self.method.chunk)
            self.landmarks = _grown(self.landmarks, more)
            self.free = F.pad(self.free, (0, more))

    def crop(self, tokens: int) -> None:
        if tokens > min(self.held):
            raise ValueError(
                f"{tokens} tokens cannot be taken back: only the {min(self.held)} latest are exact"
            )
        super().crop(tokens)
        self.held = [held - tokens for held in self.held]

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        for name in ("held", "made", "moves"):
            setattr(self, name, [getattr(self, name)[row] for row in rows.tolist()])


def _grown(x: Tensor, more: int) -> Tensor:
    """x [..., n, d] as [..., n + more, d]."""
    new = x.new_empty(*x.shape[:-2], x.shape[-2] + more, x.shape[-1])
    new[..., : x.shape[-2], :] = x
    return new
