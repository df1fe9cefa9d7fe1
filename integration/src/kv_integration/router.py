"""SeKV's router: which spans a query head zooms into, and at which rank a span is stored.

It holds all that SeKV learns (section 3.3, "Learnable parameters"): a projection into the routing
space and a threshold per query head and layer, and one small predictor of rank gates for all.
`router_training` trains it; the method SeKV uses it.
"""

from __future__ import annotations

import math
import os
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kv_integration.fingerprint import model_fingerprint
from kv_lowrank import truncated_svd
from kv_offload import CacheFileError, load_cache, save_cache

METHOD, VERSION = "sekv-router", 1
ROUTING_DIM, MAX_RANK, HIDDEN = 32, 32, 128
THRESHOLD = 0.05
OPEN = 4.0  # logit of the gates at the start: sigmoid(4) = 0.98
KINDS = ("key", "value")


class Router(nn.Module):
    """Projections, thresholds and rank gates of one model.

    Attributes:
        projections: float32[L, H_q, d', D], W of Eqs. 3 and 4; L counts the layers with full
            attention. Query heads of one group have a projection each (section 3.3).
        threshold_logits: float32[L, H_q]; tau of Eq. 9 is their sigmoid.
        predictor: g_phi of Eq. 7.

    Args:
        layers, query_heads, kv_heads, head_dim: shape of the model.
        routing_dim: d', at most `head_dim`.
        max_rank: R_max, components per span at most.

    The projections start orthonormal, the same for all heads (`set_projection` gives better ones),
    the thresholds at 0.05, the gates near one.
    """

    def __init__(
        self,
        layers: int,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        routing_dim: int = ROUTING_DIM,
        max_rank: int = MAX_RANK,
    ) -> None:
        super().__init__()
        if min(layers, kv_heads, routing_dim, max_rank) < 1:
            raise ValueError(
                "layers, kv_heads, routing_dim and max_rank must be at least 1, got "
                f"{layers}, {kv_heads}, {routing_dim} and {max_rank}"
            )
        if query_heads < 1 or query_heads % kv_heads:
            raise ValueError(f"kv_heads must divide the {query_heads} query heads, got {kv_heads}")
        if routing_dim > head_dim:
            raise ValueError(f"routing_dim must be at most head_dim {head_dim}, got {routing_dim}")
        self.layers, self.query_heads, self.kv_heads = layers, query_heads, kv_heads
        self.head_dim, self.routing_dim, self.max_rank = head_dim, routing_dim, max_rank
        start = torch.eye(routing_dim, head_dim).expand(layers, query_heads, -1, -1)
        self.projections = nn.Parameter(start.clone())
        logit = math.log(THRESHOLD / (1 - THRESHOLD))
        self.threshold_logits = nn.Parameter(torch.full((layers, query_heads), logit))
        self.predictor = RankGates(layers, routing_dim, max_rank)

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        *,
        routing_dim: int | None = None,
        max_rank: int | None = None,
    ) -> Router:
        """A new router of the model's shape, on its device; d' and R_max are 32, or what fits D.

        Raises:
            ValueError: the model has no layer with full attention, or as for `Router`.
        """
        layers, query_heads, kv_heads, head_dim = router_shape(model.config)
        router = cls(
            layers,
            query_heads,
            kv_heads,
            head_dim,
            routing_dim=min(ROUTING_DIM, head_dim) if routing_dim is None else routing_dim,
            max_rank=min(MAX_RANK, head_dim) if max_rank is None else max_rank,
        )
        return router.to(model.device)

    @property
    def thresholds(self) -> Float[Tensor, "l hq"]:
        """tau of Eq. 9, within (0, 1), per layer and query head."""
        return self.threshold_logits.sigmoid()

    @property
    def trainable(self) -> int:
        """Number of trained parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def set_projection(self, layer: int, directions: Float[Tensor, "h r d"]) -> None:
        """Start a layer's projections from `directions` [H_kv or H_q, d', D], e.g. of its keys.

        Raises:
            ValueError: `layer` is out of range or the shape is another.
        """
        self._check_layer(layer)
        shape = (self.kv_heads, self.routing_dim, self.head_dim)
        if tuple(directions.shape) not in (shape, (self.query_heads, *shape[1:])):
            raise ValueError(
                f"directions must be {list(shape)} or one per query head, "
                f"got {list(directions.shape)}"
            )
        repeats = self.query_heads // directions.shape[0]
        self.projections[layer] = directions.repeat_interleave(repeats, 0).to(self.projections)

    def summaries(
        self, layer: int, means: Float[Tensor, "*b hkv s d"]
    ) -> Float[Tensor, "*b hq s r"]:
        """Routing keys of spans: W k_bar / |W k_bar|, where k_bar is the weighted mean key.

        The projection of a mean is the mean of the projections, so Eq. 3 needs no token's key.
        Shapes: `means` [.., H_kv, S, D]; result float32[.., H_q, S, d'], of length 1 (0 for 0).
        """
        self._check_layer(layer)
        weight = self.projections[layer].unflatten(0, (self.kv_heads, -1))  # [H_kv, G, d', D]
        projected = means.to(weight.dtype).unsqueeze(-3) @ weight.mT
        return nn.functional.normalize(projected, dim=-1).flatten(-4, -3)

    def logits(
        self,
        layer: int,
        queries: Float[Tensor, "*b hq q d"],
        summaries: Float[Tensor, "*b hq s r"],
        log_size: Float[Tensor, "*sizes"],
    ) -> Float[Tensor, "*b hq q s"]:
        """Relevance before the sigmoid of Eq. 5: (W q) . K_bar / sqrt(d') + log |S|.

        Shapes: `queries` [.., H_q, Q, D] after RoPE; `log_size` [S] or what broadcasts to the
        result, float32[.., H_q, Q, S].
        """
        self._check_layer(layer)
        weight = self.projections[layer]
        routed = queries.to(weight.dtype) @ weight.mT
        return routed @ summaries.mT / math.sqrt(self.routing_dim) + log_size

    def gates(
        self,
        layer: int,
        sigma: Float[Tensor, "*b hkv s rank"],
        summary: Float[Tensor, "*b hq s r"],
        kind: Literal["key", "value"],
    ) -> Float[Tensor, "*b hkv s rank"]:
        """Soft gates of the components of spans, each in (0, 1): Eq. 7.

        The summary that g_phi sees is the mean over the query heads of the KV head's group.

        Args:
            layer: number among the layers with full attention.
            sigma: [.., H_kv, S, R], singular values in falling order, 0 where there is none; R is
                at most `max_rank`.
            summary: [.., H_q, S, d'] from `summaries`.
            kind: whose singular values they are.

        Raises:
            ValueError: `layer`, `kind` or R is out of range, or shapes do not fit.
        """
        self._check_layer(layer)
        if kind not in KINDS:
            raise ValueError(f"kind must be 'key' or 'value', got {kind!r}")
        spans, rank = sigma.shape[-2:]
        if sigma.shape[-3] != self.kv_heads or rank > self.max_rank:
            raise ValueError(
                f"sigma must be [.., {self.kv_heads}, S, at most {self.max_rank}], "
                f"got {list(sigma.shape)}"
            )
        wanted = (*sigma.shape[:-3], self.query_heads, spans, self.routing_dim)
        if tuple(summary.shape) != wanted:
            raise ValueError(f"summary must be {list(wanted)}, got {list(summary.shape)}")
        mean = summary.unflatten(-3, (self.kv_heads, -1)).mean(-3)
        return self.predictor(layer, KINDS.index(kind), sigma, mean)

    def save(self, path: str | os.PathLike[str], *, model: PreTrainedModel) -> None:
        """Write the router as a safetensors file that only this model loads; whole or not at all.

        Raises:
            OSError: the file cannot be written; an old one is as it was.
        """
        tensors = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        shape = {name: getattr(self, name) for name in SHAPE}
        save_cache(
            path,
            tensors,
            method=METHOD,
            fingerprint=model_fingerprint(model),
            extra={"router_version": VERSION, "shape": shape},
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, model: PreTrainedModel) -> Router:
        """The router in the file at `path`, on the model's device.

        Raises:
            FingerprintError: it was trained for another model.
            CacheFileError: it is no router, is truncated or altered, or its version is newer.
            OSError: the file cannot be read.
        """
        file = load_cache(path, fingerprint=model_fingerprint(model))
        if file.method != METHOD:
            raise CacheFileError(f"{path} holds {file.method!r}, wanted {METHOD!r}")
        version = file.extra.get("router_version")
        if version != VERSION:
            raise CacheFileError(
                f"{path} is a router of version {version}, this kv-integration reads version "
                f"{VERSION}: update it, or train the router again"
            )
        try:
            router = cls(**{name: file.extra["shape"][name] for name in SHAPE})
            router.load_state_dict(file.tensors)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CacheFileError(f"{path} holds a router that does not fit its shape") from error
        return router.to(model.device)

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer must be within 0 and {self.layers - 1}, got {layer}")


SHAPE = ("layers", "query_heads", "kv_heads", "head_dim", "routing_dim", "max_rank")


class RankGates(nn.Module):
    """g_phi: a two-layer perceptron from spectrum and summary to one gate per component, Eq. 7.

    The paper says no more than its inputs and that it is small. Here it sees each singular value's
    size, log(1 + sigma_i), and its share of the first, sigma_i / sigma_1, and the span's summary; a
    learned shift per layer and kind tells spectra of different scale apart.
    """

    def __init__(self, layers: int, routing_dim: int, max_rank: int) -> None:
        super().__init__()
        self.max_rank = max_rank
        self.enter = nn.Linear(2 * max_rank + routing_dim, HIDDEN)
        self.shift = nn.Parameter(torch.zeros(layers, len(KINDS), HIDDEN))
        self.leave = nn.Linear(HIDDEN, max_rank)
        nn.init.normal_(self.leave.weight, std=0.01)  # zeros would let nothing reach `enter`
        nn.init.constant_(self.leave.bias, OPEN)

    def forward(self, layer: int, kind: int, sigma: Tensor, summary: Tensor) -> Tensor:
        """Gates of sigma [.., S, R], R at most `max_rank`, for summaries [.., S, d']."""
        rank = sigma.shape[-1]
        sigma = nn.functional.pad(sigma.to(summary.dtype), (0, self.max_rank - rank))
        share = sigma / sigma[..., :1].clamp_min(torch.finfo(sigma.dtype).tiny)
        seen = torch.cat((sigma.log1p(), share, summary), -1)
        hidden = nn.functional.silu(self.enter(seen) + self.shift[layer, kind])
        return self.leave(hidden)[..., :rank].sigmoid()


def router_shape(config: PreTrainedConfig) -> tuple[int, int, int, int]:
    """Layers with full attention, query heads, KV heads and head dimension of a model.

    Raises:
        ValueError: no layer has full attention.
    """
    layers = sum(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
    if not layers:
        raise ValueError("the model has no layer with full attention, so there is nothing to route")
    text = config.get_text_config(decoder=True)
    query_heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or query_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // query_heads
    return layers, query_heads, kv_heads, head_dim


@torch.no_grad()
def leading_directions(
    keys: Float[Tensor, "*b hkv t d"], routing_dim: int
) -> Float[Tensor, "hkv r d"]:
    """The first right singular vectors of each KV head's keys, rows over all of the batch.

    Always orthonormal: where keys have a lower rank, any orthonormal directions complete them.
    Shapes: `keys` [.., H_kv, T, D]; result float32[H_kv, d', D].

    Raises:
        ValueError: `routing_dim` is not within 1 and D.
    """
    width = keys.shape[-1]
    if not 1 <= routing_dim <= width:
        raise ValueError(f"routing_dim must be within 1 and {width}, got {routing_dim}")
    rows = keys.movedim(-3, 0).flatten(1, -2)  # [H_kv, all tokens, D]
    missing = max(routing_dim - rows.shape[1], 0)
    rows = nn.functional.pad(rows, (0, 0, 0, missing))
    return truncated_svd(rows, routing_dim, dtype=torch.float32).right
