"""Host memory that cannot be pinned is used all the same, and a warning says so."""

from __future__ import annotations

import pytest
import torch
from offload_cases import random_rows, same_bits

from kv_offload import TieredStore
from kv_offload._host import empty_on_host


@pytest.fixture
def unpinnable(monkeypatch):
    """A machine on which every attempt to pin fails, as it does where locked memory is limited."""
    empty = torch.empty

    def refuses(*args, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("cannot lock memory")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", refuses)


def test_it_falls_back_with_a_warning(unpinnable):
    with pytest.warns(RuntimeWarning, match=r"shape \[2, 3\] in torch.float32 cannot be pinned"):
        made = empty_on_host((2, 3), torch.float32, pinned=True)
    assert made.shape == (2, 3) and made.dtype == torch.float32


def test_no_warning_where_nothing_is_to_be_pinned(unpinnable, recwarn):
    empty_on_host((2, 3), torch.float32, pinned=False)
    assert not recwarn


def test_a_store_on_such_a_host_holds_its_rows(unpinnable, monkeypatch):
    rows = random_rows((1, 2, 5, 3), torch.bfloat16, 0)
    with monkeypatch.context() as there:
        there.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.warns(RuntimeWarning, match="cannot be pinned"):
            store = TieredStore(rows, tier="host")
    indices = torch.tensor([[[4, 0, 2], [1, 1, 3]]])
    expected = rows.gather(2, indices[..., None].expand(-1, -1, -1, 3))
    assert same_bits(store.gather(indices), expected)
