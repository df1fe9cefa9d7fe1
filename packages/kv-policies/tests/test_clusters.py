from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch import Tensor

import kv_policies as kp
from kv_policies import clusters, threshold

thetas = st.floats(-0.99, 0.999).map(lambda v: round(v, 3))


class TooClose(Exception):
    """A cosine that float32 and float64 may put on different sides of theta."""


Case = tuple[Tensor, Tensor, Tensor]


@st.composite
def cases(draw: st.DrawFn, longest: int = 30) -> Case:
    """Keys, offsets and valid: keys that lie in a few directions, some of length zero."""
    b, h, t = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(0, longest))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    d = draw(st.integers(1, 5))
    few = rng.normal(size=(3, d))
    keys = few[rng.integers(0, 3, (b, h, t))] + rng.normal(size=(b, h, t, d)) * rng.random()
    keys *= np.exp(rng.normal(size=(b, h, t, 1))) * (rng.random((b, h, t, 1)) > 0.05)
    batched = draw(st.booleans())
    rows = []
    for _ in range(b if batched else 1):
        cuts = np.unique(rng.integers(1, t, int(rng.integers(0, 6)))).tolist() if t > 1 else []
        rows.append([0, *cuts, t] if t else [0])
    width = max(map(len, rows))
    offsets = torch.tensor([r + [t] * (width - len(r)) for r in rows])
    valid = torch.from_numpy(rng.random((b, t)) > draw(st.sampled_from([0.0, 0.3])) - 0.01)
    return torch.from_numpy(keys).float(), offsets if batched else offsets[0], valid


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    size = np.linalg.norm(one) * np.linalg.norm(other)
    return float(one @ other / size) if size else 0.0


def slow(keys: Tensor, offsets: list[int], theta: float, valid: list[bool]) -> list[int]:
    """Algorithm 1, token by token, in float64."""
    rows = keys.double().numpy()
    seeds = [-1] * len(rows)
    for a, z in itertools.pairwise(offsets):
        for s in range(a, z):
            if not valid[s] or seeds[s] >= 0:
                continue
            seeds[s] = s
            for t in range(s + 1, z):
                if valid[t] and seeds[t] < 0:
                    similarity = cosine(rows[s], rows[t])
                    if abs(similarity - theta) < 1e-5:
                        raise TooClose
                    if similarity > theta:
                        seeds[t] = s
    return seeds


def expected_of(keys: Tensor, offsets: list[int], theta: float, valid: list[bool]) -> list[int]:
    """`slow`, for examples that it can call."""
    try:
        return slow(keys, offsets, theta, valid)
    except TooClose:
        reject()


def rows_of(case: Case) -> list[tuple[int, int, Tensor, list[int], list[bool]]]:
    keys, offsets, valid = case
    b, h = keys.shape[:2]
    table = offsets if offsets.ndim == 2 else offsets.expand(b, -1)
    return [
        (i, j, keys[i, j], table[i].tolist(), valid[i].tolist()) for i in range(b) for j in range(h)
    ]


@given(cases(), thetas)
def test_equals_the_algorithm_token_by_token(case: Case, theta: float) -> None:
    keys, offsets, valid = case
    got = kp.greedy_clusters(keys, offsets, theta, valid=valid)
    assert got.dtype == torch.int64
    for i, j, rows, cuts, ok in rows_of(case):
        assert got[i, j].tolist() == expected_of(rows, cuts, theta, ok)


@given(cases(), thetas, st.sampled_from([1, 3, 8]), st.sampled_from([1, 64]))
def test_blocks_and_slabs_do_not_show(case: Case, theta: float, block: int, slab: int) -> None:
    keys, offsets, valid = case
    for _, _, rows, cuts, ok in rows_of(case):
        expected_of(rows, cuts, theta, ok)
    expected = kp.greedy_clusters(keys, offsets, theta, valid=valid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clusters, "_TILE", block)
        patch.setattr(clusters, "_SLAB", slab)
        patch.setattr(clusters, "_FETCHED", slab)
        assert torch.equal(kp.greedy_clusters(keys, offsets, theta, valid=valid), expected)


@given(cases(), thetas)
def test_a_partition_within_chunks_and_theta_of_the_seed(case: Case, theta: float) -> None:
    keys, offsets, valid = case
    got = kp.greedy_clusters(keys, offsets, theta, valid=valid)
    for i, j, rows, cuts, ok in rows_of(case):
        seeds = got[i, j].tolist()
        chunk = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
        for t, s in enumerate(seeds):
            assert (s >= 0) == ok[t]
            if s >= 0:
                assert s <= t and seeds[s] == s and chunk[s] == chunk[t]
                assert s == t or cosine(rows[s].double().numpy(), rows[t].double().numpy()) > (
                    theta - 1e-5
                )


