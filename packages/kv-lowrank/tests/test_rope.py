from __future__ import annotations

import math

import pytest
import torch
from common import normal, seeds
from hypothesis import given
from hypothesis import strategies as st

from kv_lowrank import rope, rotate, unrotate

layouts = st.sampled_from(["half", "interleaved"])
tables = st.sampled_from([None, "half", "interleaved", "single"])
halves = st.integers(1, 5)  # pairs that turn
shapes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 6))  # B, H, T


def table_of(angles: torch.Tensor, table: str, scale: float = 1.0):
    """Cosines and sines of angles [..., R/2], each frequency named as the layout wants it."""
    if table == "half":
        angles = torch.cat((angles, angles), -1)
    elif table == "interleaved":
        angles = angles.repeat_interleave(2, -1)
    return angles.cos() * scale, angles.sin() * scale


def angles_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2000 - 1000


def turned(x: torch.Tensor, angles: torch.Tensor, layout: str, scale: float) -> torch.Tensor:
    """Each pair as a complex number times scale * exp(i angle), in float64, one pair at a time."""
    out, pairs = x.double().clone(), angles.shape[-1]
    for i in range(pairs):
        a, b = (i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1)
        factor = torch.polar(
            torch.full_like(angles[..., i], scale).double(), angles[..., i].double()
        )
        number = torch.complex(x[..., a].double(), x[..., b].double()) * factor
        out[..., a], out[..., b] = number.real, number.imag
    return out


@given(shapes, halves, st.integers(0, 4), layouts, tables, st.floats(0.5, 2), seeds)
def test_rotation_is_a_complex_product(shape, pairs, rest, layout, table, scale, seed):
    x = normal(seed, *shape, 2 * pairs + rest)
    angles = angles_of(seed + 1, shape[0], shape[2], pairs)
    cos, sin = table_of(angles, table or layout, scale)
    got = rotate(x, cos, sin, layout=layout, table=table)
    wanted = turned(x, angles[:, None].expand(*shape, pairs), layout, scale)
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(got[..., 2 * pairs :], x[..., 2 * pairs :])


@given(shapes, halves, st.integers(0, 4), layouts, tables, st.floats(0.5, 2), seeds)
def test_unrotate_is_the_inverse(shape, pairs, rest, layout, table, scale, seed):
    x = normal(seed, *shape, 2 * pairs + rest)
    cos, sin = table_of(angles_of(seed + 1, shape[0], shape[2], pairs), table or layout, scale)
    options = {"layout": layout, "table": table}
    there = rotate(x, cos, sin, **options)
    torch.testing.assert_close(unrotate(there, cos, sin, **options), x, atol=1e-5, rtol=1e-5)
    back = unrotate(x, cos, sin, **options)
    torch.testing.assert_close(rotate(back, cos, sin, **options), x, atol=1e-5, rtol=1e-5)


@given(shapes, halves, layouts, st.sampled_from([torch.bfloat16, torch.float16]), seeds)
def test_low_precision_rounds_once_and_undoes_rounded_tables(shape, pairs, layout, dtype, seed):
    x = normal(seed, *shape, 2 * pairs, dtype=dtype)
    cos, sin = table_of(angles_of(seed + 1, shape[0], shape[2], pairs), layout)
    cos, sin = cos.to(dtype), sin.to(dtype)
    got = rotate(x, cos, sin, layout=layout)
    exact = rotate(x.float(), cos.float(), sin.float(), layout=layout)
    assert got.dtype == dtype and torch.equal(got, exact.to(dtype))
    back = unrotate(exact, cos, sin, layout=layout)
    torch.testing.assert_close(back, x.float(), atol=1e-5, rtol=1e-5)


@given(shapes, halves, layouts, seeds)
def test_lengths_are_kept(shape, pairs, layout, seed):
    x = normal(seed, *shape, 2 * pairs)
    cos, sin = table_of(angles_of(seed + 1, shape[0], shape[2], pairs), layout)
    torch.testing.assert_close(
        rotate(x, cos, sin, layout=layout).norm(dim=-1), x.norm(dim=-1), atol=1e-5, rtol=1e-5
    )


