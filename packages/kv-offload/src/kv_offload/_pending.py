"""Work on a side stream, and the handle to wait for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class PendingRows:
    """Rows on their way to the device; `wait()` hands them over."""

    def __init__(self, rows: Tensor, event: torch.cuda.Event | None = None) -> None:
        self._rows = rows
        self._event = event

    def wait(self) -> Tensor:
        """Return the rows, `[B, H, K, D]`, ready for work queued on the current stream.

        On CUDA the current stream waits for the copy's event and the host goes on at once; on
        the CPU the rows are there already. Call it as often as you like.
        """
        if self._event is not None:
            stream = torch.cuda.current_stream(self._rows.device)
            stream.wait_event(self._event)
            self._rows.record_stream(stream)
        return self._rows


class Lane:
    """One side stream of a CUDA device. On any other device work runs at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[], Tensor], *used: Tensor) -> PendingRows:
        """Run `work` after what the current stream has queued; `used` are tensors it reads."""
        if self._stream is None:
            return PendingRows(work())
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for tensor in used:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            return PendingRows(work(), self._stream.record_event())
