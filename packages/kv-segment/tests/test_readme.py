from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import kv_segment as ks

ROOT = Path(__file__).parents[1]


def test_readme_example_runs() -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    assert example
    exec(compile(example[1], "README.md", "exec"), {})


def test_importing_and_splitting_brings_neither_torch_nor_nltk() -> None:
    code = (
        "import sys, kv_segment as ks\n"
        "ks.by_punctuation([0, 1], [False, True]); ks.by_surprisal([1.0, 2.0])\n"
        "assert 'nltk' not in sys.modules, 'nltk'\n"
        "ks.sentences('One. Two.', [(0, 4), (4, 9)])\n"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)\n"
    )
    path = str(Path(ks.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{code}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_exists_and_is_documented() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for name in ks.__all__:
        assert getattr(ks, name).__doc__
        assert f"`{name}" in readme
