"""What one layer of the embedded model was given and gave, in a prompt and in decoding steps."""

from __future__ import annotations

from functools import cache
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kv_integration import attach, haystack
from kv_integration.embedded import model_path
from kv_integration.layer import CompressedLayer


@cache
def embedded():
    """The embedded model in float32, and its tokenizer."""
    folder = model_path()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


class RealPrompt:
    """As `slow.Prompt`: queries [H_q, T, D], keys and values [H, T, D] of one layer."""

    def __init__(self, queries, keys, values, scale):
        self.queries, self.keys, self.values = queries[0], keys[0], values[0]
        self.scale, self.tokens = scale, keys.shape[2]
        self.heads = range(keys.shape[1])

    def of(self, head):
        group = len(self.queries) // len(self.keys)
        queries = self.queries[head * group : (head + 1) * group]
        return (np.float64(x) for x in (queries, self.keys[head], self.values[head]))


def run(method, *, context, steps, seed=0):
    """The cache, ids, and for each layer its prompt and `(queries, keys, values, out)` per step."""
    model, tokenizer = embedded()
    keys = haystack.read_keys(model_path())
    ids = haystack.needle_prompt(tokenizer, context=context, depth=0.4, seed=seed, keys=keys).ids
    given = {}
    original = CompressedLayer.attend

    def attend(layer, queries, keys, values, *, scale, **options):
        out = original(layer, queries, keys, values, scale=scale, **options)
        given.setdefault(layer.number, []).append((queries, keys, values, out, scale))
        return out

    with attach(model, tokenizer) as kv, patch.object(CompressedLayer, "attend", attend):
        cache = kv.cache(method)
        tokens = model.generate(
            torch.tensor([ids]), past_key_values=cache, max_new_tokens=steps + 1, do_sample=False
        )[0]
    layers = []
    for number in sorted(given):
        (queries, keys, values, _, scale), *rest = given[number]
        prompt = RealPrompt(queries, keys, values, scale)
        layers.append((prompt, [[np.float64(x[0, :, 0]) for x in step[:4]] for step in rest]))
    return cache, tokens.tolist(), layers
