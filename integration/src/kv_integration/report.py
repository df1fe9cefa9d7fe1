"""What a cache holds and what a step reads, counted from the tensors that exist."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class LayerReport:
    """One layer. Bytes by tier; entries of the prompt attended per step (the most of any head).

    details: figures of the method's own, such as SeKV's zoom-in rates.
    """

    kind: str
    tokens_seen: int
    entries_attended: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    full_kv_bytes: int
    bytes_moved: int
    hits: int
    misses: int
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All layers of a cache.

    entries_attended: of the prompt, per KV head and step, the most of any compressed layer.
    budget_entries: what the budget asked for. full_kv_bytes: what keys and values of all tokens
    seen would take. bytes_moved: between tiers since the prompt. hit_rate: share of the retrieved
    entries that were on the device already, None if nothing was retrieved.
    """

    method: str
    batch: int
    prompt_tokens: int
    tokens_seen: int
    budget_entries: int
    entries_attended: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    full_kv_bytes: int
    bytes_moved: int
    hit_rate: float | None
    layers: list[LayerReport] = field(repr=False)

    @property
    def compression(self) -> float:
        """Prompt tokens per entry that a step attends."""
        return self.prompt_tokens / max(self.entries_attended, 1)

    @property
    def compression_asked(self) -> float:
        """Prompt tokens per entry that the budget grants."""
        return self.prompt_tokens / max(self.budget_entries, 1)

    def as_dict(self) -> dict[str, object]:
        """All figures as plain numbers, for JSON."""
        return asdict(self) | {
            "compression": self.compression,
            "compression_asked": self.compression_asked,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.method}: {self.tokens_seen} tokens seen, prompt of {self.prompt_tokens}, "
            f"batch of {self.batch}",
            f"  attended per step: {self.entries_attended} entries of the prompt "
            f"({self.compression:.1f}x fewer; asked for {self.compression_asked:.1f}x)",
        ]
        for tier in TIERS:
            held = getattr(self, f"{tier}_bytes")
            share = held / self.full_kv_bytes if self.full_kv_bytes else 0.0
            lines.append(f"  {tier:<6} {format_bytes(held):>10}  {share:6.1%} of full KV")
        if self.hit_rate is not None:
            lines.append(
                f"  moved  {format_bytes(self.bytes_moved):>10}  {self.hit_rate:6.1%} of the "
                "retrieved entries were on the device"
            )
        return "\n".join(lines)


def format_bytes(count: float) -> str:
    """A number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
