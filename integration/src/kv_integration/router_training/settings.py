"""What a training run is told: the paper's values unless said otherwise."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from kv_integration.spans import Segmentation


@dataclass(frozen=True)
class Training:
    """Settings of `train_router`; defaults are those of SeKV's section 4.1 and appendix A.

    Schedule:
        steps, batch: optimizer steps, and windows of text per step.
        lengths: tokens of a window, each for an equal part of the steps (the length curriculum).
        learning_rate, weight_decay, warmup: AdamW with a cosine after a linear rise over the first
            `warmup` of the steps. Thresholds are not decayed: they would drift to 1/2.
        clip: largest norm of the gradient. The paper names none.
        seed: decides every draw; a step's draws depend on its number alone.
        checkpoint_every: steps between checkpoints.
        validate_every, patience: steps between validations on held-out texts, and how many may pass
            without a better one before training stops. The paper stops early without saying when.

    Spans, cut as `SeKV` cuts them, with its defaults:
        alpha, min_length, max_length, trail, window, sinks: as there.
        budgets: each window draws one of these shares. As in `SeKV`, alpha rises until the exact
            tokens fit, and w is at most a quarter of it: the router meets the spans that it will
            route.
        absorbed: share of windows whose anchors join the span after them, so that the router also
            learns to find what is otherwise kept exactly.
        routing_dim, max_rank: d' and R_max; None: 32, or the head dimension where it is smaller.

    Objective:
        candidates, mined, random: query positions per window at which the teacher's attention is
            looked at, those of them with the strongest far attention, and others; the student runs
            at mined and random ones, and the zoom loss uses the mined. The paper gives no counts.
        far_mass, few: a head is supervised at a mined position if at least `far_mass` of its
            attention is on spans and its target holds at most `few` of them (or one): there it
            concentrates. Heads that spread theirs would drown those that look something up.
        coverage: rho of Eq. 12. positive_weight: w+ of Eq. 13.
        zoom_weight, recon_weight, budget_weight: lambda 1 to 3 of Eq. 10; the last one rises from 0
            over the first half. rank_cost: beta of Eq. 15.
    """

    steps: int = 3000
    batch: int = 8
    lengths: tuple[int, ...] = (8192, 16384, 32768)
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup: float = 0.1
    clip: float = 1.0
    seed: int = 0
    checkpoint_every: int = 50
    validate_every: int = 100
    patience: int = 5

    alpha: float = 1.0
    min_length: int = 16
    max_length: int | None = 64
    trail: int = 2
    window: int = 512
    sinks: int = 4
    budgets: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2)
    absorbed: float = 0.0
    routing_dim: int | None = None
    max_rank: int | None = None

    candidates: int = 256
    mined: int = 16
    random: int = 16
    far_mass: float = 0.5
    few: float = 0.15
    coverage: float = 0.9
    positive_weight: float = 10.0
    zoom_weight: float = 1.0
    recon_weight: float = 0.5
    budget_weight: float = 0.1
    rank_cost: float = 0.1

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range."""
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in SHARES:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        for name in NOT_NEGATIVE:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        if not self.lengths or list(self.lengths) != sorted(self.lengths) or self.lengths[0] < 2:
            raise ValueError(f"lengths must rise from at least 2, got {list(self.lengths)}")
        if not self.budgets or not all(0 < budget < 1 for budget in self.budgets):
            raise ValueError(f"budgets must be shares between 0 and 1, got {list(self.budgets)}")

    def segmentation(self, *, anchors: bool) -> Segmentation:
        """How a window is cut, as `SeKV` does."""
        return Segmentation(
            window=self.window,
            sinks=self.sinks,
            alpha=self.alpha,
            min_length=self.min_length,
            max_length=self.max_length,
            trail=self.trail,
            kind="surprisal",
            chunk_size=self.min_length,
            anchors=anchors,
            weights="surprisal",
            fit=0.5,
        )

    def length(self, step: int) -> int:
        """Tokens of a window at `step`."""
        return self.lengths[step * len(self.lengths) // self.steps]

    def rate(self, step: int) -> float:
        """Learning rate at `step`."""
        rise = math.ceil(self.warmup * self.steps)
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        turn = math.pi * (step - rise) / max(self.steps - rise, 1)
        return self.learning_rate * (1 + math.cos(turn)) / 2

    def cost_weight(self, step: int) -> float:
        """lambda 3 at `step`."""
        return self.budget_weight * min(1.0, step / max(self.steps / 2, 1))

    def as_dict(self) -> dict[str, object]:
        """As JSON keeps it."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values}


COUNTS = (
    *("steps", "batch", "checkpoint_every", "validate_every", "patience"),
    *("min_length", "window", "candidates", "mined"),
)
SHARES = ("warmup", "absorbed", "far_mass", "few", "coverage")
NOT_NEGATIVE = (
    *(
        "learning_rate",
        "weight_decay",
        "clip",
        "alpha",
        "trail",
        "sinks",
        "random",
        "positive_weight",
    ),
    *("zoom_weight", "recon_weight", "budget_weight", "rank_cost"),
)
