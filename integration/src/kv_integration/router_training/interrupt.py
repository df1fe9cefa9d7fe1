"""Ctrl-C that waits for the step to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_noted() -> Iterator[Callable[[], bool]]:
    """While open, a first Ctrl-C is noted, a second one interrupts as usual.

    Yields a function that says whether there was one. In other threads than the main one, where
    signals do not arrive, it says no.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    noted = threading.Event()
    usual = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        noted.set()
        signal.signal(signal.SIGINT, usual)

    if not callable(usual):  # ignored, or not set from Python: as the caller wants it
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted.is_set
    finally:
        signal.signal(signal.SIGINT, usual)
