"""Which tensors exist: found by walking from an object, or by watching every operation."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kv_integration.method import Context


def storages(root: object) -> dict[int, int]:
    """Bytes of every tensor storage that can be reached from `root`, by its address."""
    found, seen, queue = {}, set(), [root]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, (type, Context)) or callable(item):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
        elif type(item).__module__ not in ("torch", "builtins") or isinstance(
            item, (list, tuple, dict, set)
        ):
            queue += gc.get_referents(item)
    return found


class Watch(TorchDispatchMode):
    """Counts the storages that operations made since it began and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        gc.unfreeze()  # or the list lacks what is frozen
        # A weak reference keeps the address of a storage from being used again.
        alive = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
        self.before = {s._cdata: StorageWeakRef(s) for s in _storages(*alive)}
        gc.freeze()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for storage in _storages(args, kwargs, out):
            key, size = storage._cdata, storage.nbytes()
            if key not in self.before and self.known.get(key, (None, None))[1] != size:
                self.known[key] = StorageWeakRef(storage), size
        return out

    def live(self) -> int:
        """Bytes alive now."""
        self.known = {key: held for key, held in self.known.items() if not held[0].expired()}
        return sum(size for _, size in self.known.values())


def _storages(*tree: object) -> Iterator[torch.UntypedStorage]:
    """Of all tensors in lists, tuples and dicts; operations take no other containers."""
    for item in tree:
        if isinstance(item, torch.Tensor):
            if item.layout != torch._mkldnn:  # oneDNN's own memory is no storage
                yield item.untyped_storage()
        elif isinstance(item, (list, tuple)):
            yield from _storages(*item)
        elif isinstance(item, dict):
            yield from _storages(*item.values())
