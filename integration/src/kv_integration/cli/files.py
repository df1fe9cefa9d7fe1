"""Output files that are either whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path in the folder of `path` that becomes `path` when the block ends well.

    After an error or an interruption `path` is what it was before, and nothing else is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def check_writable(option: str, path: Path, *, suffixes: tuple[str, ...] = ()) -> None:
    """Raise before any work is done if `path`, given as `option`, could not be written.

    Raises:
        ValueError: it is a folder, its folder cannot be written to, or its suffix is not one of
            `suffixes`.
    """
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{option} must end with {' or '.join(suffixes)}, got {path}")
    if path.is_dir():
        raise ValueError(f"{option} is a folder, wanted a file: {path}")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{option} cannot be written: {path}")
