"""Laws of `span_attention`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import DTYPES, INTERPRETER, LSE, OUT, both, laws, naive, plain

import kv_attn_triton as kv
from kv_attn_triton import attention, merge_states, span_attention
from kv_attn_triton import spans as public
from kv_attn_triton.kernels import launch
from kv_attn_triton.kernels import spans as kernel
from kv_attn_triton.reference import spans as plain_spans


@dataclass(frozen=True)
class Spans:
    """Keys and values of ragged spans as factors, and the spans that are attended."""

    q: torch.Tensor
    k_left: torch.Tensor
    k_right: torch.Tensor
    v_left: torch.Tensor
    v_right: torch.Tensor
    offsets: torch.Tensor
    spans: torch.Tensor

    @property
    def longest(self):
        return max(1, int(self.offsets.diff(dim=-1).max())) if self.offsets.shape[-1] > 1 else 1

    def call(self, impl="auto", **kw):
        args = [self.q, self.k_left, self.k_right, self.v_left, self.v_right, self.offsets]
        return span_attention(*args, self.spans, impl=impl, **{"longest": self.longest, **kw})

    def bounds(self, b):
        return (self.offsets if self.offsets.dim() == 1 else self.offsets[b]).tolist()

    def rebuilt(self):
        """Keys, values float64 [B, H, N, D] and, per head, the entries of its spans."""
        batch, heads, n = self.k_left.shape[:3]
        made = [
            torch.zeros(batch, heads, n, right.shape[4], dtype=torch.float64)
            for right in (self.k_right, self.v_right)
        ]
        entries = {}
        for b in range(batch):
            edge = self.bounds(b)
            for h in range(heads):
                entries[b, h] = []
                for s in self.spans[b, h].tolist():
                    if s < 0:
                        continue
                    here = slice(edge[s], edge[s + 1])
                    entries[b, h] += range(edge[s], edge[s + 1])
                    for out, left, right in zip(
                        made,
                        (self.k_left, self.v_left),
                        (self.k_right, self.v_right),
                        strict=True,
                    ):
                        out[b, h, here] = left[b, h, here].double() @ right[b, h, s].double()
        return *made, entries

    def wanted(self, scale=None):
        k, v, entries = self.rebuilt()
        width = max((len(x) for x in entries.values()), default=0)
        indices = torch.full((*k.shape[:2], width), -1)
        for (b, h), x in entries.items():
            indices[b, h, : len(x)] = torch.tensor(x, dtype=torch.int64)
        return naive(self.q, k, v, indices=indices, scale=scale), (k, v)


@st.composite
def problems(draw, dtypes=DTYPES):
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    group, queries = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    size, value_size = draw(st.sampled_from([(8, 8), (20, 16), (16, 5), (80, 80), (96, 64)]))
    rank, value_rank = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    count, n = draw(st.integers(0, 6)), draw(st.integers(0, 40))
    dtype = draw(st.sampled_from(dtypes))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    normal = lambda *shape: torch.randn(shape, generator=rng).to(dtype)  # noqa: E731
    shared = draw(st.booleans())
    offsets = torch.randint(0, n + 1, (1 if shared else batch, count + 1), generator=rng)
    offsets = offsets.sort(-1).values
    width = draw(st.integers(0, count + 2))
    order = torch.rand(batch, heads, count, generator=rng).argsort(-1)
    spans = torch.nn.functional.pad(order, (0, 3), value=-1)[..., :width]
    dropped = torch.rand(spans.shape, generator=rng) < draw(st.sampled_from([0.0, 0.4, 1.0]))
    return Spans(
        normal(batch, heads * group, queries, size),
        normal(batch, heads, n, rank),
        normal(batch, heads, count, rank, size) / math.sqrt(rank),
        normal(batch, heads, n, value_rank),
        normal(batch, heads, count, value_rank, value_size) / math.sqrt(value_rank),
        offsets[0] if shared else offsets,
        spans.masked_fill(dropped, -1).contiguous(),
    )


def near(p, got, wanted, values):
    """out within OUT of the largest value, lse within LSE: factors are multiplied in float32."""
    (out, lse), (wanted_out, wanted_lse) = got, wanted
    assert out.dtype == p.q.dtype and lse.dtype == torch.float32
    assert out.shape == wanted_out.shape and lse.shape == wanted_lse.shape
    assert not out.isnan().any() and not lse.isnan().any()
    largest = float(values.abs().max()) if values.numel() else 0.0
    gap = (out.double() - wanted_out).abs()
    assert gap.numel() == 0 or float(gap.max()) <= OUT[p.q.dtype] * largest
    empty = wanted_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    shift = (lse.double() - wanted_lse)[~empty].abs()
    assert bool((shift <= LSE[torch.float32] * wanted_lse[~empty].abs().clamp_min(1)).all())


@both(p=problems(), scale=st.sampled_from([None, 0.3]))
def test_equals_rebuilding_every_key_and_value(impl, p, scale):
    wanted, (_, values) = p.wanted(scale)
    near(p, p.call(impl, scale=scale), wanted, values)


@laws(2)
@given(p=problems(), elements=st.integers(1, 2000))
def test_any_number_of_spans_at_a_time(p, elements):
    wanted, (_, values) = p.wanted()
    with patch.object(plain_spans, "FETCHED", elements):
        near(p, p.call("reference"), wanted, values)


@laws(INTERPRETER)
@given(p=problems(), entries=st.integers(1, 20), processors=st.integers(1, 4))
def test_spans_cut_into_pieces_and_shared_by_any_number_of_programs(p, entries, processors):
    wanted, (_, values) = p.wanted()
    with (
        patch.object(kernel, "PIECE", entries),
        patch.object(launch, "_processors", lambda device: processors),
    ):
        near(p, p.call("triton"), wanted, values)


@both(p=problems())
def test_poison_in_spans_that_are_not_attended_never_leaks(impl, p):
    batch, heads, n = p.k_left.shape[:3]
    entry = torch.ones(batch, heads, n, dtype=torch.bool)
    span = torch.ones(p.k_right.shape[:3], dtype=torch.bool)
    for b in range(batch):
        edge = p.bounds(b)
        for h in range(heads):
            for s in p.spans[b, h].tolist():
                if s >= 0:
                    entry[b, h, edge[s] : edge[s + 1]] = False
                    span[b, h, s] = edge[s] == edge[s + 1]
    rows = lambda x: x.masked_fill(entry.unsqueeze(-1), torch.nan)  # noqa: E731
    bases = lambda x: x.masked_fill(span[..., None, None], torch.nan)  # noqa: E731
    dirty = replace(
        p,
        k_left=rows(p.k_left),
        k_right=bases(p.k_right),
        v_left=rows(p.v_left),
        v_right=bases(p.v_right),
    )
    got, clean = dirty.call(impl), p.call(impl)
    assert torch.equal(got[0], clean[0]) and torch.equal(got[1], clean[1])


@both(p=problems(dtypes=(torch.float32,)), more=st.integers(1, 9))
def test_a_larger_bound_on_the_length_changes_nothing(impl, p, more):
    wanted, (_, values) = p.wanted()
    near(p, p.call(impl, longest=p.longest + more), wanted, values)


@both(p=problems(dtypes=(torch.float32,)))
def test_one_softmax_over_spans_and_exact_entries(impl, p):
    """Merged with attention over other entries: attention over all of them."""
    (out, lse), (_, values) = p.wanted()
    k, v = torch.randn(2, *p.k_left.shape[:2], 7, p.q.shape[3])
    v = v[..., :1].expand(-1, -1, -1, values.shape[3]).contiguous()
    exact = naive(p.q, k, v)
    top = torch.maximum(lse, exact[1])
    shares = [(x - top).exp().unsqueeze(-1) for x in (lse, exact[1])]
    wanted = (shares[0] * out + shares[1] * exact[0]) / (shares[0] + shares[1])
    total = top + (shares[0] + shares[1]).squeeze(-1).log()
    got = merge_states([p.call(impl), attention(p.q, k, v)])
    near(p, got, (wanted, total), torch.cat([values.flatten(), v.double().flatten()]))


@both(p=problems(), seed=st.integers(0, 99))
def test_lists_in_any_order_and_in_parts_equal_the_whole(impl, p, seed):
    wanted, (_, values) = p.wanted()
    rng = torch.Generator().manual_seed(seed)
    order = torch.rand(p.spans.shape, generator=rng).argsort(-1)
    mixed, cut = p.spans.gather(2, order), p.spans.shape[2] // 3
    parts = [replace(p, spans=x.contiguous()) for x in (mixed[..., :cut], mixed[..., cut:])]
    near(p, merge_states([part.call(impl) for part in parts]), wanted, values)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_nothing_attended_is_zero(impl):
    p = Spans(
        torch.ones(1, 2, 1, 4),
        torch.full((1, 1, 3, 2), torch.nan),
        torch.full((1, 1, 1, 2, 4), torch.nan),
        torch.full((1, 1, 3, 2), torch.nan),
        torch.full((1, 1, 1, 2, 4), torch.nan),
        torch.tensor([0, 3]),
        torch.tensor([[[-1, -1]]]),
    )
    out, lse = p.call(impl)
    assert torch.equal(out, torch.zeros(1, 2, 1, 4)) and bool((lse == -math.inf).all())


@pytest.mark.parametrize("rank", [128, 129])
def test_auto_takes_the_kernel_up_to_its_largest_rank(rank, monkeypatch):
    """As on CUDA, where `auto` may take it."""

    def kernel_ran(*args):
        raise AssertionError("the kernel ran")

    monkeypatch.setattr(public, "use_triton", lambda impl, tensor: True)
    monkeypatch.setattr(kernel, "span_attention", kernel_ran)
    wide = {"k_left": torch.ones(1, 2, 5, rank), "k_right": torch.ones(1, 2, 2, rank, 8)}
    if rank <= public.RANKS:
        with pytest.raises(AssertionError, match="the kernel ran"):
            span_attention(**{**GOOD, **wide})
    else:
        assert span_attention(**{**GOOD, **wide})[0].shape == (1, 4, 1, 6)


GOOD = {
    "q": torch.ones(1, 4, 1, 8),
    "k_left": torch.ones(1, 2, 5, 3),
    "k_right": torch.ones(1, 2, 2, 3, 8),
    "v_left": torch.ones(1, 2, 5, 4),
    "v_right": torch.ones(1, 2, 2, 4, 6),
    "offsets": torch.tensor([0, 2, 5]),
    "spans": torch.tensor([[[0], [1]]]),
    "longest": 3,
}
BAD = {
    "rank of q": ({"q": GOOD["q"][0]}, ValueError, "q must have 4 dimensions"),
    "rank of k_right": (
        {"k_right": GOOD["k_right"][0]},
        ValueError,
        "k_right must have 5 dimensions",
    ),
    "float64": (
        {"q": GOOD["q"].double()},
        TypeError,
        "q must be float32, bfloat16 or float16, got torch.float64",
    ),
    "dtype": (
        {"v_left": GOOD["v_left"].half()},
        TypeError,
        "v_left must have q's dtype torch.float32, got torch.float16",
    ),
    "device": ({"v_right": GOOD["v_right"].to("meta")}, ValueError, "v_right must be on q's"),
    "batch": (
        {"q": torch.ones(2, 4, 1, 8)},
        ValueError,
        "k_left must have shape [2, 2, 5, 3], got [1, 2, 5, 3]",
    ),
    "heads": (
        {"q": GOOD["q"][:, :3]},
        ValueError,
        "q must have a multiple of the 2 KV heads, got 3 query heads",
    ),
    "head size": (
        {"q": torch.ones(1, 4, 1, 7)},
        ValueError,
        "k_right must have shape [1, 2, 2, 3, 7], got [1, 2, 2, 3, 8]",
    ),
    "entries": (
        {"v_left": GOOD["v_left"][:, :, :4]},
        ValueError,
        "v_left must have shape [1, 2, 5, 4], got [1, 2, 4, 4]",
    ),
    "rank of values": (
        {"v_left": GOOD["v_left"][..., :3]},
        ValueError,
        "v_right must have shape [1, 2, 2, 3, 6], got [1, 2, 2, 4, 6]",
    ),
    "strides": (
        {"k_right": torch.ones(1, 2, 2, 3, 9)[..., :8]},
        ValueError,
        "k_right must have contiguous [R, D] blocks, got strides (108, 54, 27, 9, 1)",
    ),
    "spans": (
        {"spans": torch.tensor([[[0], [2]]])},
        ValueError,
        "spans must be -1 (skipped) or between 0 and 1, got 2",
    ),
    "spans dtype": (
        {"spans": GOOD["spans"].int()},
        TypeError,
        "spans must be int64, got torch.int32",
    ),
    "longest": ({"longest": 0}, ValueError, "longest must be at least 1, got 0"),
    "offsets dtype": (
        {"offsets": GOOD["offsets"].int()},
        TypeError,
        "offsets must be int64, got torch.int32",
    ),
    "offsets shape": (
        {"offsets": torch.tensor([0, 5])},
        ValueError,
        "offsets must have shape [3] or [1, 3], got [2]",
    ),
    "offsets device": (
        {"offsets": GOOD["offsets"].to("meta")},
        ValueError,
        "offsets must be on q's device cpu, got meta",
    ),
    "offsets range": (
        {"offsets": torch.tensor([0, 3, 6])},
        ValueError,
        "offsets must lie between 0 and 5, got 6",
    ),
    "falling offsets": (
        {"offsets": torch.tensor([3, 2, 5])},
        ValueError,
        "offsets must bound spans of 0 to 3 entries (longest), got -1",
    ),
    "long span": (
        {"longest": 2},
        ValueError,
        "offsets must bound spans of 0 to 2 entries (longest), got 3",
    ),
    "scale": ({"scale": math.nan}, ValueError, "scale must be finite, got nan"),
    "impl": (
        {"impl": "cpu"},
        ValueError,
        "impl must be 'auto', 'triton' or 'reference', got 'cpu'",
    ),
    "rank for the kernel": (
        {"k_left": torch.ones(1, 2, 5, 129), "k_right": torch.ones(1, 2, 2, 129, 8)}
        | {"impl": "triton"},
        ValueError,
        "impl='triton' cannot be met: ranks up to 128 fit, got 129",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    changes, error, message = BAD[case]
    with pytest.raises(error, match=re.escape(message)):
        plain(kv.span_attention)(**{**GOOD, **changes})
