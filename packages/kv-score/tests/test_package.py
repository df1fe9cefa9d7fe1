"""What holds for every function: nothing to do, gradients, documentation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import kv_score
from kv_score import (
    accumulated_attention,
    bound_scores,
    chunk_cosine,
    chunk_distance,
    chunk_mean,
    chunk_outliers,
    landmark_scores,
    page_bounds,
    page_mask,
    pool,
    segment_guided,
    segment_mean,
    segment_scores,
    segment_statistics,
    surprisal,
    window_attention,
)


def everything(batch: int, tokens: int, window: int, grad: bool = False) -> dict[str, torch.Tensor]:
    """One call of each function: 4 query heads, 2 KV heads, head size 3, 5 words."""

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(shape, requires_grad=grad)

    queries, keys = numbers(batch, 4, window, 3), numbers(batch, 2, tokens, 3)
    scores, offsets = numbers(batch, 2, tokens), torch.tensor([0, tokens])
    exists = torch.ones(batch, tokens, dtype=torch.bool)
    mean, entropy = segment_statistics(scores, offsets)
    lower, upper = page_bounds(keys, 2, key_mask=exists)
    pages = page_mask(exists, 2)
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    step = numbers(batch, 4, 1, 3)
    return {
        "window_attention": window_attention(queries, keys, key_mask=exists),
        "accumulated_attention": accumulated_attention(queries, keys, key_mask=exists),
        "pool avg": pool(scores, "avg", kernel=3),
        "pool max": pool(scores, "max", kernel=3),
        "segment_mean": segment_mean(keys, offsets, scores),
        "mean": mean,
        "entropy": entropy,
        "segment_guided": segment_guided(scores, offsets, beta=0.5, lam=1.0),
        "segment_scores": segment_scores(step[:, :, 0], keys, mask=exists),
        "landmark_scores": landmark_scores(queries, keys, mask=exists[:, None].expand(-1, 2, -1)),
        "chunk_cosine": chunk_cosine(keys, 2, key_mask=exists),
        "chunk_distance": chunk_distance(keys, 2, key_mask=exists),
        "chunk_mean": chunk_mean(keys, 2, key_mask=exists),
        "chunk_outliers": chunk_outliers(keys, 2, 2, key_mask=exists),
        "lower": lower,
        "upper": upper,
        "page_mask": pages,
        "bound_scores": bound_scores(step, lower, upper, mask=pages),
        "surprisal": surprisal(numbers(batch, tokens, 3), numbers(5, 3), ids, mask=exists),
    }


@pytest.mark.parametrize(
    ("batch", "tokens", "window"),
    [(0, 4, 2), (2, 0, 0), (0, 0, 0), (2, 1, 1), (2, 1, 0), (1, 4, 0)],
)
def test_little_or_nothing_to_score(batch: int, tokens: int, window: int) -> None:
    chunks, pages = tokens // 2, -(-tokens // 2)
    wanted = {
        "window_attention": (batch, 4, tokens - window),
        "accumulated_attention": (batch, 4, tokens),
        "pool avg": (batch, 2, tokens),
        "pool max": (batch, 2, tokens),
        "segment_mean": (batch, 2, 1, 3),
        "mean": (batch, 2, 1),
        "entropy": (batch, 2, 1),
        "segment_guided": (batch, 2, tokens),
        "segment_scores": (batch, 2, tokens),
        "landmark_scores": (batch, 2, tokens),
        "chunk_cosine": (batch, 2, chunks),
        "chunk_distance": (batch, 2, chunks),
        "chunk_mean": (batch, 2, chunks, 3),
        "chunk_outliers": (batch, 2, 2),
        "lower": (batch, 2, pages, 3),
        "upper": (batch, 2, pages, 3),
        "page_mask": (batch, pages),
        "bound_scores": (batch, 2, pages),
        "surprisal": (batch, tokens),
    }
    results = everything(batch, tokens, window)
    assert {name: tuple(result.shape) for name, result in results.items()} == wanted
    for name, result in results.items():
        if name == "mean" and tokens == 0:
            assert (result == -math.inf).all()  # a segment with nothing in it is forbidden
        else:
            assert result.isfinite().all(), name


def test_no_gradient_flows() -> None:
    assert not [name for name, x in everything(2, 6, 3, grad=True).items() if x.requires_grad]


def test_every_public_name_is_documented() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    for name in kv_score.__all__:
        text = getattr(kv_score, name).__doc__
        assert text and ("Shapes" in text or "Shape" in text), name
        assert f"| `{name}`" in readme, name
