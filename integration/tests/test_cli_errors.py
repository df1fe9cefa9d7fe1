"""Wrong input: one line on stderr, exit code 2, no traceback, no file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from small_model import make_folder
from transformers import T5Config

from kv_integration.cli import main
from kv_integration.cli.files import whole_file, write_text

COMMAND = [sys.executable, "-m", "kv_integration.cli"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with wrong documents and wrong model folders."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\t\n")
    (tmp_path / "latin.txt").write_bytes("A caf\xe9.".encode("latin-1"))
    (tmp_path / "good.txt").write_text("A fact. " * 20)
    (tmp_path / "long.txt").write_text("A fact about rain. " * 2000)
    (tmp_path / "hollow").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    return tmp_path


def fails(*arguments: str | Path) -> str:
    """Run, expect exit code 2 and one line on stderr; return it."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("prompt: ")]
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


DOCUMENTS = [
    ("missing.txt", "there is no document"),
    ("empty.txt", "is empty"),
    ("blank.txt", "is empty"),
    ("latin.txt", "is not UTF-8 at byte 5"),
    ("hollow", "there is no document"),
    ("long.txt", "more than the model's 4096 positions"),
]


@pytest.mark.parametrize("command", ["ask", "compare"])
@pytest.mark.parametrize(("name", "message"), DOCUMENTS)
def test_documents(folder: Path, files: Path, command: str, name: str, message: str) -> None:
    document = files / name
    line = fails(command, "--model", folder, "--document", document, "--question", "Why?")
    assert message in line
    assert name in line or "positions" in message


@pytest.mark.parametrize("command", ["ask", "compare"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "at least 1, got 0"),
        (["--budget", "-3"], "at least 1, got -3"),
        (["--budget", "0.0"], "in (0, 1], got 0.0"),
        (["--budget", "-0.5"], "in (0, 1], got -0.5"),
        (["--budget", "1.5"], "in (0, 1], got 1.5"),
        (["--budget", "nan"], "in (0, 1], got nan"),
        (["--budget", "10%"], "a share of the prompt such as 0.1, got '10%'"),
        (["--context", "10"], "context is 10 tokens, but needle and question alone take"),
        (["--context", "0"], "--context must be at least 1, got 0"),
        (["--context", "5000"], "5000 tokens and 24 of the answer are more than the model's 4096"),
        (["--context", "many"], "'many' is not a valid integer"),
        (["--depth", "1.2"], "--depth must be between 0 (start) and 1 (end), got 1.2"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--dtype", "int8"], "'int8' is not one of"),
        (["--question", "Why?"], "--question needs --document"),
        (["--document", "x.txt"], "--document needs --question"),
        (["--nonsense"], "No such option"),
    ],
)
def test_options(folder: Path, command: str, arguments: list[str], message: str) -> None:
    assert message in fails(command, "--model", folder, *arguments)


@pytest.mark.parametrize("option", ["--context", "--depth"])
def test_haystack_options_and_a_document_exclude_each_other(files: Path, option: str) -> None:
    line = fails("ask", "--document", files / "good.txt", "--question", "Why?", option, "1")
    assert "without --document" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ask", "--method", "magic"], "unknown method 'magic'; wanted one of dynamic, full,"),
        (["ask", "--method", ""], "no method is given"),
        (["ask", "--method", "full,sablock"], "--method takes one method"),
        (["compare", "--methods", "full,magic"], "unknown method 'magic'"),
        (["compare", "--methods", ","], "no method is given"),
    ],
)
def test_methods(arguments: list[str], message: str) -> None:
    assert message in fails(*arguments)


def test_no_and_unknown_command() -> None:
    assert "No such command 'aks'" in fails("aks")


def test_model_folders(folder: Path, files: Path) -> None:
    assert "there is no model folder" in fails("ask", "--model", files / "none")
    assert "there is no model folder" in fails("ask", "--model", files / "good.txt")
    assert "it has no config.json" in fails("ask", "--model", files / "hollow")
    assert "no causal language model can be loaded" in fails("ask", "--model", files / "broken")
    cut = files / "cut"
    shutil.copytree(folder, cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "no causal language model can be loaded" in fails("ask", "--model", cut)
    config = json.loads((folder / "config.json").read_text())
    deeper = files / "deeper"
    shutil.copytree(folder, deeper)
    (deeper / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "lacks 9 weights of its model" in fails("ask", "--model", deeper)


def test_models_that_cannot_be_attached(folder: Path, files: Path) -> None:
    other = files / "t5"
    shutil.copytree(folder, other)
    T5Config(vocab_size=300, d_model=16, num_layers=1, num_heads=2).save_pretrained(other)
    assert "no causal language model can be loaded" in fails("ask", "--model", other)
    mamba = files / "mamba"
    shutil.copytree(folder, mamba)
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(
        MambaConfig(vocab_size=512, hidden_size=16, num_hidden_layers=1, state_size=4)
    ).save_pretrained(mamba)
    line = fails("ask", "--model", mamba, "--context", "200")
    assert "MambaForCausalLM cannot be attached" in line


def test_output_files(folder: Path, files: Path) -> None:
    base = ("compare", "--model", folder, "--context", "200")
    assert "--plot must end with .png" in fails(*base, "--plot", files / "x.txt")
    assert "--out is a folder" in fails(*base, "--out", files)
    assert "--out cannot be written" in fails(*base, "--out", files / "good.txt" / "x.md")


def test_a_real_process_says_one_line_and_exits_with_2(files: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "ask", "--document", files / "empty.txt", "--question", "Why?"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"error: document {files / 'empty.txt'} is empty\n"


def test_ctrl_c_leaves_what_was_there(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model", positions=10_000_000)
    kept = tmp_path / "files" / "old.md"
    kept.parent.mkdir()
    kept.write_text("an older result")
    figure = kept.parent / "new.png"
    process = subprocess.Popen(
        [
            *(*COMMAND, "compare", "--model", model, "--context", "300"),
            *("--max-new-tokens", "5000000", "--out", kept, "--plot", figure),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a test run in the background ignores it, and so would what it starts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("prompt: ")
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out == "" and err.strip() == "error: interrupted"
    assert kept.read_text() == "an older result"
    assert list(kept.parent.iterdir()) == [kept]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, SystemExit])
def test_a_file_that_was_begun_is_taken_back(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "table.md"
    for before in (None, "old"):
        if before is not None:
            target.write_text(before)
        with pytest.raises(error), whole_file(target) as temporary:
            assert temporary.parent == tmp_path and temporary != target
            temporary.write_text("half")
            raise error
        assert [path.read_text() for path in tmp_path.iterdir()] == ([before] if before else [])


def test_a_file_replaces_the_old_one_with_usual_rights(tmp_path: Path) -> None:
    target = tmp_path / "new" / "table.md"
    write_text(target, "é")
    write_text(target, "ü")
    assert target.read_text(encoding="utf-8") == "ü"
    assert list(target.parent.iterdir()) == [target]
    plain = tmp_path / "plain"
    plain.write_text("")
    assert target.stat().st_mode == plain.stat().st_mode
