"""SeKV: spans of unsurprising tokens as one entry each, expanded where a query looks for more.

Source: "SeKV: Resolution-Adaptive KV Cache with Hierarchical Semantic Memory for Long-Context LLM
Inference", section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kv_integration.budget import budget_entries, check_budget
from kv_integration.embedded import router_path
from kv_integration.eviction import take
from kv_integration.method import Context, LayerState, Method, Plan, Row
from kv_integration.router import Router, leading_directions
from kv_integration.routing import Routing, logit, observed_threshold
from kv_integration.span_memory import RoutedSpans, SpanMemory, SpanRow
from kv_integration.spans import Segmentation, Spans
from kv_integration.storable import storable
from kv_lowrank import PackedSpans, apply_gates, pack_spans, span_svd
from kv_score import segment_mean

OBSERVED = 32  # last queries of the prompt whose routing scores make the untrained thresholds
NEGLIGIBLE = 0.05  # gates below it are dropped with their component


@dataclass(frozen=True)
class SeKV(Method):
    """Attend `budget` entries per step: exact tokens, span means, and the tokens of a few spans.

    A token is an anchor where its surprisal is above mean + `alpha` std of the prompt's; between
    anchors lie spans. Anchors, spans shorter than `min_length` and the last `window` tokens stay
    as they are on the device, each span as its surprisal-weighted mean key and value; its keys'
    and values' low-rank factors go to the host. A step's query heads score all spans; those above
    the head's threshold are expanded in falling order while the budget lasts.

    Args:
        budget: entries per KV head (int) or share of the prompt (float in (0, 1]): all of the
            above count, an expanded span with its tokens in place of its mean. A prompt that the
            budget grants whole is kept as it is.
        window: latest tokens, always attended (w); at most a quarter of the budget.
        alpha: boundary sensitivity, in standard deviations, at least 0.
        min_length, max_length: shortest and longest span in tokens. Shorter runs stay as they are
            (L_min); longer ones are cut into equal parts, which the paper does not say: a span
            that no budget can expand would be lost. With `fit` they are cut to the length, at least
            twice `min_length`, at which a step can expand the largest share of them. None: as the
            text falls.
        trail: tokens after each anchor that stay as they are, too; 0 for the paper's letter. At
            alpha = 1 the next anchor is a few tokens away, and L_min keeps what lies between. Where
            `fit` raises alpha anchors stand alone, and what follows one would lie in a span, whose
            mean says little of it. Yet there a query finds an anchor again: attention copies from
            what follows the token it knows, and the rest of a surprising name or number surprises
            less than its beginning.
        max_rank: components per span at most (R_max); 0 stores none and expands nothing.
        routing_dim: d', for routing without a router; at most the head dimension.
        router: a trained `Router` or its file, which is loaded when a cache is made; "embedded" is
            that of the embedded model. None: W is the leading right singular vectors of the
            prompt's keys, shared by the query heads of a group, all gates are one, and a head's
            threshold is the `quantile` of the scores that the prompt's last queries give spans.
        quantile: see `router`; in [0, 1), 0 expands as many spans as the budget allows.
        threshold: one tau in [0, 1] for all heads, in place of the router's or the quantile's.
        fit: raise alpha where anchors, short spans and means of spans, uncut, would take more than
            this share of what window and sinks leave of the budget; the rest is for cutting spans
            and expanding them. With alpha = 1 they are most of a text (a sixth are anchors, a few
            tokens apart), which no budget of 10% can hold. Where the rest does not reach to expand
            a single span, as at 5% of some thousand tokens, anchors may take all of it, and spans
            stay as long as they are. None takes alpha to the letter, and what does not fit is an
            error.
        sinks: first tokens, always kept as they are, since nothing predicts the first one, and
            attention rests on it in many models. 0 for the paper's letter.
        segmentation: `surprisal`, or for ablation `fixed` runs of `chunk_size` tokens.
        anchors: False for ablation: an anchor is the first token of the span that follows.
        weights: of tokens in their span's mean: `surprisal` (Eq. 2), or for ablation `uniform`.
        tier: where the factors lie, `host` or `disk`.
        lookahead: while a layer attends, fetch what the next one is expected to expand. For that
            the layer's input passes the next one's projections, as in InfiniGen. What is attended
            does not depend on it; what was expected in vain is moved for nothing. Worth it where
            factors come over a bus while the device computes, and not on the CPU.

    Keys are cached after RoPE and factorised as they are: what is rebuilt needs no rotation.
    The prompt is held whole by all layers until its last token has passed the model: mean and
    standard deviation of the surprisal, which decide everything, are known only then.

    A prompt whose budget leaves no room to expand any span, as 5% of a short one does, has neither
    routing keys nor factors.

    Spans are chosen for each query by itself. A forward pass of several (a later turn, a draft)
    chooses for a few at a time, which then share what is fetched.
    """

    budget: int | float = 1024
    window: int = 512
    alpha: float = 1.0
    min_length: int = 16
    max_length: int | None = 64
    trail: int = 2
    max_rank: int = 32
    routing_dim: int = 32
    router: Router | str | Path | None = None
    quantile: float = 0.5
    threshold: float | None = None
    fit: float | None = 0.5
    sinks: int = 4
    segmentation: Literal["surprisal", "fixed"] = "surprisal"
    chunk_size: int = 32
    anchors: bool = True
    weights: Literal["surprisal", "uniform"] = "surprisal"
    tier: Literal["host", "disk"] = "host"
    lookahead: bool = False

    needs_surprisal = True

    def __post_init__(self) -> None:
        check_budget(self.budget)
        for name, least in (
            ("window", 1),
            ("min_length", 1),
            ("trail", 0),
            ("max_rank", 0),
            ("routing_dim", 1),
            ("sinks", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha must be finite and at least 0, got {self.alpha}")
        if self.max_length is not None and self.max_length < 2 * self.min_length:
            raise ValueError(
                f"max_length must be at least twice min_length {self.min_length}, "
                f"got {self.max_length}"
            )
        if self.chunk_size < self.min_length:
            raise ValueError(
                f"chunk_size must be at least min_length {self.min_length}, got {self.chunk_size}"
            )
        if self.fit is not None and (isinstance(self.fit, bool) or not 0 <= self.fit <= 1):
            raise ValueError(f"fit must be in [0, 1] or None, got {self.fit}")
        if not 0 <= self.quantile < 1:
            raise ValueError(f"quantile must be in [0, 1), got {self.quantile}")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1], got {self.threshold}")
        for name, choices in (
            ("segmentation", ("surprisal", "fixed")),
            ("weights", ("surprisal", "uniform")),
            ("tier", ("host", "disk")),
        ):
            if getattr(self, name) not in choices:
                wanted = " or ".join(map(repr, choices))
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")
        if not isinstance(self.router, Router | str | Path | None):
            raise TypeError(f"router must be a Router, a file or None, got {self.router!r}")
        if isinstance(self.router, Router) and self.max_rank > self.router.max_rank:
            raise ValueError(
                f"max_rank is {self.max_rank}, but the router gates {self.router.max_rank} "
                "components at most"
            )

    @property
    def observe(self) -> int:  # type: ignore[override]
        return OBSERVED if self.router is None and self.threshold is None else 0

    def bound(self, model: PreTrainedModel) -> SeKV:
        """With its router loaded, if it was given as a file.

        Raises:
            FingerprintError: the file holds a router of another model.
            CacheFileError, OSError: it holds none, or cannot be read.
        """
        if self.router is None or isinstance(self.router, Router):
            return self
        path = router_path() if self.router == "embedded" else self.router
        return replace(self, router=Router.load(path, model=model))

    def begin(self, ids: Sequence[Tensor], context: Context) -> Plan:
        plan = SpanPlan(self)
        for row in ids:
            granted = budget_entries(self.budget, len(row))
            if self.fit is not None or self.segmentation == "fixed":
                plan.segmentation.check(len(row), granted)
        return plan

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        if not isinstance(plan, SpanPlan) or not plan.spans:
            raise TypeError(f"plan must be the one that begin() made, finished, got {plan!r}")
        self._check_router(rows[0])
        # Where no step can expand a span nothing is held that would choose or rebuild one.
        spans = [plan.spans[row.index] for row in rows]
        routed = self.max_rank > 0 and any(each.expands for each in spans)
        parts = [self._compress_row(*both, routed) for both in zip(rows, spans, strict=True)]
        return SpanMemory(
            parts,
            query_heads=rows[0].queries.shape[1],
            tier=self.tier,
            looks_ahead=self.lookahead and rows[0].layer > 0,
        )

    def _compress_row(self, row: Row, spans: Spans, routed: bool) -> SpanRow:
        exact, tokens = spans.exact[None, None], spans.tokens[None, None]
        keys, values = take(row.keys, tokens), take(row.values, tokens)
        weights, sizes = spans.weights[None, None], spans.offsets.diff()
        means = segment_mean(keys, spans.offsets, weights)
        return SpanRow(
            exact=(take(row.keys, exact), take(row.values, exact)),
            means=(means, segment_mean(values, spans.offsets, weights)),
            sizes=sizes,
            room=spans.room,
            routed=self._routed(row, spans, keys, values, means) if routed else None,
        )

    def _routed(
        self, row: Row, spans: Spans, keys: Tensor, values: Tensor, means: Tensor
    ) -> RoutedSpans:
        """Routing keys (Eqs. 3 and 4) and factors of spans with these keys, values, mean keys."""
        sizes = spans.offsets.diff()
        routing = self._routing(row, keys)
        summaries = routing.summaries(means)
        if not len(sizes):
            return RoutedSpans(routing, summaries.to(keys.dtype), None)
        if self.observe:
            scores = routing.logits(row.queries, summaries, sizes.log()[None])
            routing.threshold = observed_threshold(scores, self.quantile)
        factors = (
            self._packed(row.layer, keys, spans.offsets, summaries, "key"),
            self._packed(row.layer, values, spans.offsets, summaries, "value"),
        )
        return RoutedSpans(routing, summaries.to(keys.dtype), factors)

    def _routing(self, row: Row, keys: Tensor) -> Routing:
        """W and thresholds: the router's, or W from the keys of the row's spans."""
        heads, size = row.queries.shape[1], row.keys.shape[-1]
        if self.router is None:
            found = leading_directions(keys, min(self.routing_dim, size))
            threshold = torch.full((1, heads), -math.inf, device=keys.device)
            routing = Routing(found[None].to(keys), threshold)
        else:
            routing = Routing.of_router(self._loaded(), row.layer)
        if self.threshold is not None:
            routing.threshold = torch.full_like(routing.threshold, logit(self.threshold))
        return routing

    def _check_router(self, row: Row) -> None:
        if self.router is None:
            return
        router, heads, size = self._loaded(), row.queries.shape[1], row.keys.shape[-1]
        made = (router.layers, router.query_heads, router.head_dim)
        if made != (row.layers, heads, size):
            raise ValueError(
                f"router was made for {made[0]} layers of {made[1]} query heads of size "
                f"{made[2]}, this model has {row.layers} of {heads} of {size}"
            )

    def _loaded(self) -> Router:
        if not isinstance(self.router, Router):
            raise TypeError(f"router is still the file {self.router!r}: call bound(model)")
        return self.router

    def _packed(
        self,
        layer: int,
        x: Tensor,
        offsets: Tensor,
        summaries: Tensor,
        kind: Literal["key", "value"],
    ) -> PackedSpans:
        """Gated factors of every span (Eqs. 6 to 8), negligible components dropped."""
        factors = span_svd(x, offsets, self.max_rank)
        if self.router is not None:
            with torch.no_grad():
                gates = self._loaded().gates(layer, factors.sigma, summaries.float(), kind)
            factors = apply_gates(factors, gates.masked_fill(gates < NEGLIGIBLE, 0.0))
        return pack_spans(factors)


@storable
class SpanPlan(Plan):
    """The prompt's spans, once its surprisal is known: one `Spans` per row."""

    def __init__(self, method: SeKV) -> None:
        super().__init__()
        self.budget = method.budget
        self.segmentation = Segmentation(
            window=method.window,
            sinks=method.sinks,
            alpha=method.alpha,
            min_length=method.min_length,
            max_length=method.max_length,
            trail=method.trail,
            kind=method.segmentation,
            chunk_size=method.chunk_size,
            anchors=method.anchors,
            weights=method.weights,
            fit=method.fit,
        )
        self.spans: list[Spans] = []

    def finish(self, surprisal: Sequence[Tensor]) -> None:
        self.spans = [
            self.segmentation.spans(row, budget_entries(self.budget, len(row))) for row in surprisal
        ]

    def compressed(self) -> None:
        self.spans = []

    def select_rows(self, rows: Tensor) -> None:
        """Nothing of a row is left that outlasts the prompt."""

    @property
    def nbytes(self) -> int:
        return sum({id(spans): spans.nbytes for spans in self.spans}.values())
