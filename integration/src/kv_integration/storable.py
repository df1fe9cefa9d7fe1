"""What a cache holds as plain data and named tensors, and back.

A class joins with one line, `@storable`: its attributes are what is stored. It may say otherwise by
`stored_fields(self) -> dict` and a class method `from_fields(cls, fields)`. Attributes are numbers,
strings, tensors, numpy arrays, functions of kv-segment, stores and hit caches of kv-offload,
storable objects, and lists, tuples and dicts of these. What is in several places stays one thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

import kv_segment
from kv_offload import HitCache, RecordStore, TieredStore

Class = TypeVar("Class", bound=type)
_CLASSES: dict[str, type] = {}


def storable(cls: Class) -> Class:
    """Let objects of this class, not of its subclasses, be part of a cache file."""
    _CLASSES[cls.__name__] = cls
    return cls


class Packer:
    """Turns objects into JSON-able nodes; their tensors go to `tensors`, by where they are.

    known: objects that the reader has anyway and that are stored by name only.
    """

    def __init__(self, known: Mapping[str, object]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known = {id(value): name for name, value in known.items()}
        self._numbers: dict[int, int] = {}
        self._paths: dict[int, str] = {}  # of tensors
        self._alive: list[object] = []  # so that no id is given away while it counts

    def pack(self, value: Any, path: str) -> Any:
        """The node of `value`, which is found at `path`.

        Raises:
            ValueError: it, or something in it, cannot be stored.
        """
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if id(value) in self._known:
            return {"known": self._known[id(value)]}
        if id(value) in self._numbers:
            return {"again": self._numbers[id(value)]}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray):
            self.tensors[path] = torch.from_numpy(value)
            return {"array": path}
        if isinstance(value, list):
            return self._each(value, path)
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return {"tuple": self._each(value, path)}
        if isinstance(value, dict):
            return {
                "keys": self._each(list(value), f"{path}.key"),
                "values": self._each(list(value.values()), path),
            }
        name = getattr(value, "__name__", "")
        if name and getattr(kv_segment, name, None) is value:
            return {"function": name}
        kind, fields = _parts(value, path)
        number = self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        own = {name: self.pack(part, f"{path}.{name}") for name, part in fields.items()}
        return {"class": kind, "number": number, "fields": own}

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        """What is in several places is stored once, and so is what a tensor repeats (`expand`)."""
        if id(value) not in self._paths:
            self._paths[id(value)] = path
            self._alive.append(value)
            once = tuple(slice(None if stride else 1) for stride in value.stride())
            self.tensors[path] = value[once]
        return {"tensor": self._paths[id(value)], "shape": list(value.shape)}

    def _each(self, values: Any, path: str) -> list[Any]:
        return [self.pack(value, f"{path}.{i}") for i, value in enumerate(values)]


class Unpacker:
    """Makes the objects again: tensors are copied to `device`, `known` are the reader's own."""

    def __init__(
        self, known: Mapping[str, object], tensors: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self.device = device
        self._known, self._tensors = known, tensors
        self._made: dict[int, Any] = {}
        self._copies = WeakValueDictionary[tuple[str, torch.device], Tensor]()

    def unpack(self, node: Any) -> Any:
        """What `Packer.pack` was given."""
        if isinstance(node, list):
            return [self.unpack(one) for one in node]
        if not isinstance(node, dict):
            return node
        if "known" in node:
            return self._known[node["known"]]
        if "again" in node:
            return self._made[node["again"]]
        if "tensor" in node:
            return self._tensor(node["tensor"], node["shape"])
        if "array" in node:
            return self._tensors[node["array"]].clone().numpy()
        if "tuple" in node:
            return tuple(self.unpack(node["tuple"]))
        if "keys" in node:
            return dict(zip(self.unpack(node["keys"]), self.unpack(node["values"]), strict=True))
        if "function" in node:
            return getattr(kv_segment, node["function"])
        fields = {name: self.unpack(part) for name, part in node["fields"].items()}
        made = self._made[node["number"]] = self._make(node["class"], fields)
        return made

    def _tensor(self, path: str, shape: list[int]) -> Tensor:
        key = path, self.device
        copy = self._copies.get(key)
        if copy is None:
            copy = self._tensors[path].to(self.device, copy=True).expand(shape)
            self._copies[key] = copy
        return copy

    def _make(self, kind: str, fields: dict[str, Any]) -> Any:
        if kind == "TieredStore":
            return TieredStore.ragged(fields["rows"], tier=fields["tier"], device=self.device)
        if kind == "HitCache":
            hits = HitCache(fields["store"], fields["capacity"])
            hits.resume(fields["counts"])
            return hits
        if kind == "RecordStore":
            numbers, lengths = fields["numbers"], fields["lengths"].tolist()
            return RecordStore(numbers, lengths, tier=fields["tier"], device=self.device)
        cls: Any = _CLASSES[kind]
        if issubclass(cls, tuple):
            return cls(**fields)
        if hasattr(cls, "from_fields"):
            return cls.from_fields(fields)
        made = cls.__new__(cls)
        vars(made).update(fields)
        return made


def _parts(value: Any, path: str) -> tuple[str, dict[str, Any]]:
    """An object's kind and attributes."""
    if isinstance(value, TieredStore):
        return "TieredStore", {"rows": _rows(value), "tier": value.tier}
    if isinstance(value, HitCache):  # what it holds is found again, one miss each
        own = {"store": value.store, "capacity": value.capacity, "counts": value.counts}
        return "HitCache", own
    if isinstance(value, RecordStore):
        records = [torch.empty(0, dtype=value.dtype), *value.read(range(len(value)))]
        lengths = torch.tensor([len(record) for record in records[1:]], dtype=torch.int64)
        own = {"numbers": torch.cat([x.cpu() for x in records]), "lengths": lengths}
        return "RecordStore", own | {"tier": value.tier}
    kind = type(value).__name__
    if _CLASSES.get(kind) is not type(value):
        raise ValueError(f"{path} is a {kind}, which cannot be saved: its class is not @storable")
    return kind, _fields(value)


def _fields(value: Any) -> dict[str, Any]:
    if hasattr(value, "stored_fields"):
        own: dict[str, Any] = value.stored_fields()
        return own
    return dict(value._asdict() if hasattr(value, "_asdict") else vars(value))


def _rows(store: TieredStore) -> list[Tensor]:
    """All rows of a store, on the host: [H, N_b, D] for each row of the batch."""
    lengths = store.lengths.tolist()
    batch, heads, longest, _ = store.shape
    at = torch.arange(longest).expand(batch, heads, longest)
    rows = store.gather(torch.where(at < torch.tensor(lengths)[:, None, None], at, -1))
    return [row[:, :length].cpu() for row, length in zip(rows, lengths, strict=True)]
