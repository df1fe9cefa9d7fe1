"""Rotary position embedding on and off, in every layout that transformers uses."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from kv_lowrank._checks import check_choice, check_device, check_floating

Layout: TypeAlias = Literal["half", "interleaved"]
Table: TypeAlias = Literal["half", "interleaved", "single"]


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
    first, second, c, s = _pairs(x, cos, sin, layout, table)
    return _joined(x, first * c - second * s, second * c + first * s, layout)


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
    first, second, c, s = _pairs(x, cos, sin, layout, table)
    scale = c.square() + s.square()
    if bool((scale == 0).any()):
        raise ValueError("cos and sin must not both be 0: such a rotation cannot be undone")
    c, s = c / scale, s / scale
    return _joined(x, first * c + second * s, second * c - first * s, layout)


def _pairs(
    x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, table: Table | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both channels of each pair, and its cosine and sine, all [..., R/2]."""
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
    first, second = _split(x[..., :turned].to(work), layout)
    if table != "single":
        cos, sin = _split(cos, table)[0], _split(sin, table)[0]
    return first, second, cos.to(work), sin.to(work)


def _split(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """First and second channel of each pair."""
    if layout == "half":
        return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x[..., 0::2], x[..., 1::2]


def _joined(x: Tensor, first: Tensor, second: Tensor, layout: Layout) -> Tensor:
    """The pairs back in their places, in the dtype of x, with the channels that did not turn."""
    if layout == "half":
        turned = torch.cat((first, second), -1)
    else:
        turned = torch.stack((first, second), -1).flatten(-2)
    rest = x[..., turned.shape[-1] :]
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned
