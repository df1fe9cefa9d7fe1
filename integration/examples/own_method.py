"""A sixth method from the same pieces: keep the paragraphs that the end of the prompt looks at.

python own_method.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from kv_integration import Eviction, Plan, Row, attach
from kv_integration.budget import split_window
from kv_integration.embedded import model_path
from kv_integration.eviction import with_latest
from kv_integration.haystack import needle_prompt, read_keys
from kv_integration.method import Context
from kv_integration.observation import observed_scores
from kv_integration.segments import SegmentPlan, cut_offsets
from kv_policies import top_segments
from kv_score import segment_statistics
from kv_segment import by_punctuation


@dataclass(frozen=True)
class ParagraphKV(Eviction):
    """Whole paragraphs in falling order of their mean attention, until the budget."""

    budget: int | float = 0.1
    observe: int = 32

    def begin(self, ids: Sequence[Tensor], context: Context) -> Plan:
        return SegmentPlan(ids, context.delimiters(("\n\n",)), by_punctuation)

    def keep(self, row: Row, plan: Plan) -> Tensor:
        budget = row.granted(self.budget)
        window, selected = split_window(budget, row.queries.shape[2])
        scores = observed_scores(row, window, pooling="max", kernel=7)
        offsets = cut_offsets(plan.of(row), row.tokens - window)
        mean, _ = segment_statistics(scores, offsets)
        chosen = top_segments(mean, scores, offsets, selected)
        return with_latest(chosen, row, window)


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path())
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    prompt = needle_prompt(tokenizer, context=2048, depth=0.5, keys=read_keys(model_path()))
    ids = torch.tensor([prompt.ids])
    with attach(model, tokenizer) as kv:
        cache = kv.cache(ParagraphKV(budget=0.1))
        output = model.generate(ids, past_key_values=cache, max_new_tokens=8)
        print(tokenizer.decode(output[0, ids.shape[1] :]), "- expected", prompt.expected)
        print(cache.report())


if __name__ == "__main__":
    main()