@given(cases())
def test_theta_one_merges_nothing_and_minus_one_leaves_one_per_chunk(case: Case) -> None:
    keys, offsets, _valid = case
    one = kp.greedy_clusters(keys.abs() + 0.5, offsets, 1.0)
    positions = torch.arange(keys.shape[2])
    assert (one == positions).all()
    least = kp.greedy_clusters(keys.abs() + 0.5, offsets, -1.0)
    for i, j, _, cuts, _ in rows_of(case):
        starts = {c for c in cuts if c < keys.shape[2]}
        assert set(least[i, j].tolist()) == starts


@given(cases(), thetas)
def test_a_row_and_head_equal_themselves_alone(case: Case, theta: float) -> None:
    keys, offsets, valid = case
    got = kp.greedy_clusters(keys, offsets, theta, valid=valid)
    each = torch.full(keys.shape[:2], theta)
    assert torch.equal(kp.greedy_clusters(keys, offsets, each, valid=valid), got)
    for i, j, rows, cuts, ok in rows_of(case):
        expected_of(rows, cuts, theta, ok)
        own = torch.tensor(sorted(set(cuts)))
        alone = kp.greedy_clusters(rows[None, None], own, theta, valid=valid[i : i + 1])
        assert torch.equal(alone[0, 0], got[i, j])


layouts = st.sampled_from(["tokens first", "part of a buffer", "every other", "dimension first"])


def laid_out(keys: Tensor, layout: str) -> Tensor:
    """The same numbers in other strides; NaN where nothing belongs to them."""
    if layout == "tokens first":
        return keys.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "dimension first":
        return keys.mT.contiguous().mT
    b, h, t, d = keys.shape
    buffer = keys.new_full((b + 1, h + 1, 2 * t + 3, d + 2), math.nan)
    step = 2 if layout == "every other" else 1
    view = buffer[1:, 1:, 1 : 1 + step * t : step, 1 : d + 1]
    view.copy_(keys)
    return view


@given(cases(), thetas, layouts)
def test_strides_do_not_show(case: Case, theta: float, layout: str) -> None:
    keys, offsets, valid = case
    expected = kp.greedy_clusters(keys, offsets, theta, valid=valid)
    view = laid_out(keys, layout)
    assert torch.equal(kp.greedy_clusters(view, offsets, theta, valid=valid), expected)


@given(cases(), thetas)
def test_keys_that_are_shared_need_no_copies(case: Case, theta: float) -> None:
    keys, offsets, valid = case
    shared = keys[:1, :1].expand(keys.shape)
    got = kp.greedy_clusters(shared, offsets, theta, valid=valid)
    assert torch.equal(got, kp.greedy_clusters(shared.clone(), offsets, theta, valid=valid))


@given(cases(), thetas, st.sampled_from([torch.bfloat16, torch.float16, torch.float64]))
def test_other_dtypes_give_what_their_float32_gives(
    case: Case, theta: float, dtype: torch.dtype
) -> None:
    keys, offsets, valid = case
    keys = keys.to(dtype)
    expected = kp.greedy_clusters(keys.float(), offsets, theta, valid=valid)
    assert torch.equal(kp.greedy_clusters(keys, offsets, theta, valid=valid), expected)


@given(cases(), thetas)
def test_padding_is_never_read(case: Case, theta: float) -> None:
    keys, offsets, valid = case
    poisoned = keys.masked_fill(~valid[:, None, :, None], math.nan)
    expected = kp.greedy_clusters(keys, offsets, theta, valid=valid)
    assert torch.equal(kp.greedy_clusters(poisoned, offsets, theta, valid=valid), expected)
    found = kp.threshold_for_budget(poisoned, offsets, 3, steps=3, valid=valid)
    for one, other in zip(
        found, kp.threshold_for_budget(keys, offsets, 3, steps=3, valid=valid), strict=True
    ):
        assert torch.equal(one, other)


def test_no_copy_of_the_whole_cache() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2048, 16, 256, generator=generator).transpose(1, 2)
    offsets = torch.tensor([0, *range(5, 1000, 9), 1300, 2048])
    with torch.profiler.profile(profile_memory=True) as run:
        kp.greedy_clusters(keys, offsets, 0.1)
    events = (e for e in run.profiler.kineto_results.events() if e.name() == "[memory]")
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert 0 < peak < keys.nbytes / 2


def test_a_chunk_of_many_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    # 64 directions, none of which lies close to these cosines from another.
    angle = torch.randint(0, 64, (1, 1, 500), generator=generator) * (math.pi / 32)
    keys = torch.stack([angle.cos(), angle.sin()], -1)
    for theta in (0.8, 0.999):
        got = kp.greedy_clusters(keys, torch.tensor([0, 450, 500]), theta)
        assert got[0, 0].tolist() == slow(keys[0, 0], [0, 450, 500], theta, [True] * 500)


