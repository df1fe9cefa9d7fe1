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
from kv_integration.budget import budget_entries, split_window
from kv_integration.embedded import model_path
from kv_integration.haystack import needle_prompt, read_keys
from kv_integration.method import Context, segment_prompt
from kv_integration.methods.sablock import cut_offsets
from kv_integration.observation import observed_scores
from kv_policies import top_segments
from kv_score import segment_statistics
from kv_segment import by_punctuation


@dataclass(frozen=True)
class ParagraphKV(Eviction):
    """Whole paragraphs in falling order of their mean attention, until the budget."""

    budget: int | float = 0.1
    observe: int = 32

    def begin(self, ids: Sequence[Tensor], context: Context) -> Plan:
        return Plan(segment_prompt(ids, context.delimiters(("\n\n",)), by_punctuation))

    def keep(self, row: Row, plan: Plan) -> Tensor:
        budget = budget_entries(self.budget, row.tokens)
        window, selected = split_window(budget, row.queries.shape[2])
        scores = observed_scores(row, window, pooling="max", kernel=7)
        offsets = cut_offsets(plan.offsets[row.index], row.tokens - window)
        mean, _ = segment_statistics(scores, offsets)
        chosen = top_segments(mean, scores, offsets, selected)
        latest = torch.arange(row.tokens - window, row.tokens, device=chosen.device)
        return torch.cat([chosen, latest[None, None]], dim=-1)


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
