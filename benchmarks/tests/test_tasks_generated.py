"""Laws of the generated tasks, for tokenizers of several kinds, lengths and seeds.

Each task is solved from its text by a reader of its own, which knows the prompt and nothing else.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_model import make_tokenizer
from tokenizers_for_tests import KINDS, tokenizer_of

from kv_bench.tasks import GROUPS, TASKS, Sample, Samples, Task, encode, expand, task_named
from kv_bench.tasks.base import cut
from kv_bench.tasks.fit import largest
from kv_bench.tasks.generated import GeneratedTask
from kv_bench.tasks.prose import insert, prose, sentence_starts
from kv_bench.tasks.ruler.word_counts import zeta
from kv_integration import haystack

GENERATED = [name for name, task in TASKS.items() if isinstance(task, GeneratedTask)]
ENOUGH = 9000  # tokens with which every task fits every tokenizer, one token per byte included
TEXT = "One short sentence. Is this another one? It is! " * 3
# A sample is built about five times.
half = settings(max_examples=max(settings().max_examples // 2, 10))
fewer = settings(max_examples=max(settings().max_examples // 4, 10))
tasks = st.sampled_from(GENERATED)
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**32)
lengths = st.integers(200, 2500).map(lambda tokens: ENOUGH if tokens > 2400 else tokens)


def generated(name: str) -> GeneratedTask:
    task = TASKS[name]
    assert isinstance(task, GeneratedTask)
    return task


def prompt(sample: Sample) -> str:
    return sample.context + sample.questions[0] + sample.answer_prefix


@half
@given(tasks, kinds, lengths, seeds, st.integers(0, 9), st.booleans())
def test_a_sample_fits_its_length_and_its_text_has_the_answer(
    name: str, kind: str, length: int, seed: int, index: int, own: bool
) -> None:
    task, tokenizer = generated(name), tokenizer_of(kind)
    text = TEXT if own and task.takes_text else None
    samples = task.samples(tokenizer, length=length, count=10, seed=seed, text=text)
    try:
        sample = samples[index]
    except ValueError as error:
        assert length < ENOUGH
        assert f"length is {length} tokens" in str(error)
        return
    tokens = encode(tokenizer, sample).tokens(sample.max_new_tokens)
    assert tokens <= length
    assert length - tokens <= tolerance(name, tokenizer, sample, text)
    assert sample.id == samples.ids[index] == str(index)
    assert solve(name, sample) == [set(right) for right in sample.answers]
    assert task.score([" ".join(right) for right in sample.answers], sample) == 1
    assert task.score([""] * len(sample.questions), sample) == 0


def tolerance(name: str, tokenizer, sample: Sample, text: str | None) -> int:  # type: ignore[no-untyped-def]
    """Tokens of one unit more of the haystack, and some for joins."""

    def size(unit: str) -> int:
        return len(tokenizer(unit, add_special_tokens=False)["input_ids"])

    if name == "ruler_cwe":  # one more word, six or thirty times, with its number
        repeats = 6 if sample.extra["length"] < 4096 else 30
        return repeats * size(" 1000. counterproductive-word")
    if name == "ruler_fwe":  # ranks may gain a word at the same time
        return 12 * size(" abcdef")
    if name in ("ruler_niah_multikey_2", "ruler_niah_multikey_3"):
        return max(size(line) for line in sample.context.split("\n")) + 8
    if name in ("ruler_niah_single_1", "ruler_vt"):
        return max(size(line) for line in sample.context.split("\n")) + 4
    return max(size(f" {word}") for word in prose(text).split()) + 4


def solve(name: str, sample: Sample) -> list[set[str]]:
    if name.startswith("niah"):
        return [solve_needle(sample.context, question) for question in sample.questions]
    solver = {"vt": solve_chain, "cwe": solve_common, "fwe": solve_frequent}
    return [solver.get(name.removeprefix("ruler_"), solve_ruler_needles)(prompt(sample))]


def solve_needle(context: str, question: str) -> set[str]:
    (key,) = re.findall(r"magic number for (\S+)\?", question)
    return set(re.findall(rf"The magic number for {key} is (\d{{6}})\.", context))


def solve_ruler_needles(text: str) -> set[str]:
    (asked,) = re.findall(r"\nWhat (?:are all|is) the special magic \w+ for (.*?) mentioned", text)
    keys = re.split(r", and |, ", asked)
    facts = re.findall(r"One of the special magic \w+ for (\S+(?: \S+)*?) is: (\S+)\.", text)
    return {value for key, value in facts if key in keys}


def solve_chain(text: str) -> set[str]:
    (value,) = re.findall(r"are assigned the value (\d+), they are: $", text)
    own = text[text.rindex("Memorize and track") :]
    facts = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", own)
    found = {value}
    for name, source in facts:  # in the order of the text, so each is known before it is read
        if source in found:
            found.add(name)
    return found - {value}


def solve_common(text: str) -> set[str]:
    own = text[text.rindex("Below is a numbered list") :]
    listed = own.split("\n")[1]
    words = re.split(r"(?:^| )\d+\. ", listed)[1:]
    counts = Counter(words).most_common()
    assert counts[9][1] > counts[10][1]
    return {word for word, _ in counts[:10]}


def solve_frequent(text: str) -> set[str]:
    coded = text.split("\n")[0].split("coded words. ")[1].split()
    counts = Counter(coded).most_common()
    assert counts[0][0] == "..."
    assert counts[3][1] > counts[4][1]
    return {word for word, _ in counts[1:4]}


@fewer
@given(tasks, kinds, seeds)
def test_the_seed_alone_draws(name: str, kind: str, seed: int) -> None:
    task, tokenizer = generated(name), tokenizer_of(kind)

    def draw(seed: int, count: int) -> list[Sample]:
        return list(task.samples(tokenizer, length=1500, count=count, seed=seed))

    try:
        first, second = draw(seed, 2)
    except ValueError as error:  # a solved example comes first, long where a token is a byte
        assert name in ("ruler_cwe", "ruler_vt") and kind == "bytes"
        assert "length is 1500 tokens" in str(error)
        return
    assert draw(seed, 1) == [first]  # neither the count nor the order matters
    assert task.samples(tokenizer, length=1500, count=2, seed=seed)[-1] == second
    assert first.context != second.context
    assert first.context != draw(seed + 1, 1)[0].context


@fewer
@given(kinds, st.integers(1, 12), seeds, st.booleans())
def test_depths_take_turns(kind: str, depths: int, seed: int, ruler: bool) -> None:
    task = task_named("ruler_niah_single_1" if ruler else "niah_single", depths=depths)
    assert isinstance(task, GeneratedTask)
    length = 1500
    for index in (0, depths - 1, depths):
        sample = task.samples(tokenizer_of(kind), length=length, count=depths + 1, seed=seed)[index]
        wanted = 0.5 if depths == 1 else index % depths / (depths - 1)
        text = sample.context
        found = text.index("One of the" if ruler else "The magic number for") / len(text)
        sentences = haystack.sentence_ends(text)
        widest = max(b - a for a, b in zip([0, *sentences], [*sentences, len(text)], strict=True))
        assert abs(found - wanted) <= (widest + 300) / len(text)
        assert sample.extra["depth"] == pytest.approx(wanted, abs=0.05)


@pytest.mark.parametrize("name", GENERATED)
def test_wrong_arguments(name: str) -> None:
    task, tokenizer = generated(name), tokenizer_of("embedded")
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        task.samples(tokenizer, length=0)
    with pytest.raises(ValueError, match="count must be at least 1, got -1"):
        task.samples(tokenizer, count=-1)
    with pytest.raises(ValueError, match=f"{name} is generated and takes no data, got 'x'"):
        task.samples(tokenizer, data="x")
    with pytest.raises(ValueError, match=r"length is 20 tokens, but with the least haystack"):
        task.samples(tokenizer, length=20)[0]
    if task.takes_text:
        with pytest.raises(ValueError, match="text is empty"):
            task.samples(tokenizer, text="  ")[0]
    else:
        with pytest.raises(ValueError, match="takes no text"):
            task.samples(tokenizer, text="prose")


def test_a_prediction_per_question() -> None:
    task = generated("niah_multiquery")
    sample = task.samples(tokenizer_of("embedded"), length=800, count=1)[0]
    with pytest.raises(ValueError, match="one text per question of sample 0: 4 wanted, got 'a'"):
        task.score("a", sample)
    with pytest.raises(ValueError, match="4 wanted"):
        task.score(["a"], sample)
    half = [sample.answers[0][0], "", f"It is {sample.answers[2][0]}.", "7"]
    assert task.score(half, sample) == 0.5


def test_names() -> None:
    assert {name: len(names) for name, names in GROUPS.items()} == {
        "niah": 5,
        "ruler": 13,
        "longbench": 21,
        "infinitebench": 12,
    }
    assert expand("ruler")[-1] == "ruler_qa_2"
    assert expand("gsm8k") == ("gsm8k",)
    assert all(task.name == name and task.metric for name, task in TASKS.items())
    with pytest.raises(ValueError, match=r"there is no task 'ruler_qa_3'; there are niah_single, "):
        expand("ruler_qa_3")
    with pytest.raises(ValueError, match=r"gsm8k has no setting 'depths'; it has shots, "):
        task_named("gsm8k", depths=3)
    with pytest.raises(ValueError, match="turns must be from 1 to keys = 1, got 2"):
        task_named("niah_single", turns=2)
    assert isinstance(task_named("niah_single"), Task)


def test_ruler_prompt_in_the_singular_and_the_plural() -> None:
    tokenizer = tokenizer_of("embedded")
    one = generated("ruler_niah_single_1").samples(tokenizer, length=600, count=1)[0]
    assert one.context.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\nThe grass is green."
    )
    (key,) = re.findall(r"magic numbers for (\S+) is", one.context)
    assert one.questions == (
        f"\nWhat is the special magic number for {key} mentioned in the provided text?",
    )
    assert one.answer_prefix == (
        f" The special magic number for {key} mentioned in the provided text is"
    )
    several = generated("ruler_niah_multivalue").samples(tokenizer, length=600, count=1)[0]
    assert several.context.startswith("Some special magic numbers are hidden within")
    assert " The special magic numbers for " in several.answer_prefix
    assert len(several.answers[0]) == 4


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(0, 200))
def test_largest_is_the_end_of_a_sum(steps: list[int], limit: int) -> None:
    total = [sum(steps[:at]) for at in range(len(steps) + 1)]

    def size(units: int) -> int:
        return total[units] if units < len(total) else total[-1] + 9 * (units - len(total) + 1)

    found = largest(size, limit, least=0, unit=4)
    assert found is not None
    assert size(found) <= limit
    assert limit - size(found) <= 2 or size(found + 1) > limit


def test_largest_has_nothing_when_the_least_is_too_large() -> None:
    assert largest(lambda units: units + 5, 7, least=3, unit=1) is None


@given(st.text(alphabet="ab .!\n", max_size=60), st.lists(st.floats(0, 1), max_size=4))
def test_inserting_keeps_text_and_needles(text: str, depths: list[float]) -> None:
    starts = sentence_starts(text)
    needles = [f"Needle {at}." for at in range(len(depths))]
    offsets = [starts[int((len(starts) - 1) * depth)] for depth in depths]
    found = insert(text, needles, offsets)
    assert all(found.count(needle) == 1 for needle in needles)
    for needle in needles:
        found = found.replace(needle, "")
    assert found.split() == text.split()


@pytest.mark.parametrize(
    ("alpha", "wanted"), [(2.0, 1.6449340668482264), (4.0, 1.0823232337111382)]
)
def test_zeta(alpha: float, wanted: float) -> None:
    assert zeta(alpha) == pytest.approx(wanted, rel=1e-9)


@given(st.text("\nab", max_size=9), st.lists(st.text("\nab", min_size=1, max_size=2), max_size=2))
def test_a_cut_text_ends_before_its_first_stop(text: str, stop: list[str]) -> None:
    found = cut(text, stop)
    body = text.lstrip("\n")
    assert text.startswith(found)
    assert (found == text) == (not any(end in body for end in stop))
    assert not any(end in found.lstrip("\n") for end in stop)
    assert found == text or any(text[len(found) :].startswith(end) for end in stop)


def test_ids_are_unique() -> None:
    with pytest.raises(ValueError, match="ids must be unique, but 'b' occurs more than once"):
        Samples(["a", "b", "b"], lambda at: Sample("", "", ("",), (("",),)))


def test_samples_are_a_sequence_that_knows_its_ids() -> None:
    made: list[int] = []

    def make(at: int) -> Sample:
        made.append(at)
        return Sample(str(at), "c", ("q",), (("a",),))

    samples = Samples([str(at) for at in range(5)], make)
    part = samples[3:0:-1]
    assert part.ids == ("3", "2", "1")
    assert not made
    assert [one.id for one in part[1:]] == ["2", "1"]
    assert samples[-1].id == "4"
    with pytest.raises(IndexError):
        samples[5]


def test_a_sample_has_an_answer_per_question() -> None:
    with pytest.raises(ValueError, match="sample 0 has 2 questions and 1 answers"):
        Sample("0", "c", ("a", "b"), (("x",),))


def test_a_chat_template_that_hides_texts() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match=r"must show each message's text once, but .* shows 1"):
        encode(tokenizer, Sample("0", "c", ("q",), (("a",),)))


@given(kinds, st.booleans(), st.integers(1, 3), st.text(alphabet="ab \n", max_size=20))
def test_encoding_is_the_prompt_in_turns(kind: str, chat: bool, turns: int, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    sample = Sample(
        "0",
        f"c{text}",
        ("\n\nfirst?", *["next?"] * (turns - 1)),
        (("x",),) * turns,
        "So:",
        chat=chat,
    )
    encoded = encode(tokenizer, sample)
    decoded = [
        tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        for ids in (encoded.context, *encoded.questions)
    ]
    if chat and tokenizer.chat_template is not None:
        message = {"role": "user", "content": f"c{text}\n\nfirst?"}
        options = {"tokenize": False, "add_generation_prompt": True}
        wanted = tokenizer.apply_chat_template([message], **options) + "So:"
    else:
        start = "<|user|>" if kind == "bos" else ""
        wanted = f"{start}c{text}\n\nfirst?So:"
    assert "".join(decoded[:2]) == wanted
    assert all(part.endswith("So:") and "next?" in part for part in decoded[2:])
    one = replace(sample, questions=sample.questions[:1], answers=sample.answers[:1])
    assert encode(tokenizer, one).questions == encoded.questions[:1]
    assert encoded.tokens(7) == sum(map(len, (encoded.context, *encoded.questions))) + 7 * turns
