"""Tasks from data sets, on small files in the published schemas."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_for_tests import KINDS, tokenizer_of

from kv_bench.tasks import GROUPS, TASKS, MissingData, Sample, Task, encode, task_named
from kv_bench.tasks.truncate import truncate_middle

TOKENIZER = tokenizer_of("template")
LONGBENCH_ROW = {
    "input": "Who?",
    "context": "Braces {stay} here.",
    "answers": ["Ann", "Ann Lee"],
    "length": 3,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "a1",
}
INFINITE_ROW = {
    "id": 7,
    "context": "A long {book}.",
    "input": "Who is it?",
    "answer": ["Ann"],
    "options": [],
}
INFINITE_ROWS: dict[str, dict[str, Any]] = {
    "longbook_choice_eng": {"options": ["Bob", "Ann", "Cy", "Di"]},
    "code_debug": {"options": ["b.f", "Ann", "c.g", "d.h"]},
    "math_find": {"input": "The second largest number of the list is:", "answer": [4]},
    "math_calc": {"answer": [1, -4, 8], "context": "1 - 5 + 12", "input": ""},
    "code_run": {"input": "Return value of func_12(-3)?", "answer": [-5]},
}


def task(name: str) -> Task:
    found = TASKS[name]
    assert isinstance(found, Task)
    return found


def write(file: Path, rows: Sequence[object]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    file.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return file


def whole(sample: Sample) -> str:
    return sample.context + sample.questions[0] + sample.answer_prefix


@pytest.mark.parametrize("name", GROUPS["longbench"])
def test_longbench_sets(name: str, tmp_path: Path) -> None:
    part = name.removeprefix("longbench_")
    right = {
        "passage_retrieval_en": "Paragraph 3",
        "passage_retrieval_zh": "段落3",
        "passage_count": "3",
    }.get(part, "北京" if part in ("multifieldqa_zh", "dureader", "vcsum") else "Ann Lee")
    row = {
        **LONGBENCH_ROW,
        "answers": ["0" if part == "passage_count" else right, right],
        "dataset": part,
        "all_classes": ["Ann Lee", "Bob"] if part in ("trec", "lsht") else None,
    }
    write(tmp_path / "data" / f"{part}.jsonl", [row])
    (sample,) = task(name).samples(TOKENIZER, data=tmp_path)
    assert sample.id == "a1"
    assert "Braces {stay} here." in sample.context
    summaries = ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
    assert ("Who?" in sample.questions[0]) == (part not in summaries)
    assert "{" not in whole(sample).replace("{stay}", "")
    assert sample.chat == (part not in ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"))
    assert task(name).score([right], sample) == pytest.approx(1)
    assert task(name).score([""], sample) == 0
    if part in ("trec", "triviaqa", "samsum", "lsht"):  # the first line alone counts
        assert task(name).score([f"\n{right}\nBob Bob Bob"], sample) == pytest.approx(1)


def test_longbench_prompts_as_published(tmp_path: Path) -> None:
    file = write(tmp_path / "hotpotqa.jsonl", [LONGBENCH_ROW])
    (sample,) = task("longbench_hotpotqa").samples(TOKENIZER, data=file)
    asked = (
        "Answer the question based on the given passages. Only give me the answer and do not "
        "output any other words.\n\n"
    )
    assert whole(sample) == (
        f"{asked}The following are given passages.\nBraces {{stay}} here.\n\n{asked}"
        "Question: Who?\nAnswer:"
    )
    assert sample.max_new_tokens == 32
    assert sample.answers == (("Ann", "Ann Lee"),)


@pytest.mark.parametrize("name", GROUPS["infinitebench"])
def test_infinitebench_tasks(name: str, tmp_path: Path) -> None:
    part = name.removeprefix("infinitebench_")
    row = {**INFINITE_ROW, **INFINITE_ROWS.get(part, {})}
    if part in ("passkey", "number_string"):
        row["answer"] = "71432"
    (sample,) = task(name).samples(TOKENIZER, data=write(tmp_path / f"{part}.jsonl", [row]))
    assert row["context"] in sample.context
    assert "{" not in whole(sample).replace("{book}", "")
    answer = {
        "passkey": "71432",
        "number_string": "71432",
        "math_find": "4",
        "math_calc": "1, 5",
        "code_run": "-5",
        "code_debug": "B",
        "longbook_choice_eng": "B",
    }.get(part, "Ann")
    wanted = 1 / 3 if part == "math_calc" else 1  # signs are not read, so the second is wrong
    assert task(name).score([answer], sample) == pytest.approx(wanted)
    assert task(name).score(["?"], sample) == 0
    if part in ("longbook_choice_eng", "code_debug"):
        assert sample.answers == (("Ann", "B"),)
    if part == "math_calc":
        assert sample.answers == (("1", "-4", "8"),)


def test_infinitebench_prompts_as_published(tmp_path: Path) -> None:
    def prompt(part: str) -> str:
        row = {**INFINITE_ROW, **INFINITE_ROWS.get(part, {})}
        file = write(tmp_path / f"{part}.jsonl", [row])
        return whole(task(f"infinitebench_{part}").samples(TOKENIZER, data=file)[0])

    assert prompt("math_find") == (
        "What is the second largest number in the following list?\n\nA long {book}.\n\n"
        "The second largest number of the list is:"
    )
    assert prompt("code_run") == (
        "There is a function called func_12 in the following Python code.\n\nA long {book}.\n\n"
        "Please compute the exact value of func_12(-3). The value of func_12(-3) is"
    )
    assert prompt("longbook_choice_eng") == (
        "Read the book and answer the question.\n\nA long {book}.\n\nQuestion: Who is it?\n"
        "A. Bob\nB. Ann\nC. Cy\nD. Di\n\nThe letter of the correct answer is"
    )


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("code_debug", {"options": ["Ann"]}, "row 7 should have four options, got 1"),
        ("code_debug", {"answer": ["Eve"]}, "an answer that is one of the options, got 'Eve'"),
        ("math_find", {"input": "What?"}, "row 7 should have an input with .*, got 'What\\?'"),
        ("code_run", {"input": "call()"}, "row 7 should have an input with"),
    ],
)
def test_infinitebench_rows_that_lack_something(
    part: str, change: dict[str, object], message: str, tmp_path: Path
) -> None:
    row = {**INFINITE_ROW, **INFINITE_ROWS[part], **change}
    file = write(tmp_path / f"{part}.jsonl", [row])
    with pytest.raises(MissingData, match=message):
        task(f"infinitebench_{part}").samples(TOKENIZER, data=file)[0]


def gsm8k_folder(folder: Path) -> Path:
    for part in ("train", "test"):
        rows = [
            {"question": f"{part} {at}?", "answer": f"{at}+1={at + 1}\n#### {at + 1}"}
            for at in range(60)
        ]
        write(folder / f"{part}.jsonl", rows)
    return folder


def test_gsm8k(tmp_path: Path) -> None:
    folder = gsm8k_folder(tmp_path)
    samples = task("gsm8k").samples(TOKENIZER, data=folder, count=3, seed=1)
    assert len(samples) == 3
    one, two = samples[0], samples[1]
    assert one.context == two.context
    assert one.context.count("Question: train ") == 50
    assert len(set(one.context.split("\n\n"))) == 51  # no example twice, and the end
    assert one.context != task("gsm8k").samples(TOKENIZER, data=folder, seed=2)[0].context
    assert one.context.endswith("\n\n")
    assert two.questions == ("Question: test 1?\nAnswer:",)
    assert task("gsm8k").score([" it is\n#### 2"], two) == 1
    assert task("gsm8k").score([" #### 3"], two) == 0
    assert task("gsm8k").score([" so 2.\n\nQuestion: 9"], two) == 1
    fewer = task_named("gsm8k", shots=2)
    assert isinstance(fewer, Task)
    assert fewer.samples(TOKENIZER, data=folder)[0].context.count("Question:") == 2
    with pytest.raises(ValueError, match=r"length is 300 tokens, but 50 examples, problem 1 and"):
        task("gsm8k").samples(TOKENIZER, data=folder, length=300)[1]
    many = task_named("gsm8k", shots=61)
    assert isinstance(many, Task)
    with pytest.raises(MissingData, match="takes 61 examples, but the training part has 60"):
        many.samples(TOKENIZER, data=folder)


def squad(articles: int, paragraphs: int) -> dict[str, Any]:
    def qas(a: int, p: int) -> list[dict[str, Any]]:
        answers = [{"text": f"city {a}-{p}", "answer_start": 0}] * 2
        return [
            {"question": f"Where is {a}-{p}?", "is_impossible": False, "answers": answers},
            {"question": "Nowhere?", "is_impossible": True, "answers": []},
        ]

    return {
        "version": "v2.0",
        "data": [
            {
                "title": str(a),
                "paragraphs": [
                    {"context": f"Thing {a}-{p} is in city {a}-{p}, they say.", "qas": qas(a, p)}
                    for p in range(paragraphs)
                ],
            }
            for a in range(articles)
        ],
    }


def hotpotqa(count: int) -> list[dict[str, Any]]:
    return [
        {
            "_id": str(at),
            "question": f"Which city has thing {at}?",
            "answer": f"city {at}.",
            "context": [[f"Title {at}-{p}", [f"Thing {at} is ", f"in city {at}."]] for p in "ab"],
        }
        for at in range(count)
    ]


@pytest.fixture(scope="module")
def qa_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("qa")
    files = {"ruler_qa_1": folder / "squad.json", "ruler_qa_2": folder / "hotpot.json"}
    files["ruler_qa_1"].write_text(json.dumps(squad(3, 4)), encoding="utf-8")
    files["ruler_qa_2"].write_text(json.dumps(hotpotqa(12)), encoding="utf-8")
    return files


@given(
    st.sampled_from(GROUPS["ruler"][-2:]),
    st.sampled_from(KINDS),
    st.integers(300, 4000),
    st.integers(0, 99),
    st.integers(0, 11),
)
def test_ruler_qa(
    qa_files: dict[str, Path], name: str, kind: str, length: int, seed: int, index: int
) -> None:
    tokenizer = tokenizer_of(kind)

    def draw(seed: int) -> Sample:
        samples = task(name).samples(tokenizer, length=length, seed=seed, data=qa_files[name])
        assert len(samples) == 12
        return samples[index]

    try:
        sample = draw(seed)
    except ValueError as error:
        assert kind == "bytes" and length < 1000 and "least haystack" in str(error)
        return
    tokens = encode(tokenizer, sample).tokens(sample.max_new_tokens)
    assert length - 150 <= tokens <= length  # a document is shorter
    assert all(right in sample.context for right in sample.answers[0])
    documents = sample.context.split("\n\nDocument ")[1:]
    assert len(documents) == sample.extra["documents"] >= 1
    assert f"Question: {'Where' if name == 'ruler_qa_1' else 'Which'}" in sample.questions[0]
    assert task(name).score([f"In {sample.answers[0][0].upper()}"], sample) == 1
    assert draw(seed) == sample
    if len(documents) > 6:
        assert draw(seed + 1) != sample


@given(
    st.sampled_from(KINDS),
    st.text(alphabet="ab é京\n", max_size=400),
    st.text(alphabet="cd?\n", max_size=40),
    st.integers(10, 200),
    st.booleans(),
)
def test_truncation_keeps_both_ends(
    kind: str, context: str, question: str, length: int, chat: bool
) -> None:
    tokenizer = tokenizer_of(kind)
    sample = Sample("0", f"<{context}", (f"{question}>",), (("x",),), max_new_tokens=5, chat=chat)
    whole_size = encode(tokenizer, sample).tokens(5)
    try:
        cut = truncate_middle(tokenizer, sample, length)
    except ValueError as error:
        assert length < 40
        assert f"length is {length} tokens, but 5 for the answer" in str(error)
        return
    size = encode(tokenizer, cut).tokens(5)
    assert size <= length
    assert (cut == sample) == (whole_size <= length)
    if cut != sample:
        assert cut.extra["truncated"]
        assert cut.context.startswith("<")
        assert cut.questions[0].endswith(">")
        assert question.endswith(cut.questions[0][:-1].lstrip("\N{REPLACEMENT CHARACTER}"))
        assert truncate_middle(tokenizer, sample, None) == sample


def test_truncation_takes_the_middle() -> None:
    tokenizer = tokenizer_of("bytes")
    sample = Sample("0", "abcdefghij", ("?!",), (("x",),), max_new_tokens=4)
    assert truncate_middle(tokenizer, sample, 12).context == "abcdij"  # 8 tokens, 4 at each end
    assert truncate_middle(tokenizer, sample, 13) == truncate_middle(tokenizer, sample, 12)
    tight = truncate_middle(tokenizer, sample, 6)
    assert (tight.context, tight.questions) == ("a", ("!",))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("longbench_trec", '{"input": ""}\n', r"row 1 of .* has no context, answers, .*; get trec"),
        ("longbench_trec", "[1]\n", "line 1 of .* is no JSON object"),
        ("longbench_trec", "{\n", "line 1 of .* is no JSON: "),
        ("longbench_trec", "\n", r"has no rows; get trec\.jsonl from https://huggingface.co/"),
        ("infinitebench_passkey", '{"id": 1}\n', "row 1 of .* has no context, input, answer"),
        ("ruler_qa_1", "[]", r"has another schema \(TypeError.*get SQuAD 2.0's dev-v2.0.json"),
        ("ruler_qa_1", '{"data": []}', "has no question that has an answer"),
        ("ruler_qa_2", '[{"question": "?"}]', "has another schema .*get HotpotQA's"),
        ("ruler_qa_2", "{", "has another schema"),
    ],
)
def test_files_of_another_schema(name: str, content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(MissingData, match=message):
        task(name).samples(TOKENIZER, data=file)


@pytest.mark.parametrize("name", ["longbench_trec", "infinitebench_passkey", "gsm8k", "ruler_qa_1"])
def test_missing_files(name: str, tmp_path: Path) -> None:
    part = {"gsm8k": "train"}.get(name, name.split("_")[-1])
    with pytest.raises(MissingData, match=r"there is no .*get .*(https://|dev-v2)"):
        task(name).samples(TOKENIZER, data=tmp_path / "none")
    if name != "ruler_qa_1":
        with pytest.raises(MissingData, match=rf"there is no .*{part}\.jsonl or .*data.*; get "):
            task(name).samples(TOKENIZER, data=tmp_path)
    else:
        with pytest.raises(MissingData, match="no file is named; get SQuAD"):
            task(name).samples(TOKENIZER)
    with pytest.raises(ValueError, match="takes no text"):
        task(name).samples(TOKENIZER, data=tmp_path, text="prose")


def test_no_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingData, match=r"not installed: pip install 'kv-bench\[data\]'. Or get"):
        task("gsm8k").samples(TOKENIZER)


@pytest.mark.parametrize(
    ("name", "data", "wanted"),
    [
        (
            "longbench_trec",
            None,
            {
                "path": "json",
                "data_files": "zip://data/trec.jsonl::hf://datasets/THUDM/LongBench/data.zip",
                "split": "train",
            },
        ),
        ("longbench_trec", "me/mirror", {"path": "me/mirror", "name": "trec", "split": "test"}),
        (
            "infinitebench_passkey",
            None,
            {
                "path": "json",
                "data_files": "hf://datasets/xinrongzhang2022/InfiniteBench/passkey.jsonl",
                "split": "train",
            },
        ),
        ("infinitebench_passkey", "me/mirror", {"path": "me/mirror", "split": "passkey"}),
    ],
)
def test_hub_ids_go_to_datasets(
    name: str, data: str | None, wanted: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, str]] = []
    library = types.ModuleType("datasets")

    def load_dataset(**arguments: str) -> list[dict[str, Any]]:
        calls.append(arguments)
        return [LONGBENCH_ROW] if "longbench" in name else [INFINITE_ROW]

    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert len(task(name).samples(TOKENIZER, data=data)) == 1
    assert calls == [wanted]

    def offline(**arguments: str) -> list[dict[str, Any]]:
        raise ConnectionError("no way out")

    library.load_dataset = offline  # type: ignore[attr-defined]
    with pytest.raises(MissingData, match=r"cannot load .* \(ConnectionError: no way out\)\. Or"):
        task(name).samples(TOKENIZER, data=data)
