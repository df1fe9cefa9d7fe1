"""Surprisal of a prompt's tokens while it passes the model, through the model's own LM head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kv_offload import storage_bytes
from kv_score import surprisal


@dataclass(frozen=True)
class LMHead:
    """How a model makes logits of its last hidden states: (W h + b) * scale, perhaps capped.

    Cohere scales them (`logit_scale`), Granite divides them (`logits_scaling`), Falcon-H1
    multiplies (`lm_head_multiplier`), Gemma 2 and 3 may cap them (`final_logit_softcapping`).
    """

    layer: torch.nn.Module
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> LMHead | None:
        """The head of `model`, None if it has none."""
        layer = model.get_output_embeddings()
        if layer is None or not isinstance(getattr(layer, "weight", None), Tensor):
            return None
        config = model.config.get_text_config(decoder=True)
        scale = getattr(config, "logit_scale", None) or 1.0
        scale /= getattr(config, "logits_scaling", None) or 1.0
        scale *= getattr(config, "lm_head_multiplier", None) or 1.0
        return cls(layer, scale, getattr(config, "final_logit_softcapping", None))

    def surprisal(self, hidden: Tensor, ids: Tensor, valid: Tensor) -> Tensor:
        """`kv_score.surprisal` [B, T] of tokens `ids`, on the device of `hidden` [B, T, E]."""
        weight: Tensor = self.layer.weight  # type: ignore[assignment]
        return surprisal(
            hidden.to(weight.device, weight.dtype),
            weight.detach(),
            ids.to(weight.device),
            mask=valid.to(weight.device),
            bias=getattr(self.layer, "bias", None),
            logit_scale=self.scale,
            softcap=self.softcap,
        ).to(hidden.device)


class PromptSurprisal:
    """Surprisal of a batch's prompt, which may come in parts.

    Of each part only its last hidden state is held until the next one: it predicts that one's
    first token.
    """

    def __init__(self, head: LMHead) -> None:
        self.head = head
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, hidden: Tensor, ids: Tensor, valid: Tensor | None) -> None:
        """The next tokens `ids` [B, Q] and the model's last hidden states [B, Q, E] for them."""
        ids = ids.to(hidden.device)
        valid = torch.ones_like(ids, dtype=torch.bool) if valid is None else valid.to(ids.device)
        came = (hidden.detach(), ids, valid)
        seen = came
        if self._last is not None:
            before, id_before, valid_before = self._last
            seen = (
                torch.cat([before, came[0]], 1),
                torch.cat([id_before, ids], 1),
                torch.cat([valid_before, valid], 1),
            )
        self._parts.append((self.head.surprisal(*seen)[:, -ids.shape[1] :], valid))
        self._last = (came[0][:, -1:].clone(), ids[:, -1:].clone(), valid[:, -1:].clone())

    def rows(self) -> list[Tensor]:
        """float32[T_b] of each row, without padding; 0 for its first token."""
        values, valid = (torch.cat(parts, 1) for parts in zip(*self._parts, strict=True))
        return [row[keep] for row, keep in zip(values, valid, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that exist."""
        return storage_bytes(*(x for part in self._parts for x in part), *(self._last or ()))
