"""Several turns on one cache: prompts, what is said, what each method answers, and the command."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from small_model import make_model, make_tokenizer
from test_answers import sliding_model

from kv_bench import turns as module
from kv_bench.cli import main
from kv_bench.conversation import Conversation, conversation, later_turn, with_needles
from kv_bench.dialogue import Dialogue, dialogues
from kv_integration import (
    FullKV,
    InfiniGen,
    Method,
    Quest,
    SABlock,
    SentenceKV,
    StreamingLLM,
    attach,
    haystack,
)
from kv_integration.cli.inputs import load_model

TOKENIZER = make_tokenizer()
METHODS: list[Method] = [
    FullKV(),
    SABlock(budget=24, window=8),
    SentenceKV(budget=24, window=8),
    Quest(budget=24, page=4, offload=True),
    InfiniGen(budget=24),
    StreamingLLM(budget=40),
]
KEYS = ("garden", "river", "market", "window")


def talks(count: int = 2, *, turns: int = 3) -> list[Conversation]:
    """Conversations whose first prompts have unequal lengths."""
    return [
        conversation(TOKENIZER, context=230 + 30 * i, turns=turns, seed=i, keys=KEYS)
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_holds_a_needle_for_every_turn(seed: int) -> None:
    talk = conversation(TOKENIZER, context=400, turns=4, seed=seed, keys=KEYS)
    text = TOKENIZER.decode(talk.ids)
    assert len(talk.ids) <= 400
    asked = [text.rsplit("What is the magic number for ", 1)[1]]
    asked += [
        TOKENIZER.decode(turn).split("What is the magic number for ")[1] for turn in talk.later
    ]
    for question, number in zip(asked, talk.expected, strict=True):
        key = question.split("?")[0]
        assert text.count(f"The magic number for {key} is {number}.") == 1
    assert len(set(talk.expected)) == len(talk.expected) == 4
    assert conversation(TOKENIZER, context=400, turns=4, seed=seed, keys=KEYS) == talk
    assert conversation(TOKENIZER, context=400, turns=4, seed=seed + 9, keys=KEYS) != talk


def test_needles_stand_between_sentences_evenly() -> None:
    rng = random.Random(0)
    words = [f"{rng.choice('abc')} word here. " for _ in range(60)]
    text = with_needles("".join(words), ["NEEDLE one.", "NEEDLE two.", "NEEDLE three."])
    places = [text.index(f"NEEDLE {n}.") / len(text) for n in ("one", "two", "three")]
    for place, wanted in zip(places, (1 / 6, 3 / 6, 5 / 6), strict=True):
        assert abs(place - wanted) < 0.05
    without = text
    for needle in ("one", "two", "three"):
        assert f". NEEDLE {needle}. " in text
        without = without.replace(f"NEEDLE {needle}. ", "")
    assert without.split() == "".join(words).split()


def test_a_later_turn_is_what_the_template_adds() -> None:
    question = "What is it?"
    assert TOKENIZER.decode(later_turn(TOKENIZER, question)) == f"<|user|>{question}<|assistant|>"
    ending = make_tokenizer()
    ending.chat_template = (
        "{% for m in messages %}<|user|>{{ m['content'] }}<|eos|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    expected = f"<|eos|><|user|>{question}<|eos|><|assistant|>"
    assert ending.decode(later_turn(ending, question)) == expected
    plain = make_tokenizer(template=False)
    assert plain.decode(later_turn(plain, question)) == f"\n\nQuestion: {question}\nAnswer:"


def alone(model, talk: Conversation, method: Method, limit: int, end: int = 0) -> list[str]:
    """One conversation by a loop of forward passes, without padding and without other methods."""
    texts = []
    with attach(model, TOKENIZER) as kv, torch.no_grad():
        cache, new = kv.cache(method), list(talk.ids)
        for turn in range(1 + len(talk.later)):
            answer: list[int] = []
            for _ in range(limit):
                logits = model(torch.tensor([new]), past_key_values=cache).logits
                token = int(logits[0, -1].argmax())
                if token == end:
                    new = []
                    break
                answer.append(token)
                new = [token]
            texts.append(TOKENIZER.decode(answer, skip_special_tokens=True).strip())
            if turn < len(talk.later):
                new = new + talk.later[turn]
    return texts


@pytest.mark.parametrize("make", [lambda: make_model(len(TOKENIZER)), sliding_model])
def test_equal_to_each_method_and_conversation_alone(make) -> None:
    """Unequal prompts and answers in a batch; a turn goes to the method whose turn it is."""
    model, spoken = make(), talks()
    found = dialogues(model, TOKENIZER, spoken, METHODS, max_new_tokens=5)
    for method, rows in zip(METHODS, found, strict=True):
        assert rows == [alone(model, talk, method, 5) for talk in spoken], method.name
    assert any(rows != found[0] for rows in found[1:])  # methods do tell apart


def test_rows_end_their_answers_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever token ends an answer, none of it is said twice or left out, in any row."""
    model, spoken = make_model(len(TOKENIZER)), talks(3, turns=2)
    answers = [alone(model, talk, FullKV(), 6, end=-1)[0] for talk in spoken]
    assert len(set(answers)) > 1
    common: dict[int, int] = {}
    for token in range(len(TOKENIZER)):
        text = TOKENIZER.decode([token])
        common[token] = sum(bool(text.strip()) and text in answer for answer in answers)
    end = max((t for t in common if 0 < common[t] < len(answers)), key=lambda t: common[t])
    monkeypatch.setattr("kv_bench.dialogue.end_tokens", lambda *_: {end})
    for method in (FullKV(), SABlock(budget=24, window=8)):
        (rows,) = dialogues(model, TOKENIZER, spoken, [method], max_new_tokens=6)
        assert rows == [alone(model, talk, method, 6, end=end) for talk in spoken]


