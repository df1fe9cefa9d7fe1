"""What a result folder was made with: another run into it must agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from kv_integration.cli.files import write_text
from kv_integration.cli.inputs import Loaded

FINGERPRINT_BYTES = 2**20
SETTINGS = "settings.json"


def check_settings(
    folder: Path,
    settings: Mapping[str, object],
    *,
    results: str,
    added: Mapping[str, object] | None = None,
) -> None:
    """Write `settings.json` into a new result folder; hold it against that of an old one.

    Args:
        folder: of the results.
        settings: what must be the same in every run into the folder.
        results: the file in it that must not be there without its settings.
        added: settings of what a later run may add (a data set, a user's method): they must agree
            once they are there.

    Raises:
        ValueError: the folder holds results of other settings, or none can be read.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out is a file, wanted a folder: {folder}")
    file, added = folder / SETTINGS, dict(added or {})
    if not file.exists():
        if (folder / results).exists():
            raise ValueError(f"{folder} holds results, but not their settings.json")
        write_text(file, json.dumps({**settings, **added}, indent=1) + "\n")
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    for name, value in (*settings.items(), *((n, added[n]) for n in added if n in before)):
        if before.get(name) != value:
            raise ValueError(
                f"{folder} holds results with {name} {before.get(name)!r}, now it is "
                f"{value!r}: name another --out"
            )
    if added.keys() - before.keys():
        write_text(file, json.dumps({**before, **added}, indent=1) + "\n")


def made_with(
    benchmark: str, loaded: Loaded, text: str | None, **others: object
) -> dict[str, object]:
    """Settings of all commands with an `--out`: what ran on which model and text, and `others`."""
    return {
        "benchmark": benchmark,
        "model": fingerprint(loaded.folder),
        "haystack": "held-out topics" if text is None else digest(text.encode()),
        "dtype": str(loaded.model.dtype),
        **others,
    }


def fingerprint(folder: Path) -> str:
    """A hash that tells model folders apart: names, sizes and beginnings of their files."""
    total = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        with file.open("rb") as stream:
            beginning = stream.read(FINGERPRINT_BYTES)
        total.update(f"{file.name} {file.stat().st_size} {digest(beginning)}\n".encode())
    return total.hexdigest()[:16]


def digest(data: bytes) -> str:
    """The first characters of a SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]
