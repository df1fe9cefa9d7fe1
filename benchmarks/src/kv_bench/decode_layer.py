"""One layer at one decoding step, and what tells a case's result and picks right from wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import click
import torch
from torch import Tensor

from kv_bench.llama_layer import HEADS, KV_HEADS

GROUP = HEADS // KV_HEADS
SAME = 1e-5  # scores nearer than this to each other may be taken in either order


@dataclass(frozen=True)
class Case:
    """One step: `attend(pick())`. `wanted` computes the same apart, in float64, for what was
    picked, and refuses a wrong pick; `read` is the bytes that no way to do the step can spare."""

    pick: Callable[[], Tensor]
    attend: Callable[[Tensor], Tensor]
    wanted: Callable[[Tensor], Tensor]
    read: Callable[[Tensor], int]

    def step(self) -> Tensor:
        return self.attend(self.pick())


@dataclass(frozen=True)
class Layer:
    """Queries [B, H_q, 1, D] of one token and keys, values [B, H_kv, N, D] of the prompt; of
    Llama-3.1-8B where a case needs to know."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def batch(self) -> int:
        return self.k.shape[0]

    @property
    def tokens(self) -> int:
        return self.k.shape[2]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.k.device, dtype=self.k.dtype)

    def host(self, x: Tensor) -> Tensor:
        """Where methods put what they fetch from: pinned host memory, or simply memory."""
        return x.cpu().pin_memory() if x.is_cuda else x

    def heads(self) -> Iterator[tuple[int, int, Tensor]]:
        """Batch row, KV head and its queries [G, D] in float64."""
        _, kv_heads, _, size = self.k.shape
        grouped = self.q.double().view(self.batch, kv_heads, -1, size)
        for b in range(self.batch):
            for h in range(kv_heads):
                yield b, h, grouped[b, h]


def exact(q: Tensor, k: Tensor, v: Tensor, log_size: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D) + log_size) v in float64, for one KV head."""
    scores = q @ k.double().T / math.sqrt(q.shape[-1])
    if log_size is not None:
        scores = scores + log_size.double()
    return scores.softmax(-1) @ v.double()


def each_head(layer: Layer, result: Callable[[int, int, Tensor], Tensor]) -> Tensor:
    """`result(b, h, q)` of every KV head as [B, H_q, 1, D]."""
    out = torch.stack([result(b, h, q) for b, h, q in layer.heads()])
    return out.view_as(layer.q)


def nbytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def refuse_unless(right: bool, what: str) -> None:
    if not right:
        raise click.ClickException(f"{what} picked what its scores do not; no figure is given")
