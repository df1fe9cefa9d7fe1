"""Training sequences: prose with facts, and questions about them, as arrays of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizer import ASSISTANT, USER
from transformers import PreTrainedTokenizerFast

from kv_integration import haystack

IGNORE = -100


@dataclass
class Episode:
    """One sequence. `answer` marks tokens to predict, `source` says where they are copied from.

    ids: int64[T]; answer: bool[T] (token t is part of an answer); prose: bool[T] (token t is plain
    prose); source: int64[T], the position of the fact's token that token t repeats, or -1.
    """

    ids: NDArray[np.int64]
    answer: NDArray[np.bool_]
    prose: NDArray[np.bool_]
    source: NDArray[np.int64]


class Sampler:
    """Draws episodes; every choice comes from `seed`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        streams: Sequence[NDArray[np.int64]],
        weights: Sequence[float],
        keys: Sequence[str],
        seed: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.rng = np.random.default_rng(seed)
        self.streams = list(streams)
        self.weights = np.asarray(weights) / np.sum(weights)
        self.keys = list(keys)
        vocab = tokenizer.get_vocab()
        self.key_id = {key: vocab["\u0120" + key] for key in keys}
        self.first = np.array([vocab[f"\u0120{n:03d}"] for n in range(1000)])
        self.second = np.array([vocab[f"{n:03d}"] for n in range(1000)])
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.user, self.assistant = vocab[USER], vocab[ASSISTANT]
        self.stop, self.ask, self.is_ = vocab["."], vocab["?"], vocab["\u0120is"]
        before, after = haystack.QUESTION.split(" {key}")
        self.question = self.encode("\n\n" + before), self.encode(after)
        self.bare_question = self.encode(before)
        self.fact = self.encode(" " + haystack.NEEDLE.split(" {key}")[0])
        ends = [t for t, i in vocab.items() if t.endswith((".", ".\u010a", ".\u010a\u010a"))]
        self.sentence_end = np.zeros(len(tokenizer), dtype=bool)
        self.sentence_end[[vocab[t] for t in ends]] = True

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def pairs(self, count: int) -> list[tuple[int, int, int]]:
        """`count` facts with different keys: token ids of the key and of both halves."""
        out = []
        for index in self.rng.choice(len(self.keys), size=count, replace=False):
            key = self.keys[index]
            while True:
                high, low = self.rng.integers(0, 1000, size=2)
                if not haystack.is_held_out(f"{key}:{high:03d}{low:03d}", share=0.1):
                    break
            out.append((self.key_id[key], int(self.first[high]), int(self.second[low])))
        return out

    def dense(self, length: int) -> Episode:
        """Facts without prose, then all of them asked in another order: the circuit's nursery."""
        count = length // 11
        facts = self.pairs(count)
        ids, where = [], {}
        for key, high, low in facts:
            ids += [key, self.is_, high, low, self.stop]
            where[key] = len(ids) - 3
        answers: list[tuple[int, int]] = []
        for index in self.rng.permutation(count):
            key, high, low = facts[index]
            ids += [key, self.ask, self.assistant, high, low, self.stop]
            answers += [(len(ids) - 3, where[key]), (len(ids) - 2, where[key] + 1)]
        return self.episode(ids, answers, [], length)

    def prose_ids(self, length: int) -> NDArray[np.int64]:
        stream = self.streams[self.rng.choice(len(self.streams), p=self.weights)]
        start = self.rng.integers(0, len(stream) - length)
        return stream[start : start + length]

    def document(self, length: int, facts: int, questions: int) -> Episode:
        """Prose with `facts` needles between its sentences, then `questions` about some of them."""
        drawn = self.pairs(facts)
        asked = [drawn[i] for i in self.rng.permutation(facts)[:questions]]
        fact_size = len(self.fact) + 5
        ask_size = len(self.question[0]) + len(self.question[1]) + 6
        body = self.prose_ids(max(length - 2 - facts * fact_size - questions * ask_size, 0))
        ends = np.flatnonzero(self.sentence_end[body]) + 1
        ends = np.concatenate([[0], ends]) if len(ends) else np.array([0])
        # Uniform in depth, not in sentence number; several facts may meet at one place.
        cuts = np.sort(
            ends[np.searchsorted(ends, self.rng.integers(0, len(body) + 1, facts), "right") - 1]
        )
        ids: list[int] = [self.bos, self.user]
        prose = [(2, 2)]
        where, begin = {}, 0
        for cut, (key, high, low) in zip(cuts, drawn, strict=True):
            prose.append((len(ids), len(ids) + cut - begin))
            ids += body[begin:cut].tolist() + self.fact + [key, self.is_, high, low, self.stop]
            where[key] = len(ids) - 3
            begin = cut
        prose.append((len(ids), len(ids) + len(body) - begin))
        ids += body[begin:].tolist()
        answers: list[tuple[int, int]] = []
        for turn, (key, high, low) in enumerate(asked):
            lead = self.question[0] if turn == 0 else [self.user, *self.bare_question]
            ids += [*lead, key, *self.question[1], self.assistant, high, low, self.stop, self.eos]
            answers += [(len(ids) - 4, where[key]), (len(ids) - 3, where[key] + 1)]
            answers += [(len(ids) - 2, -1), (len(ids) - 1, -1)]
        return self.episode(ids, answers, prose, length)

    def episode(
        self,
        ids: list[int],
        answers: list[tuple[int, int]],
        prose: list[tuple[int, int]],
        length: int,
    ) -> Episode:
        ids = ids[:length] + [self.eos] * (length - len(ids))
        out = Episode(
            np.array(ids), np.zeros(length, bool), np.zeros(length, bool), np.full(length, -1)
        )
        for at, source in answers:
            if at < length:
                out.answer[at] = True
                out.source[at] = source
        for start, end in prose:
            out.prose[start : min(end, length)] = True
        return out
