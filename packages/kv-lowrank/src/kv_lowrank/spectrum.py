"""What a spectrum says: ranks that keep an energy, ranks left by gates, errors of gates."""

from __future__ import annotations

from jaxtyping import Float, Int64
from torch import Tensor

from kv_lowrank._checks import check_device, check_finite, check_floating


def rank_for_energy(sigma: Float[Tensor, "*batch r"], energy: float) -> Int64[Tensor, "*batch"]:
    """Smallest rank that keeps a share of the squared spectrum.

    min r with sum_{i <= r} sigma_i^2 >= energy * sum_i sigma_i^2.

    Shapes: `sigma` [..., R], falling, not negative; result int64[...]. `energy` is within (0, 1];
    1 counts the values that are not 0, and a spectrum of zeros needs rank 0.
    Raises ValueError or TypeError for a wrong dtype, `energy`, rising, negative or NaN values.
    """
    check_floating("sigma", sigma, least=1)
    if not 0 < energy <= 1:
        raise ValueError(f"energy must lie within (0, 1], got {energy}")
    check_finite("sigma", sigma)
    if bool((sigma < 0).any()) or bool((sigma.diff(dim=-1) > 0).any()):
        raise ValueError("sigma must be falling and not negative")
    squares = sigma.double().square()
    # What is lost, summed from the small end: exact where it is 0, unlike total minus kept.
    tail = squares.flip(-1).cumsum(-1).flip(-1)
    return (tail > (1.0 - energy) * squares.sum(-1, keepdim=True)).sum(-1)


def effective_rank(gates: Float[Tensor, "*batch r"]) -> Float[Tensor, "*batch"]:
    """Rank that gates leave: r = sum_i m_i, for gates [..., R] within [0, 1]; gradients flow.

    Raises ValueError or TypeError for a wrong dtype or values outside [0, 1].
    Source: SeKV section 3.2, below Eq. 8.
    """
    check_floating("gates", gates, least=1)
    if gates.numel() and not bool(((gates >= 0) & (gates <= 1)).all()):
        raise ValueError(
            f"gates must lie within [0, 1], got {float(gates.min())} to {float(gates.max())}"
        )
    return gates.sum(-1)


def gated_error(
    sigma: Float[Tensor, "*batch r"], gates: Float[Tensor, "*batch r"]
) -> Float[Tensor, "*batch"]:
    """Squared error that gates add to a factorization: sum_i (1 - m_i)^2 sigma_i^2.

    Shapes: both [..., R]; result [...]; gradients reach the gates. Raises ValueError or TypeError
    for wrong shapes, dtypes, devices. Source: SeKV Eq. 14 (the reconstruction loss).
    """
    check_floating("sigma", sigma, least=1)
    check_floating("gates", gates, least=1)
    check_device("gates", gates, sigma.device)
    if sigma.shape != gates.shape:
        raise ValueError(
            f"gates must have the shape of sigma {tuple(sigma.shape)}, got {tuple(gates.shape)}"
        )
    return ((1.0 - gates) * sigma).square().sum(-1)
