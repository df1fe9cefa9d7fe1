"""Rotary position embedding on and off, in every layout that transformers uses."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from kv_lowrank._checks import check_choice, check_device, check_floating

Layout: TypeAlias = Literal["half", "interleaved"]
Table: TypeAlias = Literal["half", "interleaved", "single"]

_BLOCK = 1 << 18  # numbers that are turned at a time


def rotate(
    x: Float[Tensor, "*shape d"],
    cos: Float[Tensor, "*table r"],
    sin: Float[Tensor, "*table r"],
    *,
    layout: Layout = "half",
    table: Table | None = None,
) -> Float[Tensor, "*shape d"]:
    """Rotate pairs of channels: (a, b) -> (a cos - b sin, b cos + a sin).

    Shapes: `x` [B, H, T, D] (or any [..., D]); `cos`, `sin` [B, T, R] as transformers gives them
    (one dimension less than `x`: the heads, dimension 1, share them), [T, R], or [B, H, K, R] for
    rows gathered per head. The first R <= D channels turn, the others pass (partial RoPE).
    Computed in float32 at least and rounded once to the dtype of `x`.

    `layout`, which channels form pair i: `half` is (i, i + R/2) (Llama, Qwen, Mistral, Gemma,
    Phi), `interleaved` is (2i, 2i + 1) (Cohere, GLM, Ernie 4.5). `table`, how the R columns name
    the R/2 frequencies: `half` once and then again, `interleaved` each twice in a row, `single`
    only once (R/2 columns; gpt-oss). It follows `layout` unless given; GLM and Ernie 4.5 need
    `layout="interleaved", table="half"`.

    Raises ValueError or TypeError for wrong shapes, dtypes, devices, `layout`, `table`.
    Source: Su et al. 2021, Eq. 34; transformers' `apply_rotary_pos_emb`.
    """
    c, s = _tables(x, cos, sin, layout, table)
    return _turned(x, c, s, layout)


def unrotate(
    x: Float[Tensor, "*shape d"],
    cos: Float[Tensor, "*table r"],
    sin: Float[Tensor, "*table r"],
    *,
    layout: Layout = "half",
    table: Table | None = None,
) -> Float[Tensor, "*shape d"]:
    """The inverse of `rotate`: (a, b) -> (a cos + b sin, b cos - a sin) / (cos^2 + sin^2).

    The divisor makes it exact for tables that are scaled (yarn, longrope) or rounded (bfloat16).
    Shapes, options and errors as in `rotate`; a table with cos = sin = 0 somewhere raises
    ValueError (looking for it reads the table). Source: ShadowKV section 3.1 (pre-RoPE keys).
    """
    c, s = _tables(x, cos, sin, layout, table)
    scale = c.square() + s.square()
    if bool((scale == 0).any()):
        raise ValueError("cos and sin must not both be 0: such a rotation cannot be undone")
    return _turned(x, c / scale, -s / scale, layout)


def _tables(
    x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, table: Table | None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each pair [..., R/2], as many dimensions as x has or fewer."""
    check_floating("x", x, least=2)
    check_choice("layout", layout, ("half", "interleaved"))
    table = layout if table is None else table
    check_choice("table", table, ("half", "interleaved", "single"))
    for name, part in (("cos", cos), ("sin", sin)):
        check_floating(name, part, least=2)
        check_device(name, part, x.device)
    if cos.shape != sin.shape:
        raise ValueError(
            f"cos and sin must have one shape, got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    turned = cos.shape[-1] * (2 if table == "single" else 1)
    if turned % 2 or turned > x.shape[-1]:
        raise ValueError(
            f"cos must turn an even number of channels, at most D = {x.shape[-1]}, got {turned}"
        )
    if cos.ndim == x.ndim - 1 and cos.ndim >= 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    missing = x.ndim - cos.ndim
    sizes = zip(cos.shape[:-1], x.shape[missing:-1], strict=True) if missing >= 0 else ()
    if missing < 0 or any(size not in (1, want) for size, want in sizes):
        raise ValueError(f"cos of shape {tuple(cos.shape)} does not fit x {tuple(x.shape)}")
    work = torch.promote_types(x.dtype, torch.float32)
    if table != "single":
        cos, sin = _split(cos, table)[0], _split(sin, table)[0]
    return cos.to(work), sin.to(work)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Every pair turned; on the CPU a block of tokens at a time, so that it stays in the cache."""
    if x.device.type != "cpu" or x.numel() <= _BLOCK:
        return _turn(x, cos, sin, layout)
    out = torch.empty_like(x)
    tokens = x.shape[-2]
    step = max(1, _BLOCK * tokens // x.numel())
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        c, s = (each if each.shape[-2] == 1 else each[..., part, :] for each in (cos, sin))
        out[..., part, :] = _turn(x[..., part, :], c, s, layout)
    return out


def _turn(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin), in the dtype of x; further channels pass."""
    turned = 2 * cos.shape[-1]
    first, second = _split(x[..., :turned].to(cos.dtype), layout)
    pair = first * cos - second * sin, second * cos + first * sin
    mixed = torch.cat(pair, -1) if layout == "half" else torch.stack(pair, -1).flatten(-2)
    mixed = mixed.to(x.dtype)
    return torch.cat((mixed, x[..., turned:]), -1) if turned < x.shape[-1] else mixed


def _split(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """First and second channel of each pair."""
    if layout == "half":
        return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x[..., 0::2], x[..., 1::2]
