from __future__ import annotations

import math

import pytest
import torch
from common import left_padding, normal, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kv_score import surprisal

shapes = st.tuples(st.integers(1, 3), st.integers(0, 16), st.integers(1, 12))  # B, T, V


def case(shape, seed, dtype=torch.float32):
    batch, tokens, vocab = shape
    hidden = normal(seed, batch, tokens, 4, dtype=dtype)
    weight = normal(seed + 1, vocab, 4, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    return hidden, weight, torch.randint(0, vocab, (batch, tokens), generator=generator)


@given(shapes, st.integers(1, 9), st.integers(1, 9), seeds)
def test_surprisal_equals_cross_entropy(shape, chunk, vocab_chunk, seed):
    hidden, weight, ids = case(shape, seed)
    got = surprisal(hidden, weight, ids, chunk=chunk, vocab_chunk=vocab_chunk)
    logits = hidden.double() @ weight.double().mT
    for row in range(shape[0]):
        for t in range(shape[1]):
            wanted = 0.0
            if t > 0:
                scores = logits[row, t - 1].tolist()
                wanted = math.log(math.fsum(map(math.exp, scores))) - scores[ids[row, t]]
            assert got[row, t].item() == pytest.approx(wanted, abs=1e-5)


@given(shapes, st.integers(1, 9), st.integers(1, 9), seeds)
def test_surprisal_does_not_depend_on_the_chunks(shape, chunk, vocab_chunk, seed):
    hidden, weight, ids = case(shape, seed)
    torch.testing.assert_close(
        surprisal(hidden, weight, ids, chunk=chunk, vocab_chunk=vocab_chunk),
        surprisal(hidden, weight, ids),
        atol=1e-5,
        rtol=1e-5,
    )


@given(shapes, seeds)
def test_surprisal_of_low_precision_is_that_of_its_own_logits(shape, seed):
    hidden, weight, ids = case(shape, seed, torch.bfloat16)
    got = surprisal(hidden, weight, ids)
    assert got.dtype == torch.float32
    logits = (hidden @ weight.mT).float()
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    # Products of other shapes round other last bits: one step of bfloat16 at this size.
    torch.testing.assert_close(got[:, 1:].flatten(), losses, atol=0.1, rtol=0.02)


@given(shapes, seeds)
def test_a_padded_row_equals_that_row_alone(shape, seed):
    hidden, weight, ids = case(shape, seed)
    mask, pads = left_padding(seed, shape[0], shape[1])
    hidden = hidden.masked_fill(~mask[..., None], math.nan)
    ids = ids.masked_fill(~mask, -100)
    got = surprisal(hidden, weight, ids, mask=mask, chunk=5)
    for row, pad in enumerate(pads):
        assert not got[row, :pad].any()
        alone = surprisal(hidden[row : row + 1, pad:], weight, ids[row : row + 1, pad:])
        torch.testing.assert_close(got[row : row + 1, pad:], alone)


@given(shapes, seeds)
def test_surprisals_of_all_words_are_a_distribution(shape, seed):
    hidden, weight, ids = case(shape, seed)
    words = [surprisal(hidden, weight, torch.full_like(ids, v)) for v in range(shape[2])]
    total = torch.stack(words).neg().exp().sum(0)[:, 1:]
    torch.testing.assert_close(total, torch.ones_like(total))
    assert all((word > -1e-5).all() for word in words)


class Largest(TorchDispatchMode):
    """Notes the largest new tensor (not a view) that any operation gives out."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.numbers = max(self.numbers, result.numel())
        return result


@settings(max_examples=50)
@given(st.integers(1, 8), st.integers(1, 40))
def test_no_more_than_one_chunk_of_logits_is_held(chunk, vocab_chunk):
    hidden, weight, ids = case((1, 20, 97), 0)
    with Largest() as largest:
        surprisal(hidden, weight, ids, chunk=chunk, vocab_chunk=vocab_chunk)
    # Beside the logits: the result, the ids, and `chunk` states of 4 numbers.
    assert largest.numbers <= max(chunk * vocab_chunk, 40, 4 * chunk)


H, W, IDS = torch.zeros(2, 5, 8), torch.zeros(7, 8), torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("hidden", "weight", "ids", "options", "error", "text"),
    [
        (H[0], W, IDS, {}, ValueError, "hidden must have 3 dimensions"),
        (H, W[0], IDS, {}, ValueError, "lm_head_weight must have 2 dimensions"),
        (H, W[:, :4], IDS, {}, ValueError, r"must be \[V, 8\] of torch.float32 .* got \(7, 4\)"),
        (H, W.double(), IDS, {}, ValueError, "of torch.float32 like hidden, got .* torch.float64"),
        (H, W, IDS.int(), {}, TypeError, "ids must be of dtype torch.int64, got torch.int32"),
        (H, W, IDS[:, :4], {}, ValueError, r"ids must have shape \(2, 5\), got \(2, 4\)"),
        (H, W, IDS + 7, {}, ValueError, "ids must lie within the 7 words, got 7 to 7"),
        (H, W, IDS - 1, {}, ValueError, "ids must lie within the 7 words, got -1 to -1"),
        (H, W.to("meta"), IDS, {}, ValueError, "lm_head_weight must be on cpu"),
        (H, W, IDS, {"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        (H, W, IDS, {"vocab_chunk": 0}, ValueError, "vocab_chunk must be at least 1, got 0"),
        (H, W, IDS, {"mask": IDS}, TypeError, "mask must be of dtype torch.bool, got torch.int64"),
    ],
)
def test_errors(plain, hidden, weight, ids, options, error, text):
    with pytest.raises(error, match=text):
        surprisal(hidden, weight, ids, **options)
