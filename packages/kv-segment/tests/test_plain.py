"""Errors as a user meets them, where beartype would be first to refuse within these tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import kv_segment as ks

CALLS = {
    "ks.fixed(3.5, 2)": "TypeError: n must be an int, got 3.5",
    "ks.fixed(3, '2')": "TypeError: size must be an int, got '2'",
    "ks.check_offsets([0, 1], None)": "TypeError: n must be an int, got None",
    "ks.check_offsets(None, 1)": "ValueError: offsets must have one dimension, got shape ()",
    "ks.segment_ids('01')": "ValueError: offsets must have one dimension, got shape ()",
    "ks.by_punctuation(None, [True])": "ValueError: ids must have one dimension, got shape ()",
    "ks.by_delimiters(['a'], [True])": "TypeError: ids must hold integers, got dtype <U1",
    "ks.by_delimiters([0], None)": "ValueError: table must have one dimension, got shape ()",
    "ks.by_surprisal(['a'])": "TypeError: h must hold real numbers, got dtype <U1",
    "ks.by_surprisal([1.0], alpha='1')": "TypeError: alpha must be a number, got '1'",
    "ks.by_surprisal([1.0], min_length=2.0)": "TypeError: min_length must be an int, got 2.0",
    "ks.sentences(b'Hi.', [(0, 3)])": "TypeError: text must be a str, got b'Hi.'",
    "ks.is_delimiter(None, ['.'])": "TypeError: text must be a str, got None",
    "ks.is_delimiter('.', ['.', 3])": "TypeError: delimiters must hold str, got 3",
    "ks.delimiter_table(None, ['.'])": "TypeError: tokenizer must be a transformers or tokenizers "
    "tokenizer with a decode method, got None",
}


def test_errors_name_the_argument_and_its_value() -> None:
    code = (
        "import json, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import kv_segment as ks\n"
        "found = {}\n"
        "for call in json.load(sys.stdin):\n"
        "    try:\n"
        "        found[call] = repr(eval(call))\n"
        "    except Exception as error:\n"
        "        found[call] = f'{type(error).__name__}: {error}'\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(ks.__file__).parents[1])],
        input=json.dumps(list(CALLS)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == CALLS
