"""Any sequence of operations on a store and a cache over it equals the same on a plain tensor."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from offload_cases import (
    TIERS,
    batch_orders,
    dtypes,
    indexed,
    ragged_indices,
    random_rows,
    same_bits,
    seeds,
    tiers,
)

from kv_offload import HitCache, TieredStore, load_cache, save_cache

CAPACITY = 8
pieces = st.integers(0, 6)
sizes = pieces.map(lambda n: [n, n]) | st.lists(pieces, min_size=1, max_size=3)


class StoreMachine(RuleBasedStateMachine):
    """`self.rows` is the plain tensor: one `[H, N_b, D]` per batch row."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.requested = 0

    def path(self, name):
        return Path(self.folder.name) / name

    @initialize(dtype=dtypes, seed=seeds, tier=tiers, sizes=sizes, named=st.booleans())
    def put(self, dtype, seed, tier, sizes, named):
        self.dtype = dtype
        self.scratch = self.path("scratch") if named else None
        self.rows = [random_rows((2, n, 3), dtype, seed + b) for b, n in enumerate(sizes)]
        if len(set(sizes)) == 1:
            self.store = TieredStore(torch.stack(self.rows), tier=tier, path=self.scratch)
        else:
            self.store = TieredStore.ragged(self.rows, tier=tier, path=self.scratch)
        self.cache = HitCache(self.store, CAPACITY)

    @rule(size=pieces, seed=seeds, even=st.booleans(), data=st.data())
    def append(self, size, seed, even, data):
        more = random_rows((len(self.rows), 2, size, 3), self.dtype, seed)
        counts = [size if even else data.draw(st.integers(0, size)) for _ in self.rows]
        self.store.append(more, lengths=None if even else torch.tensor(counts, dtype=torch.int64))
        pieces = zip(self.rows, more, counts, strict=True)
        self.rows = [torch.cat([row, new[:, :n]], 1) for row, new, n in pieces]

    @rule(even=st.booleans(), data=st.data())
    def truncate(self, even, data):
        if even:
            n = data.draw(st.integers(0, self.store.shape[2]))
            self.store.truncate(n)
            self.rows = [row[:, :n].clone() for row in self.rows]
        else:
            kept = [data.draw(st.integers(0, row.shape[1])) for row in self.rows]
            self.store.truncate(torch.tensor(kept, dtype=torch.int64))
            self.rows = [row[:, :n].clone() for row, n in zip(self.rows, kept, strict=True)]

    @rule(tier=tiers)
    def spill_or_promote(self, tier):
        self.store.to_tier(tier)
        assert self.store.tier == tier

    @rule(data=st.data())
    def select_rows(self, data):
        order = data.draw(batch_orders(len(self.rows), st.integers(1, 3)))
        self.store.select_rows(order)
        self.cache.select_rows(order)
        self.rows = [self.rows[b] for b in order.tolist()]

    @rule(data=st.data())
    def gather(self, data):
        indices = data.draw(ragged_indices(self.rows))
        assert same_bits(self.store.gather(indices), indexed(self.rows, indices))

    @rule(data=st.data(), seed=seeds)
    def gather_into(self, data, seed):
        indices = data.draw(ragged_indices(self.rows))
        out = random_rows((*indices.shape, 3), self.dtype, seed)
        expected = indexed(self.rows, indices, start=out)
        assert same_bits(self.store.gather_async(indices, out=out).wait(), expected)

    @rule(data=st.data())
    def fetch(self, data):
        indices = data.draw(ragged_indices(self.rows, most=CAPACITY))
        self.requested += int((indices >= 0).sum())
        assert same_bits(self.cache.fetch(indices), indexed(self.rows, indices))

    @rule(data=st.data())
    def prefetch(self, data):
        self.cache.prefetch(data.draw(ragged_indices(self.rows, most=CAPACITY)))

    @rule()
    def reset(self):
        self.cache.reset()
        self.requested = 0

    @rule(tier=tiers)
    def reopen(self, tier):
        """Through a cache file: into a store over that file, or from a tensor per batch row."""
        lengths = self.store.lengths.view(-1, 1, 1)
        every = torch.arange(self.store.shape[2]).expand(len(self.rows), 2, -1)
        found = self.store.gather(torch.where(every < lengths, every, -1))
        even = len(set(lengths.view(-1).tolist())) == 1
        tensors = {str(b): row[:, : lengths[b]] for b, row in enumerate(found)}
        tensors = {"rows": found} if even else tensors
        save_cache(self.path("cache"), tensors, method="m", fingerprint="f")
        self.store.close()
        file = load_cache(self.path("cache"), fingerprint="f")
        if even:
            self.store = file.store("rows", path=self.scratch)
            assert self.store.tier == "disk"
        else:
            rows = [file.tensors[str(b)] for b in range(len(self.rows))]
            self.store = TieredStore.ragged(rows, tier="disk", path=self.scratch)
        self.cache = HitCache(self.store, CAPACITY)
        self.requested = 0
        self.store.to_tier(tier)

    @invariant()
    def figures_are_right(self):
        if not hasattr(self, "store"):
            return
        lengths = [row.shape[1] for row in self.rows]
        assert self.store.lengths.tolist() == lengths
        assert self.store.shape == (len(self.rows), 2, max(lengths), 3)
        assert self.store.dtype == self.dtype
        row_bytes = 3 * self.dtype.itemsize
        for tier in TIERS:
            held = self.store.nbytes[tier]
            assert held >= sum(lengths) * 2 * row_bytes * (tier == self.store.tier)
            assert held == 0 or tier == self.store.tier
        assert self.cache.hits + self.cache.misses == self.requested
        moved = self.cache.misses + self.cache.prefetched
        assert self.cache.bytes_moved == moved * row_bytes

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
        self.folder.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(stateful_step_count=30)
