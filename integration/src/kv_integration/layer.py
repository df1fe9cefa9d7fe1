"""One layer of the cache: it takes the prompt, has it compressed, then answers decoding steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from kv_integration.buffer import KVBuffer
from kv_integration.latest import LatestQueries
from kv_integration.method import LayerState, Row
from kv_integration.rope import RopeTables, Turn
from kv_score import attend_and_accumulate

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
        self.number = 0
        self.is_initialized = True
        self.reset()

    def reset(self) -> None:
        """Forget everything, ready for a new prompt."""
        self.seen = 0
        self.state: LayerState | None = None
        self.held: KVBuffer | None = None
        self.latest = LatestQueries(self.cache.method.observe)
        self.rope: RopeTables | None = None
        self.since = 0
        self.token_bytes = 0
        self.batch_size = 0
        self.scale = 1.0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: `attend` makes the state from the first keys and values."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values, contiguous; `attend` stores them.

        Raises:
            ValueError: the model is not attached, so nobody would call `attend`.
        """
        if self.seen + key_states.shape[2] != self.cache.tokens:
            raise ValueError(
                "the model that this cache belongs to is not attached (any more): use the cache "
                "inside `with attach(model, tokenizer)` or before detach()"
            )
        # Projections lie token by token; attention reads a prompt head by head.
        return key_states.contiguous(), value_states.contiguous()

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        exact: ExactAttention,
        turn: Turn | None = None,
    ) -> Tensor:
        """Attention output [B, H_q, Q, D] of tokens that enter this layer; stores them.

        queries: [B, H_q, Q, D]; keys, values: [B, H_kv, Q, D]; exact: causal attention among one
        row's own tokens, as the model would compute it without this cache. turn: how the keys were
        turned, if the method wants to know.
        """
        batch, _, new, _ = keys.shape
        if self.seen + new != self.cache.tokens:
            raise ValueError(
                f"a layer with {self.seen} of {self.cache.tokens} tokens attends to {new} more: "
                "layers whose attention runs more than once are not supported"
            )
        if not self.token_bytes:
            sizes = (x.shape[1] * x.shape[3] * x.element_size() for x in (keys, values))
            self.token_bytes = sum(sizes)
        self.batch_size, self.device, self.scale = batch, keys.device, scale
        self.seen += new
        if turn is not None:
            self.rope = self.cache.rope_tables(self.rope, turn, keys.device)
        fresh = self.cache.fresh
        if fresh == 0:
            return self._step(queries, keys, values)
        if fresh == new:
            return self._prompt(queries, keys, values, exact)
        q, k, v = (x[:, :, :fresh] for x in (queries, keys, values))
        prompt = self._prompt(q, k, v, exact)
        q, k, v = (x[:, :, fresh:] for x in (queries, keys, values))
        return torch.cat([prompt, self._step(q, k, v)], dim=2)

    def _prompt(
        self, queries: Tensor, keys: Tensor, values: Tensor, exact: ExactAttention
    ) -> Tensor:
        """Tokens of the prompt: all of them, or a part that is held until the rest is there.

        All of them are held, too, until their surprisal is known, if the method needs it.
        """
        if self.held is None and self.cache.prompt_complete:
            received: list[Tensor] = []
            if self.cache.method.accumulates and self.cache.surprise is None:
                exact = self._accumulating(received)
            out = self._prefill(queries, keys, values, exact)
            rows = self._rows(queries, keys, values, received)
            if self.cache.surprise is None:
                self._compress(rows)
            else:
                self.held = KVBuffer.stack([(row.keys, row.values) for row in rows])
                self.latest.append(queries, self.cache.prompt_valid)
            return out
        return self._hold(queries, keys, values)

    def _step(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Tokens after the prompt; rows whose padding is not on the left are put in order first."""
        state, valid, order = self.state, self.cache.valid, self.cache.order
        if state is None:
            raise ValueError(
                "tokens came after a prompt that was not compressed; reset() the cache"
            )
        if order is None:
            out = state.step(queries, keys, values, valid=valid, scale=self.scale)
        else:
            queries, keys, values = (in_order(x, order) for x in (queries, keys, values))
            out = state.step(queries, keys, values, valid=valid, scale=self.scale)
            out = in_order(out, order.argsort(dim=1))
        if self.cache.recompress_after is not None:
            self.latest.append(queries, valid)
            self.since += queries.shape[2]
        return out

    def recompress(self) -> None:
        """Compress again if more tokens came than `recompress_after` allows.

        Not as soon as they came, but before the next ones: a draft's tokens can be taken back.
        """
        limit = self.cache.recompress_after
        if limit is not None and self.since > limit and self.state is not None:
            self._compress(self._recalled(self.state))

    def _recalled(self, state: LayerState) -> list[Row]:
        """What `state` holds, to be compressed again."""
        rows = []
        for row, seen in enumerate(self.cache.row_seen):
            keys, values, positions, log_size = state.recall(row, seen)
            rows.append(
                self._row(
                    row,
                    self.latest.row(row),
                    keys,
                    values,
                    seen=seen,
                    positions=positions,
                    log_size=log_size,
                )
            )
        return rows

    def _prefill(
        self, queries: Tensor, keys: Tensor, values: Tensor, exact: ExactAttention
    ) -> Tensor:
        """Exact attention of a whole prompt; rows with padding go one by one, without it."""
        if self.cache.prompt_valid is None:
            return exact(queries, keys, values)
        out = torch.zeros_like(queries[..., : values.shape[-1]])
        for row, tokens in enumerate(self.cache.row_tokens):
            part = slice(row, row + 1), slice(None), slice(keys.shape[2] - tokens, None)
            out[part] = exact(queries[part], keys[part], values[part])
        return out

    def _accumulating(self, received: list[Tensor]) -> ExactAttention:
        """Exact attention that adds to `received`, row by row, what the keys got: [1, H_kv, T]."""

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            out, sums = attend_and_accumulate(
                queries, keys, values, scale=self.scale, reduce="kv_head"
            )
            received.extend(sums.split(1))
            return out

        return attend

    def _row(
        self, index: int, queries: Tensor, keys: Tensor, values: Tensor, **recalled: Any
    ) -> Row:
        layers = len(self.cache.compressed)
        recalled["rope"] = self.rope
        return Row(index, queries, keys, values, self.scale, self.number, layers, **recalled)

    def _rows(
        self, queries: Tensor, keys: Tensor, values: Tensor, received: list[Tensor]
    ) -> list[Row]:
        """The prompt's rows without padding, which stands on the left."""
        observe = max(self.cache.method.observe, 1)
        rows = []
        for row, tokens in enumerate(self.cache.row_tokens):
            part, last = slice(row, row + 1), min(observe, tokens)
            own = (x[part, :, x.shape[2] - tokens :] for x in (keys, values))
            sums = {"received": received[row]} if received else {}
            rows.append(self._row(row, queries[part, :, queries.shape[2] - last :], *own, **sums))
        return rows

    def _hold(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Part of a prompt that comes in pieces: keep it whole until the last piece is there."""
        if self.held is None:
            self.held = KVBuffer.empty(keys.shape[:2], keys, values)
        self.held.append(keys, values, self.cache.prompt_valid)
        self.latest.append(queries, self.cache.prompt_valid)
        out = self.held.attend(queries, scale=self.scale)[0]
        if self.cache.prompt_complete and self.cache.surprise is None:
            self.finish()
        return out

    def finish(self) -> None:
        """The whole prompt is held, and all that the method wants to know about it is known."""
        held = self.held
        if held is not None:
            rows = [
                self._row(row, self.latest.row(row), *held.row(row))
                for row in range(len(self.cache.row_tokens))
            ]
            self._compress(rows)
            self.held = None

    def _compress(self, rows: list[Row]) -> None:
        self.state = self.cache.method.compress(rows, self.cache.plan)
        self.latest.clear()
        self.since = 0

    def nbytes(self) -> dict[str, int]:
        """Bytes by tier of the tensors that exist."""
        if self.state is not None:
            tiers = self.state.nbytes()
            return tiers | {"device": tiers["device"] + self.latest.nbytes}
        held = 0 if self.held is None else self.held.nbytes
        return {"device": held + self.latest.nbytes, "host": 0, "disk": 0}

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
        compressing = self.cache.recompress_after is not None
        after = self.since if compressing else self.seen - self.cache.prompt_tokens
        if self.state is None or tokens > after:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}, but only {max(after, 0)} tokens came "
                f"after the {'last compression' if compressing else 'prompt'}, and what is "
                "compressed cannot be cropped"
            )
        self.state.crop(tokens)
        self.latest.crop(tokens)
        self.seen -= tokens
        self.since = max(self.since - tokens, 0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.seen:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is None:
            return
        rows = indices.to(self.device, torch.int64)
        self.state.select_rows(rows)
        self.latest.select_rows(rows)
        self.batch_size = len(indices)


class SlidingLayer(DynamicSlidingWindowLayer):
    """transformers' layer with a sliding window, without the prompt behind it.

    There the window is a view, which keeps all keys of a longer prompt alive until the next token.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        states = super().update(key_states, value_states, *args, **kwargs)
        if not self.record_past and states[0].shape[2] > self.sliding_window:
            window = slice(states[0].shape[2] - self.sliding_window + 1, None)
            self.keys, self.values = (x[:, :, window].clone() for x in states)
        return states


def in_order(x: Tensor, order: Tensor) -> Tensor:
    """Tokens of x [B, H, Q, D] in the order [B, Q]."""
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