@given(cases(), thetas, st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_merging_conserves_sums_and_tokens(case: Case, theta: float, dtype: torch.dtype) -> None:
    keys, offsets, valid = case
    keys = keys.to(dtype)
    values = keys.flip(-1).repeat(1, 1, 1, 2)
    seeds = kp.greedy_clusters(keys, offsets, theta, valid=valid)
    merged = kp.merge(keys, values, seeds)
    size = merged.log_size.double().exp()
    assert merged.log_size.dtype == torch.float32 and merged.keys.dtype == dtype
    tokens_left = valid.sum(-1, keepdim=True).double().expand(keys.shape[:2])
    assert torch.allclose(size.sum(-1), tokens_left)
    share = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for entries, tokens in ((merged.keys, keys), (merged.values, values)):
        kept = tokens.double() * valid[:, None, :, None]
        sums = (entries.double() * size[..., None]).sum(2)
        assert ((sums - kept.sum(2)).abs() <= share * (kept.abs().sum(2) + 1e-6)).all()


@given(cases(), thetas)
def test_merged_entries_are_the_means_of_their_clusters(case: Case, theta: float) -> None:
    keys, offsets, valid = case
    seeds = kp.greedy_clusters(keys, offsets, theta, valid=valid)
    merged = kp.merge(keys, keys * 2, seeds)
    for i, j, rows, _, _ in rows_of(case):
        own = sorted({s for s in seeds[i, j].tolist() if s >= 0})
        found = merged.seeds[i, j].tolist()
        assert found == own + [-1] * (len(found) - len(own))
        for n, s in enumerate(found):
            if s < 0:
                assert merged.log_size[i, j, n] == -math.inf
                assert not merged.keys[i, j, n].any() and not merged.values[i, j, n].any()
                continue
            members = rows[seeds[i, j] == s].double()
            assert torch.allclose(merged.keys[i, j, n].double(), members.mean(0), atol=1e-5)
            assert torch.allclose(merged.values[i, j, n].double(), 2 * members.mean(0), atol=1e-5)
            assert abs(merged.log_size[i, j, n].item() - math.log(len(members))) < 1e-6


@given(cases(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_merging_nothing_is_the_identity(case: Case, dtype: torch.dtype) -> None:
    keys = case[0].to(dtype)
    b, h, t, _ = keys.shape
    merged = kp.merge(keys, keys, torch.arange(t).expand(b, h, t))
    assert torch.equal(merged.keys, keys) and torch.equal(merged.values, keys)
    assert not merged.log_size.any()


@given(cases(), st.integers(0, 30), st.integers(0, 14))
def test_the_threshold_meets_the_budget_or_says_by_how_much_not(
    case: Case, budget: int, steps: int
) -> None:
    keys, offsets, valid = case
    found = kp.threshold_for_budget(keys, offsets, budget, steps=steps, valid=valid)
    seeds = kp.greedy_clusters(keys, offsets, found.theta, valid=valid)
    entries = (seeds == torch.arange(keys.shape[2])).sum(-1)
    assert torch.equal(entries, found.entries)
    assert torch.equal(found.excess, (entries - budget).clamp(min=0))
    assert (found.theta[found.excess > 0] == -1).all()
    fits = (valid.sum(-1) <= budget)[:, None].expand_as(found.theta)
    assert (found.theta[fits] == 1).all()


@given(cases(), st.integers(0, 30), st.integers(0, 200))
def test_what_is_kept_between_steps_does_not_show(case: Case, budget: int, keep: int) -> None:
    keys, offsets, valid = case
    expected = kp.threshold_for_budget(keys, offsets, budget, steps=4, valid=valid)

    def limited(*args: Any, **_: Any) -> clusters.Chunks:
        return clusters.Chunks(*args, keep=keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threshold, "Chunks", limited)
        patch.setattr(clusters, "_TILE", 8)
        got = kp.threshold_for_budget(keys, offsets, budget, steps=4, valid=valid)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@given(cases(), st.integers(0, 30), st.integers(0, 30))
def test_the_threshold_never_falls_when_the_budget_grows(case: Case, one: int, other: int) -> None:
    keys, offsets, valid = case
    low, high = (
        kp.threshold_for_budget(keys, offsets, budget, steps=6, valid=valid)
        for budget in sorted((one, other))
    )
    assert (low.theta <= high.theta).all()
    assert (low.excess >= high.excess).all()


keys, cuts = torch.ones(1, 1, 4, 2), torch.tensor([0, 2, 4])
seeds = torch.tensor([[[0, 0, 2, 2]]])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: kp.greedy_clusters(keys, cuts, 1.5), ValueError, r"theta .*\[-1, 1\], got 1.5"),
        (lambda: kp.greedy_clusters(keys, cuts, "a"), TypeError, "theta must be a number, got 'a'"),
        (
            lambda: kp.greedy_clusters(keys, cuts, torch.tensor([[2.0]])),
            ValueError,
            r"theta must be in \[-1, 1\], got 2.0 at \(0, 0\)",
        ),
        (lambda: kp.greedy_clusters(keys, cuts, torch.ones(3)), ValueError, r"theta .*got \[3\]"),
        (lambda: kp.greedy_clusters(keys[0], cuts, 0.5), ValueError, r"keys .*got \[1, 4, 2\]"),
        (lambda: kp.greedy_clusters(keys.long(), cuts, 0.5), TypeError, "keys .*torch.int64"),
        (lambda: kp.greedy_clusters(keys * math.nan, cuts, 0.5), ValueError, "keys .* got nan at"),
        (lambda: kp.greedy_clusters(keys, cuts[:2], 0.5), ValueError, r"offsets .*\[0, 2\]"),
        (
            lambda: kp.greedy_clusters(keys, cuts, 0.5, valid=torch.ones(1, 3, dtype=torch.bool)),
            ValueError,
            r"valid must have shape \[B, T\] = \[1, 4\], got \[1, 3\]",
        ),
        (lambda: kp.merge(keys, keys[:, :, :3], seeds), ValueError, "values must have shape"),
        (lambda: kp.merge(keys, keys, seeds.int()), TypeError, "seeds must be torch.int64"),
        (lambda: kp.merge(keys, keys, seeds + 2), ValueError, r"in \[-1, 4\), got 4 at"),
        (
            lambda: kp.merge(keys, keys, torch.tensor([[[1, 2, 2, 2]]])),
            ValueError,
            "own seed, got 1",
        ),
        (lambda: kp.merge(keys, keys.to("meta"), seeds), ValueError, "values .*cpu, got meta"),
        (lambda: kp.merge(keys, keys, seeds.to("meta")), ValueError, "seeds .*cpu, got meta"),
        (lambda: kp.merge(keys.int(), keys, seeds), TypeError, "keys must be floating point"),
        (lambda: kp.merge(keys, keys.int(), seeds), TypeError, "values must be floating point"),
        (lambda: kp.merge(keys, keys, seeds - 3), ValueError, r"in \[-1, 4\), got -3 at"),
        (
            lambda: kp.greedy_clusters(keys, cuts, torch.ones(1, 1, device="meta")),
            ValueError,
            "theta must be on the device of keys, cpu, got meta",
        ),
        (
            lambda: kp.greedy_clusters(keys, cuts, torch.tensor([[math.nan]])),
            ValueError,
            r"theta must be in \[-1, 1\], got nan at \(0, 0\)",
        ),
        (lambda: kp.greedy_clusters(keys, cuts, -1.01), ValueError, "theta .* got -1.01"),
        (lambda: kp.greedy_clusters(keys, cuts, math.nan), ValueError, "theta .* got nan"),
        (lambda: kp.greedy_clusters(keys, cuts.int(), 0.5), TypeError, "offsets .*torch.int32"),
        (lambda: kp.threshold_for_budget(keys, cuts, 1.5), TypeError, "budget .* got 1.5"),
        (lambda: kp.threshold_for_budget(keys, cuts, -1), ValueError, "budget .* got -1"),
        (lambda: kp.threshold_for_budget(keys, cuts, 1, steps=-1), ValueError, "steps .* got -1"),
    ],
)
def test_refuses(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("cluster", [kp.greedy_clusters, kp.threshold_for_budget])
@pytest.mark.parametrize(
    ("args", "valid", "message"),
    [
        ((keys, torch.tensor([0, 3, 2, 4])), None, r"increasing, got \[0, 3, 2, 4\]"),
        ((keys, cuts.to("meta")), None, "offsets must be on the device of keys, cpu, got meta"),
        (
            (keys, cuts),
            torch.ones(1, 4, dtype=torch.bool, device="meta"),
            "valid must be on the device of keys, cpu, got meta",
        ),
        ((keys * math.inf, cuts), None, r"keys .* got inf at \(0, 0, 0, 0\)"),
        ((keys * 1e20, cuts), None, r"keys .* at most 1e\+17 in magnitude, got 1.*e\+20"),
        ((keys[0], cuts), None, r"keys must have shape .* got \[1, 4, 2\]"),
    ],
)
def test_both_refuse(cluster: Any, args: Any, valid: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cluster(*args, 1, valid=valid)
