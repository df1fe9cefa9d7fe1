"""One layer of the cache: it takes the prompt, has it compressed, then answers decoding steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kv_integration.buffer import KVBuffer
from kv_integration.method import LayerState, Row
from kv_offload import storage_bytes

if TYPE_CHECKING:
    from kv_integration.cache import KVCache

ExactAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


class CompressedLayer(CacheLayerMixin):
    """A cache layer whose keys and values are held by a method.

    `update` hands the new keys and values back as they are, since it sees no queries; `attend`,
    called by the attention function just after it, stores, compresses and attends.
    """

    is_sliding = False

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self.cache = cache
        self.is_initialized = True
        self.reset()

    def reset(self) -> None:
        """Forget everything, ready for a new prompt."""
        self.seen = 0
        self.state: LayerState | None = None
        self.held: KVBuffer | None = None
        self.latest: Tensor | None = None
        self.token_bytes = 0
        self.batch_size = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: `attend` makes the state from the first keys and values."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values as they are; `attend` stores them.

        Raises:
            ValueError: the model is not attached, so nobody would call `attend`.
        """
        if self.seen + key_states.shape[2] != self.cache.tokens:
            raise ValueError(
                "the model that this cache belongs to is not attached (any more): use the cache "
                "inside `with attach(model, tokenizer)` or before detach()"
            )
        return key_states, value_states

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, exact: ExactAttention
    ) -> Tensor:
        """Attention output [B, H_q, Q, D] of tokens that enter this layer; stores them.

        queries: [B, H_q, Q, D]; keys, values: [B, H_kv, Q, D]; exact: causal attention among one
        row's own tokens, as the model would compute it without this cache.
        """
        batch, _, new, _ = keys.shape
        self.batch_size, self.device = batch, keys.device
        self.token_bytes = sum(x.shape[1] * x.shape[3] * x.element_size() for x in (keys, values))
        self.seen += new
        if self.state is not None:
            return self._step(self.state, queries, keys, values, scale)
        if self.held is None and self.cache.prompt_complete:
            out = self._prefill(queries, keys, values, exact)
            self._compress(self._rows(queries, keys, values, scale))
            return out
        return self._hold(queries, keys, values, scale)

    def _step(
        self, state: LayerState, queries: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """Tokens after the prompt; rows whose padding is not on the left are put in order first."""
        valid, order = self.cache.valid, self.cache.order
        if order is None:
            return state.step(queries, keys, values, valid=valid, scale=scale)

        def put(x: Tensor, order: Tensor) -> Tensor:
            return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

        parts = (put(x, order) for x in (queries, keys, values))
        return put(state.step(*parts, valid=valid, scale=scale), order.argsort(dim=1))

    def _prefill(
        self, queries: Tensor, keys: Tensor, values: Tensor, exact: ExactAttention
    ) -> Tensor:
        """Exact attention of a whole prompt; rows with padding go one by one, without it."""
        if self.cache.valid is None:
            return exact(queries, keys, values)
        out = torch.zeros_like(queries[..., : values.shape[-1]])
        for row, tokens in enumerate(self.cache.row_tokens):
            part = slice(row, row + 1), slice(None), slice(keys.shape[2] - tokens, None)
            out[part] = exact(queries[part], keys[part], values[part])
        return out

    def _rows(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> list[Row]:
        """The prompt's rows without padding, which stands on the left."""
        observe = max(self.cache.method.observe, 1)
        rows = []
        for row, tokens in enumerate(self.cache.row_tokens):
            part, last = slice(row, row + 1), min(observe, tokens)
            rows.append(
                Row(
                    row,
                    queries[part, :, queries.shape[2] - last :],
                    keys[part, :, keys.shape[2] - tokens :],
                    values[part, :, values.shape[2] - tokens :],
                    scale,
                )
            )
        return rows

    def _hold(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Part of a prompt that comes in pieces: keep it whole until the last piece is there."""
        if self.held is None:
            self.held = KVBuffer.empty(keys)
        self.held.append(keys, values, self.cache.valid)
        observe = max(self.cache.method.observe, 1)
        kept = queries if self.latest is None else torch.cat([self.latest, queries], dim=2)
        self.latest = kept[:, :, -observe:].clone()
        out = self.held.attend(queries, scale=scale)[0]
        if self.cache.prompt_complete:
            rows = []
            for row, tokens in enumerate(self.cache.row_tokens):
                last = self.latest[row : row + 1, :, -min(observe, tokens) :]
                rows.append(Row(row, last, *self.held.row(row), scale))
            self._compress(rows)
            self.held = self.latest = None
        return out

    def _compress(self, rows: list[Row]) -> None:
        self.state = self.cache.method.compress(rows, self.cache.plan)

    def nbytes(self) -> dict[str, int]:
        """Bytes by tier of the tensors that exist."""
        if self.state is not None:
            return self.state.nbytes()
        held = 0 if self.held is None else self.held.nbytes
        latest = 0 if self.latest is None else storage_bytes(self.latest)
        return {"device": held + latest, "host": 0, "disk": 0}

    def get_seq_length(self) -> int:
        """Tokens seen, padding included: the length that positions and masks are made for."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, which must have come after the prompt."""
        tokens = abs(tokens_to_remove)
        if tokens == 0 or self.seen == 0:
            return
        if self.state is None or self.seen - tokens < self.cache.prompt_tokens:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}, but only "
                f"{max(self.seen - self.cache.prompt_tokens, 0)} tokens came after the prompt, "
                "and a compressed prompt cannot be cropped"
            )
        self.state.crop(tokens)
        self.seen -= tokens
        self.cache.tokens = self.seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.seen:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.seen == 0:
            return
        if self.state is None:
            raise ValueError("rows cannot be selected before the prompt is complete")
        self.state.select_rows(indices.to(self.device, torch.int64))
        self.batch_size = len(indices)
