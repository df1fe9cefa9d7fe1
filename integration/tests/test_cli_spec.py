"""Methods with options on the command line: read back as written, refused by name, never run."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kv_integration import METHODS, SABlock, SemantiCache, SentenceKV
from kv_integration.cli.inputs import make_method, parse_names
from kv_integration.cli.spec import DYNAMIC, Spec, options_of, parse_spec, parse_specs

ABLATIONS = {
    "semanticache(chunks=fixed,chunk_size=16)": SemantiCache(budget=9, chunks="fixed"),
    "semanticache(chunks=none)": SemantiCache(budget=9, chunks="none"),
    "semanticache(proportional=False)": SemantiCache(budget=9, proportional=False),
    "semanticache(theta=0.7)": SemantiCache(theta=0.7),
    "sablock(lam=0)": SABlock(budget=9, lam=0),
    "sablock(max_block=1)": SABlock(budget=9, max_block=1),
    "sablock(max_block=5,delta=0)": SABlock(budget=9, max_block=5, delta=0),
    "sablock(max_block=10,delta=0)": SABlock(budget=9, max_block=10, delta=0),
    "sentencekv(budget=0.5,tier=disk)": SentenceKV(budget=0.5, tier="disk"),
}


@pytest.mark.parametrize("text", ABLATIONS)
def test_every_ablation_of_the_papers_can_be_written(text):
    assert make_method(text, 9) == ABLATIONS[text]
    assert parse_names([text]) == [text]


@pytest.mark.parametrize("name", METHODS)
def test_defaults_written_out_are_the_method(name):
    """Every option of every method can be given, by the value that it has anyway."""
    assert name.isidentifier()
    method = METHODS[name]()
    options = {field: getattr(method, field) for field in options_of(name) if field != "budget"}
    text = str(Spec(name, options))
    assert make_method(text, 77) == make_method(name, 77)
    if "budget" in options_of(name):
        assert make_method(name, 77).budget == 77
        assert make_method(f"{name}(budget=0.25)", 77).budget == 0.25


VALUES = st.one_of(
    st.integers(-(10**9), 10**9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12),
)


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=3), min_size=1))
@example([{"a": "\N{MICRO SIGN}"}])
def test_what_is_written_is_read_back(options):
    """Any values, for a method that takes anything."""
    written = [str(Spec("anything", one)) for one in options]
    read = parse_specs([",".join(written)], known={"anything": Anything})
    expected = list(dict.fromkeys(str(Spec("anything", dict(sorted(o.items())))) for o in options))
    assert [str(spec) for spec in read] == expected
    for spec in read:
        assert parse_specs([str(spec)], known={"anything": Anything}) == [spec]


@dataclasses.dataclass(frozen=True)
class Anything:
    a: object = None
    b: object = None
    c: object = None
    d: object = None


def test_several_with_commas_inside_and_between():
    texts = ["sablock(lam=0, max_block=5), full", "h2o,", " sablock( max_block = 5,lam=0 ) "]
    assert parse_names(texts) == ["sablock(lam=0,max_block=5)", "full", "h2o"]
    assert parse_names(["sablock(lam=0)", "sablock"]) == ["sablock(lam=0)", "sablock"]
    assert make_method(DYNAMIC, 9) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic(lam=0)", "unknown method 'magic'; wanted one of dynamic, full"),
        ("sablock(lambda_=0)", "sablock has no option 'lambda_'; its options: budget, window, bet"),
        ("full(budget=3)", "full has no option 'budget'; its options: none"),
        ("dynamic(window=3)", "dynamic has no option 'window'; its options: none"),
        ("sablock(max_block=2.0)", "max_block of sablock must be int, got 2.0"),
        ("sablock(max_block=True)", "max_block of sablock must be int, got True"),
        ("sablock(lam=off)", "lam of sablock must be float, got 'off'"),
        ("semanticache(proportional=0)", "proportional of semanticache must be bool, got 0"),
        ("semanticache(theta=high)", "theta of semanticache must be float or None, got 'high'"),
        ("snapkv(pooling=sum)", "pooling of snapkv must be one of none, avg, max, got 'sum'"),
        ("sablock(lam=0,lam=1)", "option lam is given twice"),
        ("sablock(0)", "methods must be names such as sablock or sablock(lam=0, max_block=1), got"),
        ("sablock(lam=0", "methods must be names such as"),
        ("sablock(**{})", "methods must be names such as"),
        ("kv.sablock", "methods must be names such as"),
        ("sablock lam=0", "methods must be names such as"),
        ("sablock;h2o", "methods must be names such as"),
        (
            "sablock(lam=2*3)",
            "an option must be a number, a word, True, False or None, got '2 * 3'",
        ),
        ("sablock(lam=open('x','w'))", "got \"open('x', 'w')\""),
        ("sablock(lam=\0)", "methods must be names such as"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_runs(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        parse_spec(text)
    assert message in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_value_that_the_method_refuses_is_refused_with_its_words():
    with pytest.raises(ValueError, match="lam must be finite and at least 0, got inf"):
        make_method("sablock(lam=1e999)", 9)
    assert math.isinf(parse_spec("sablock(lam=1e999)").options["lam"])


def test_the_command_line_takes_them():
    run = [sys.executable, "-m", "kv_integration.cli", "ask", "--method"]
    wrong = subprocess.run([*run, "sablock(lamb=0)"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "error: sablock has no option 'lamb'; its options: budget, window" in wrong.stderr
