"""Several turns of several methods on one cache each, behind one prefill of the first prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kv_bench.answers import holds_every_layer, left_padded
from kv_bench.conversation import Conversation
from kv_bench.shared import Shared
from kv_integration import Attached, KVCache, Method, attach
from kv_integration.answer import decode_answer, end_tokens, pad_token


@torch.no_grad()
def dialogues(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    methods: Sequence[Method],
    *,
    max_new_tokens: int,
) -> list[list[list[str]]]:
    """Greedy answers `[method][conversation][turn]`, as each method alone would give them.

    All conversations have as many turns. A model's own answers, right or wrong, stay in its cache.
    Where layers have a sliding window, whose cache cannot go back and counts padding, each method
    and each conversation runs by itself.
    """
    with attach(model, tokenizer) as kv:
        if holds_every_layer(kv, methods[0]):
            return _together(kv, tokenizer, conversations, methods, max_new_tokens)
        return [
            [
                _together(kv, tokenizer, [one], [method], max_new_tokens)[0][0]
                for one in conversations
            ]
            for method in methods
        ]


def _together(
    kv: Attached,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    methods: Sequence[Method],
    max_new_tokens: int,
) -> list[list[list[str]]]:
    """Conversations in one batch, methods behind one prefill."""
    ends = end_tokens(kv.model, tokenizer)
    shared = Shared(methods)
    cache = kv.cache(shared)
    talk = Dialogue(kv.model, cache, pad_token(tokenizer, ends), ends)
    first = talk.say([one.ids for one in conversations])
    prompt, found = talk.mask, []
    for index in range(len(methods)):
        shared.choose(index)
        talk.mask = prompt
        answers = talk.turns(first, [one.later for one in conversations], max_new_tokens)
        found.append([[decode_answer(tokenizer, x, ends) for x in row] for row in answers])
        if index + 1 < len(methods):
            cache.crop(prompt.shape[1] - cache.get_seq_length())
    return found


class Dialogue:
    """A batch of conversations on one cache. Rows say unequal numbers of tokens, or none.

    mask: int64[B, T] of all that was said so far, 0 for padding.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, pad: int, ends: set[int]) -> None:
        self.model, self.cache, self.pad, self.ends = model, cache, pad, ends
        self.mask: Tensor = torch.empty(0)

    def say(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Put tokens of each row after what was said; logits [B, V] after the last of them."""
        ids, new = left_padded(rows, self.pad, self.model.device)
        self.mask = torch.cat([self.mask, new], dim=1) if self.mask.numel() else new
        places = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self.model(
            ids,
            attention_mask=self.mask,
            position_ids=places,
            past_key_values=self.cache,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    def turns(
        self, logits: Tensor, later: Sequence[Sequence[Sequence[int]]], max_new_tokens: int
    ) -> list[list[list[int]]]:
        """Token ids of the answers `[row][turn]`, the first from `logits`, the others to `later`.

        An answer's end token is not part of it: the next turn brings it with its template.
        """
        answers, rest = self.answer(logits, max_new_tokens)
        found = [[answer] for answer in answers]
        for turn in range(len(later[0])):
            said = [[*end, *row[turn]] for end, row in zip(rest, later, strict=True)]
            answers, rest = self.answer(self.say(said), max_new_tokens)
            for row, answer in zip(found, answers, strict=True):
                row.append(answer)
        return found

    def answer(
        self, logits: Tensor, max_new_tokens: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Each row's answer, and what of it the cache has not been given yet."""
        answers: list[list[int]] = [[] for _ in logits]
        open_rows = set(range(len(answers)))
        for left in reversed(range(max_new_tokens)):
            for row, token in enumerate(logits.argmax(-1).tolist()):
                if row in open_rows and token in self.ends:
                    open_rows.remove(row)
                elif row in open_rows:
                    answers[row].append(token)
            if not open_rows or left == 0:
                break
            logits = self.say([x[-1:] if row in open_rows else [] for row, x in enumerate(answers)])
        return answers, [x[-1:] if row in open_rows else [] for row, x in enumerate(answers)]
