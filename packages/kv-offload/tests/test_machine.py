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
    index_tensors,
    indexed,
    random_rows,
    same_bits,
    seeds,
    tiers,
)

from kv_offload import HitCache, TieredStore, load_cache, save_cache

CAPACITY = 8
pieces = st.integers(0, 6)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.requested = 0

    @initialize(dtype=dtypes, seed=seeds, tier=tiers, size=pieces, named=st.booleans())
    def put(self, dtype, seed, tier, size, named):
        self.rows = random_rows((2, 2, size, 3), dtype, seed)
        self.path = Path(self.folder.name) / "scratch" if named else None
        self.store = TieredStore(self.rows, tier=tier, path=self.path)
        self.cache = HitCache(self.store, CAPACITY)

    @rule(size=pieces, seed=seeds)
    def append(self, size, seed):
        more = random_rows((*self.rows.shape[:2], size, 3), self.rows.dtype, seed)
        self.store.append(more)
        self.rows = torch.cat([self.rows, more], 2)

    @rule(data=st.data())
    def truncate(self, data):
        n = data.draw(st.integers(0, self.rows.shape[2]))
        self.store.truncate(n)
        self.rows = self.rows[:, :, :n].clone()

    @rule(tier=tiers)
    def spill_or_promote(self, tier):
        self.store.to_tier(tier)
        assert self.store.tier == tier

    @rule(data=st.data())
    def select_rows(self, data):
        order = data.draw(batch_orders(self.rows.shape[0], st.integers(0, 3)))
        self.store.select_rows(order)
        self.cache.select_rows(order)
        self.rows = self.rows[order]

    @rule(data=st.data())
    def gather(self, data):
        indices = data.draw(index_tensors(*self.rows.shape[:3]))
        assert same_bits(self.store.gather(indices), indexed(self.rows, indices))

    @rule(data=st.data(), seed=seeds)
    def gather_into(self, data, seed):
        indices = data.draw(index_tensors(*self.rows.shape[:3]))
        out = random_rows((*indices.shape, 3), self.rows.dtype, seed)
        expected = indexed(self.rows, indices, start=out)
        assert same_bits(self.store.gather_async(indices, out).wait(), expected)

    @rule(data=st.data())
    def fetch(self, data):
        indices = data.draw(index_tensors(*self.rows.shape[:3], most=CAPACITY))
        self.requested += int((indices >= 0).sum())
        assert same_bits(self.cache.fetch(indices), indexed(self.rows, indices))

    @rule(data=st.data())
    def prefetch(self, data):
        self.cache.prefetch(data.draw(index_tensors(*self.rows.shape[:3], most=CAPACITY)))

    @rule()
    def reset(self):
        self.cache.reset()
        self.requested = 0

    @rule(tier=tiers)
    def reopen(self, tier):
        """Through a cache file, into a store over that file."""
        batch, heads, length, _ = self.rows.shape
        every = torch.arange(length).expand(batch, heads, length)
        file = Path(self.folder.name) / "cache"
        save_cache(file, {"rows": self.store.gather(every)}, method="m", fingerprint="f")
        self.store.close()
        self.store = load_cache(file, fingerprint="f").store("rows", path=self.path)
        self.cache = HitCache(self.store, CAPACITY)
        self.requested = 0
        assert self.store.tier == "disk"
        self.store.to_tier(tier)

    @invariant()
    def figures_are_right(self):
        if not hasattr(self, "store"):
            return
        assert self.store.shape == self.rows.shape
        assert self.store.dtype == self.rows.dtype
        row_bytes = 3 * self.rows.dtype.itemsize
        for tier in TIERS:
            held = self.store.nbytes[tier]
            assert held >= self.rows.numel() * self.rows.dtype.itemsize * (tier == self.store.tier)
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