@given(halves, st.integers(0, 4), layouts, st.integers(0, 50), st.integers(0, 50), seeds)
def test_dot_products_depend_on_the_distance_only(pairs, rest, layout, one, other, seed):
    q, k = normal(seed, 2, 2 * pairs + rest), normal(seed + 1, 2, 2 * pairs + rest)
    speed = 10.0 ** -torch.arange(pairs, dtype=torch.float64)

    def dot(position: int, shift: int) -> torch.Tensor:
        places = torch.tensor([[position], [position + shift]])
        cos, sin = table_of(places * speed, layout)
        turned_q = rotate(q.double(), cos[:1], sin[:1], layout=layout)
        turned_k = rotate(k.double(), cos[1:], sin[1:], layout=layout)
        return (turned_q * turned_k).sum(-1)

    torch.testing.assert_close(dot(one, 3), dot(other, 3), atol=1e-9, rtol=1e-9)


@given(shapes, halves, layouts, seeds)
def test_tables_of_every_rank_agree(shape, pairs, layout, seed):
    batch, heads, tokens = shape
    x = normal(seed, *shape, 2 * pairs + 1)
    cos, sin = table_of(angles_of(seed + 1, tokens, pairs), layout)
    flat = rotate(x, cos, sin, layout=layout)
    for lead in ((batch,), (batch, 1), (batch, heads), (1, 1)):
        view = [part.expand(*lead, *part.shape) for part in (cos, sin)]
        assert torch.equal(rotate(x, *view, layout=layout), flat)
    assert torch.equal(rotate(x[0], cos, sin, layout=layout), flat[0])


@given(shapes, halves, st.integers(0, 2), layouts, st.integers(1, 40), seeds)
def test_blocks_do_not_change_the_result(shape, pairs, rest, layout, block, seed):
    x = normal(seed, *shape, 2 * pairs + rest)
    for rows in {1, shape[2]}:  # one row of the table for all tokens, or one for each
        cos, sin = table_of(angles_of(seed + 1, rows, pairs), layout)
        for function in (rotate, unrotate):
            whole = function(x, cos, sin, layout=layout)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(rope, "_BLOCK", block)
                leaf = x.clone().requires_grad_()
                parts = function(leaf, cos, sin, layout=layout)
            assert torch.equal(parts, whole)
            parts.sum().backward()
            wanted = torch.ones_like(x)
            back = unrotate if function is rotate else rotate
            # A rotation's transpose is its inverse.
            torch.testing.assert_close(
                leaf.grad, back(wanted, cos, sin, layout=layout), atol=1e-5, rtol=1e-5
            )


X, C = torch.zeros(2, 3, 5, 8), torch.zeros(2, 5, 8)


@pytest.mark.parametrize("function", [rotate, unrotate])
@pytest.mark.parametrize(
    ("x", "cos", "sin", "options", "error", "text"),
    [
        (None, C, C, {}, TypeError, "x must be a torch.Tensor, got NoneType"),
        (X.int(), C, C, {}, TypeError, "x must be of a floating dtype, got torch.int32"),
        (X, C.int(), C, {}, TypeError, "cos must be of a floating dtype"),
        (X, C, C.int(), {}, TypeError, "sin must be of a floating dtype"),
        (X, C, C[..., :6], {}, ValueError, r"cos and sin must have one shape, got \(2, 5, 8\) and"),
        (X, C[..., :5], C[..., :5], {}, ValueError, "an even number of channels, .* got 5"),
        (X[..., :6], C, C, {}, ValueError, "at most D = 6, got 8"),
        (X, C, C, {"table": "single"}, ValueError, "at most D = 8, got 16"),
        (X, C[:, :4], C[:, :4], {}, ValueError, r"cos of shape \(2, 1, 4, 8\) does not fit x \(2,"),
        (X[0, 0], C, C, {}, ValueError, r"cos of shape \(2, 5, 8\) does not fit x \(5, 8\)"),
        (X, C.to("meta"), C, {}, ValueError, "cos must be on cpu like the other tensors, got meta"),
        (X, C, C, {"layout": "pairs"}, ValueError, "layout must be one of half, interleaved, got"),
        (X, C, C, {"table": "twice"}, ValueError, "table must be one of half, interleaved, single"),
    ],
)
def test_errors(plain, function, x, cos, sin, options, error, text):
    with pytest.raises(error, match=text):
        function(x, cos, sin, **options)


def test_a_rotation_that_cannot_be_undone_raises(plain):
    with pytest.raises(ValueError, match="cos and sin must not both be 0"):
        unrotate(X, C, C)
    assert not math.isnan(rotate(X, C, C).sum().item())
