"""Laws of merging entries that are merged already."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_policies import merge


@st.composite
def clustered(draw, least=0):
    """Keys, values, seeds and sizes: every entry joins a random seed at or before it, or none."""
    b, h, t = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(least, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    keys, values = (torch.randn(b, h, t, d, generator=generator).to(dtype) for d in (3, 5))
    seeds = torch.empty(b, h, t, dtype=torch.int64)
    for row in range(b):
        for head in range(h):
            own = []
            for i in range(t):
                choice = int(torch.randint(-2, len(own) + 1, (), generator=generator))
                if choice == -2:
                    seeds[row, head, i] = -1
                elif 0 <= choice < len(own):
                    seeds[row, head, i] = own[choice]
                else:
                    own.append(i)
                    seeds[row, head, i] = i
    log_size = torch.randint(1, 50, (b, h, t), generator=generator).float().log()
    return keys, values, seeds, log_size.masked_fill(seeds < 0, torch.nan)


@given(clustered())
def test_merged_entries_are_the_weighted_means_of_their_members(case):
    keys, values, seeds, log_size = case
    merged = merge(keys, values, seeds, log_size=log_size)
    close = 1e-2 if keys.dtype == torch.bfloat16 else 1e-5
    for row in range(seeds.shape[0]):
        for head in range(seeds.shape[1]):
            own = sorted(set(seeds[row, head].tolist()) - {-1})
            assert merged.seeds[row, head].tolist() == own + [-1] * (
                merged.seeds.shape[2] - len(own)
            )
            for place, seed in enumerate(own):
                members = [i for i in range(seeds.shape[2]) if seeds[row, head, i] == seed]
                sizes = [float(log_size[row, head, i].double().exp()) for i in members]
                for given_, found in ((keys, merged.keys), (values, merged.values)):
                    mean = sum(
                        n * given_[row, head, i].double()
                        for n, i in zip(sizes, members, strict=True)
                    ) / sum(sizes)
                    torch.testing.assert_close(
                        found[row, head, place].double(), mean, atol=close, rtol=close
                    )
                size = merged.log_size[row, head, place].double().exp()
                assert float(size) == pytest.approx(sum(sizes), rel=1e-5)
                if len(members) == 1:
                    assert torch.equal(merged.keys[row, head, place], keys[row, head, seed])


@given(clustered(least=1))
def test_merging_twice_is_merging_once(case):
    keys, values, seeds, _ = case
    if keys.dtype == torch.bfloat16:
        keys, values = keys.float(), values.float()
    once = merge(keys, values, seeds)
    everything = torch.where(once.seeds >= 0, 0, -1)
    twice = merge(
        once.keys, once.values, everything, log_size=once.log_size.nan_to_num(neginf=torch.nan)
    )
    whole = torch.where(seeds >= 0, (seeds >= 0).int().argmax(-1, keepdim=True), -1)
    direct = merge(keys, values, whole)
    torch.testing.assert_close(twice.keys, direct.keys, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(twice.values, direct.values, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(twice.log_size, direct.log_size, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("unchecked")
def test_wrong_sizes_are_refused():
    keys, seeds = torch.zeros(1, 1, 2, 3), torch.tensor([[[0, 0]]])
    for log_size, error, text in (
        (torch.zeros(1, 1, 3), ValueError, r"log_size must have shape"),
        (torch.zeros(1, 1, 2, dtype=torch.float64), TypeError, "log_size"),
        (torch.tensor([[[0.0, torch.nan]]]), ValueError, "log_size"),
        (torch.tensor([[[0.0, torch.inf]]]), ValueError, "log_size"),
        (torch.zeros(1, 1, 2, device="meta"), ValueError, "log_size"),
    ):
        with pytest.raises(error, match=text):
            merge(keys, keys, seeds, log_size=log_size)
