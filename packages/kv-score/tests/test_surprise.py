from __future__ import annotations

import math

import pytest
import torch
from common import left_padding, normal, peak_bytes, seeds, uniform
from hypothesis import given
from hypothesis import strategies as st

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


@given(shapes, seeds, st.booleans(), st.floats(0.1, 8), st.none() | st.floats(0.5, 30))
def test_a_head_may_add_scale_and_cap(shape, seed, biased, scale, softcap):
    hidden, weight, ids = case(shape, seed)
    bias = normal(seed + 2, shape[2]) if biased else None
    options = {"bias": bias, "logit_scale": scale, "softcap": softcap}
    got = surprisal(hidden, weight, ids, vocab_chunk=5, **options)
    logits = (hidden.double() @ weight.double().mT + (0 if bias is None else bias)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    wanted = torch.zeros(ids.shape, dtype=torch.float64)
    spread = logits.exp().sum(-1).log()[:, :-1]
    wanted[:, 1:] = spread - logits[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-4)


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
def test_surprisal_of_low_precision_is_off_by_no_more_than_its_logits(shape, seed):
    hidden, weight, ids = case(shape, seed, torch.bfloat16)
    got = surprisal(hidden, weight, ids)
    assert got.dtype == torch.float32
    logits = hidden.double() @ weight.double().mT
    total = logits.exp().sum(-1).log()[:, :-1]
    wanted = total - logits[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    # A logit is one number of bfloat16, off by at most 2 ** -8 of its size.
    slack = 2**-7 * logits.abs().amax(-1)[:, :-1] + 1e-5
    assert ((got[:, 1:] - wanted).abs() <= slack).all()


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
def test_holes_and_their_followers_have_none(shape, seed):
    hidden, weight, ids = case(shape, seed)
    mask = uniform(seed, shape[0], shape[1]) < 0.6
    got = surprisal(
        hidden.masked_fill(~mask[..., None], math.nan),
        weight,
        ids.masked_fill(~mask, -1),
        mask=mask,
    )
    logits = hidden.double() @ weight.double().mT
    for row in range(shape[0]):
        for t in range(shape[1]):
            wanted = 0.0
            if t > 0 and mask[row, t - 1] and mask[row, t]:
                scores = logits[row, t - 1].tolist()
                wanted = math.log(math.fsum(map(math.exp, scores))) - scores[ids[row, t]]
            assert got[row, t].item() == pytest.approx(wanted, abs=1e-5)


@given(shapes, seeds)
def test_surprisals_of_all_words_are_a_distribution(shape, seed):
    hidden, weight, ids = case(shape, seed)
    words = [surprisal(hidden, weight, torch.full_like(ids, v)) for v in range(shape[2])]
    total = torch.stack(words).neg().exp().sum(0)[:, 1:]
    torch.testing.assert_close(total, torch.ones_like(total))
    assert all((word > -1e-5).all() for word in words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("chunk", "vocab_chunk"), [(64, 1024), (16, 4096), (200, 300)])
def test_no_more_than_one_chunk_of_logits_is_held(dtype, chunk, vocab_chunk):
    hidden, weight, ids = case((1, 200, 9000), 0, dtype)
    peak = peak_bytes(lambda: surprisal(hidden, weight, ids, chunk=chunk, vocab_chunk=vocab_chunk))
    # Beside the logits: the result, where it goes, and a few numbers per position.
    assert peak <= 4 * chunk * vocab_chunk + 100 * 200


H, W, IDS = torch.zeros(2, 5, 8), torch.zeros(7, 8), torch.zeros(2, 5, dtype=torch.int64)

META = H.to("meta"), W.to("meta"), IDS.to("meta")


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
        (H, W, IDS.to("meta"), {}, ValueError, "ids must be on cpu like the other .*, got meta"),
        (H.to("meta"), W, IDS, {}, ValueError, "lm_head_weight must be on meta like .*, got cpu"),
        (*META, {}, ValueError, "ids must hold values, got a tensor on meta"),
        (H, W, IDS, {"mask": IDS.to("meta") > 0}, ValueError, "mask must be on cpu .*, got meta"),
        (H.long(), W, IDS, {}, TypeError, "hidden must be of a floating dtype, got torch.int64"),
        (None, W, IDS, {}, TypeError, "hidden must be a torch.Tensor, got NoneType"),
        (H, W, IDS, {"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        (H, W, IDS, {"vocab_chunk": 0}, ValueError, "vocab_chunk must be at least 1, got 0"),
        (H, W, IDS, {"bias": W}, ValueError, "bias must have 1 dimensions?"),
        (H, W, IDS, {"bias": W[:6, 0]}, ValueError, r"bias must have shape \(7,\), got \(6,\)"),
        (H, W, IDS, {"logit_scale": 0.0}, ValueError, "logit_scale must be finite and above 0"),
        (H, W, IDS, {"softcap": -1.0}, ValueError, "softcap must be finite and above 0, got -1.0"),
        (H, W, IDS, {"mask": IDS}, TypeError, "mask must be of dtype torch.bool, got torch.int64"),
    ],
)
def test_errors(plain, hidden, weight, ids, options, error, text):
    with pytest.raises(error, match=text):
        surprisal(hidden, weight, ids, **options)