def test_what_was_said_is_counted_row_by_row() -> None:
    model = make_model(len(TOKENIZER))
    with attach(model, TOKENIZER) as kv, torch.no_grad():
        cache = kv.cache(FullKV())
        talk = Dialogue(model, cache, 0, {0})
        talk.say([[5, 6, 7], [8]])
        talk.say([[9], []])
        last = talk.say([[], [3, 4]])
        assert talk.mask.tolist() == [[1, 1, 1, 1, 0, 0], [0, 0, 1, 0, 1, 1]]
        assert cache.row_seen == [4, 3]
        one = Dialogue(model, kv.cache(FullKV()), 0, {0})
        torch.testing.assert_close(one.say([[8, 3, 4]])[0], last[1], atol=1e-5, rtol=1e-4)


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, ["turns", *(str(argument) for argument in arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def small(folder: Path, out: Path) -> list[str | Path]:
    return [
        *("--model", folder, "--out", out, "--contexts", "200,240", "--turns", "3"),
        *("--samples", "3", "--batch", "2", "--budgets", "0.5,32", "--max-new-tokens", "4"),
    ]


def test_files_figures_and_summary(folder: Path, tmp_path: Path) -> None:
    result = run(*small(folder, tmp_path), "--methods", "full,snapkv")
    assert result.exit_code == 0, result.stderr
    records = json.loads((tmp_path / "results.json").read_text())
    variants = {("full", 1.0), ("snapkv", 0.5), ("snapkv", 32)}
    assert {(r["method"], r["budget"], r["context"], r["turn"]) for r in records} == {
        (*variant, context, turn)
        for variant in variants
        for context in (200, 240)
        for turn in (1, 2, 3)
    }
    assert all(r["samples"] == 3 and 0 <= r["accuracy"] <= 1 for r in records)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("turns-200.png", "turns-240.png", "results.csv", "results.json", "settings.json")
    }
    for method, budget in variants:
        assert any(line.split()[:2] == [method, str(budget)] for line in result.stdout.splitlines())


def test_accuracy_is_that_of_each_conversation_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A random model finds no needle: call an answer right when its text is of even length.
    monkeypatch.setattr(module, "is_correct", lambda answer, expected: len(answer) % 2 == 0)
    run(*small(folder, tmp_path), "--methods", "full,sablock", "--budgets", "32")
    loaded = load_model(folder, dtype="auto", device="cpu")
    by_cell: dict[tuple[str, int], list[float]] = {}
    for record in json.loads((tmp_path / "results.json").read_text()):
        by_cell.setdefault((record["method"], record["context"]), []).append(record["accuracy"])
    for (name, context), found in by_cell.items():
        method = FullKV() if name == "full" else SABlock(budget=32)
        spoken = module.make_conversations(loaded, None, context, 3, 3, 0)
        texts = [alone(loaded.model, talk, method, 4) for talk in spoken]
        expected = [sum(len(text[turn]) % 2 == 0 for text in texts) / 3 for turn in range(3)]
        assert found == pytest.approx(expected)


def test_a_second_call_adds_only_what_is_missing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, list[str]]] = []
    original = module.count_right

    def counting(loaded, conversations, variants, max_new_tokens):
        asked.append((len(conversations), [variant.label for variant in variants]))
        return original(loaded, conversations, variants, max_new_tokens)

    monkeypatch.setattr(module, "count_right", counting)
    base = [*small(folder, tmp_path), "--contexts", "200"]
    run(*base, "--methods", "full")
    assert asked == [(2, ["full"]), (1, ["full"])]
    before = json.loads((tmp_path / "results.json").read_text())
    asked.clear()
    run(*base, "--methods", "full,quest")
    assert asked == [(2, ["quest-0.5", "quest-32"]), (1, ["quest-0.5", "quest-32"])]
    after = json.loads((tmp_path / "results.json").read_text())
    assert [record for record in after if record["method"] == "full"] == before
    asked.clear()
    run(*base, "--methods", "full,quest")
    assert asked == []
    assert "holds results with turns 3, now it is 2" in run(*base, "--turns", "2").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--turns", "0"], "--turns must be at least 1, got 0"),
        (["--turns", "4"], "--turns is 4, but needles have only 3 keys"),
        (["--contexts", "40"], "context is 40 tokens, but needle and question alone take"),
        (["--contexts", "4090"], "more than the model's 4096 positions"),
        (["--methods", "dynamic"], "unknown method 'dynamic'"),
        (["--depths", "3"], "No such option"),
    ],
)
def test_wrong_input(folder: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run(*small(folder, tmp_path), *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and message in result.stderr
    assert not (tmp_path / "results.csv").exists()


def test_any_text_is_a_haystack() -> None:
    text = "It was a bright cold day. " * 50
    talk = conversation(TOKENIZER, context=200, turns=2, seed=0, keys=KEYS, text=text)
    assert "bright cold" in TOKENIZER.decode(talk.ids)
    with pytest.raises(ValueError, match="the haystack is empty"):
        conversation(TOKENIZER, context=200, turns=2, seed=0, keys=KEYS, text=" \n")
    default = conversation(TOKENIZER, context=400, turns=1, seed=0, keys=KEYS)
    middle = TOKENIZER.decode(default.ids)[40:80]
    assert middle in "\n\n".join(haystack.topics(held_out=True))
