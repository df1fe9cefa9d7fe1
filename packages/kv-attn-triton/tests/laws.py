"""What the law tests share: random problems, the float64 reference, tolerances, poison."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

# The interpreter runs a kernel in tens of milliseconds: 20 examples per law there, 200 for torch.
# A thorough profile raises both.
INTERPRETER = 10


def laws(share: int = 1):
    """The loaded profile's settings with its number of examples divided by `share`."""
    return settings(max_examples=max(5, settings().max_examples // share))


def both(**strategies):
    """The law for both implementations; the test's argument `impl` names the one."""

    def decorate(test):
        def law_for(impl, share):
            def law(**drawn):
                test(impl=impl, **drawn)

            law.__name__ = law.__qualname__ = f"{test.__name__}_{impl}"
            return laws(share)(given(**strategies)(law))

        checks = {"reference": law_for("reference", 1), "triton": law_for("triton", INTERPRETER)}

        @pytest.mark.parametrize("impl", list(checks))
        def run(impl):
            checks[impl]()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Largest error of out, over the largest |v| a row may weigh: a few roundings of the result, and
# for the half types of the probabilities, which multiply the values in the values' own type.
OUT = {torch.float32: 4e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
# Largest error of lse: float32 sums of exact products (the half types multiply exactly), with
# torch's fused kernel using a coarser exponential for bfloat16.
LSE = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 5e-4}


@dataclass(frozen=True)
class Problem:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_size: torch.Tensor
    lengths: torch.Tensor

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def with_(self, **changes) -> Problem:
        return replace(self, **changes)


@st.composite
def problems(draw, *, max_n=70, max_q=4, sizes=(8, 16, 20), dtypes=DTYPES, square=False):
    """Random q, k, v, log_size and ragged lengths. Values have their own head size."""
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    group, queries = draw(st.integers(1, 3)), draw(st.integers(1, max_q))
    n = draw(st.integers(0, max_n))
    size = draw(st.sampled_from(sizes))
    value_size = size if square or draw(st.booleans()) else draw(st.sampled_from(sizes))
    dtype = draw(st.sampled_from(dtypes))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.1, 1.0, 4.0]))
    normal = lambda *shape: torch.randn(shape, generator=rng)  # noqa: E731
    lengths = torch.randint(0, n + 1, (batch, heads), generator=rng, dtype=torch.int32)
    return Problem(
        (normal(batch, heads * group, queries, size) * spread).to(dtype),
        normal(batch, heads, n, size).to(dtype),
        normal(batch, heads, n, value_size).to(dtype),
        normal(batch, heads, n),
        torch.full_like(lengths, n) if draw(st.booleans()) else lengths,
    )


def naive(q, k, v, *, log_size=None, lengths=None, causal=False, scale=None, indices=None):
    """softmax(scale q k^T + log_size) v in float64, one query after the other."""
    batch, query_heads, queries, size = q.shape
    heads, n = k.shape[1], k.shape[2]
    scale = 1 / math.sqrt(size) if scale is None else scale
    out = torch.zeros(batch, query_heads, queries, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, query_heads, queries), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for head in range(query_heads):
            h = head // (query_heads // heads)
            listed = list(range(n if lengths is None else int(lengths[b, h])))
            if indices is not None:
                listed = [i for i in indices[b, h].tolist() if i >= 0]
            for j in range(queries):
                seen = listed[: max(0, len(listed) - queries + j + 1)] if causal else listed
                if not seen:
                    continue
                s = k[b, h, seen].double() @ q[b, head, j].double() * scale
                if log_size is not None:
                    s = s + log_size[b, h, seen].double()
                lse[b, head, j] = torch.logsumexp(s, 0)
                if lse[b, head, j] > -math.inf:
                    out[b, head, j] = torch.softmax(s, 0) @ v[b, h, seen].double()
    return out, lse


def agree(got, wanted, v, dtype=None):
    """out within OUT of the values' largest magnitude, lse within LSE (relative above 1)."""
    out, lse = got
    wanted_out, wanted_lse = (x.double() for x in wanted)
    dtype = dtype or out.dtype
    assert out.shape == wanted_out.shape and lse.shape == wanted_lse.shape
    assert lse.dtype == torch.float32
    assert not out.isnan().any() and not lse.isnan().any()
    finite = v.double()[v.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 1.0
    if out.numel():
        assert float((out.double() - wanted_out).abs().max()) <= OUT[dtype] * largest
    empty = wanted_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    gap = (lse.double() - wanted_lse)[~empty].abs()
    assert bool((gap <= LSE[dtype] * wanted_lse[~empty].abs().clamp_min(1)).all())


def poison_after(x, lengths):
    """x with NaN past each head's length."""
    x = x.clone()
    for b, row in enumerate(lengths.tolist()):
        for h, n in enumerate(row):
            x[b, h, n:] = torch.nan
    return x


def plain(function):
    """The function without the test-time shape checks, so that its own checks speak."""
    return inspect.unwrap(function)


LAYOUTS = ("slice", "halves", "transposed")


def relaid(k, v, layout):
    """k and v with the same content as views of larger, NaN-filled memory."""
    batch, heads, n, size = k.shape
    fresh = lambda *shape: torch.full(shape, torch.nan, dtype=k.dtype)  # noqa: E731
    if layout == "slice":
        views = [fresh(batch, heads, n + 5, x.shape[3])[:, :, :n] for x in (k, v)]
    elif layout == "halves":
        pair = fresh(batch, heads, n, size + v.shape[3])
        views = [pair[..., :size], pair[..., size:]]
    else:
        views = [fresh(batch, n, heads, x.shape[3]).transpose(1, 2) for x in (k, v)]
    return views[0].copy_(k), views[1].copy_(v)
