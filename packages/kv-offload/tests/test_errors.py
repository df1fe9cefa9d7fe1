"""Wrong input is refused with a text that names the argument, its value and what was wanted."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

IDS = torch.zeros(2, 3, 4, dtype=torch.int64)


@pytest.fixture
def store(plain):
    with plain.TieredStore(torch.arange(60.0).view(2, 3, 5, 2)) as store:
        yield store


@pytest.mark.parametrize(
    ("kind", "arguments", "options", "text"),
    [
        (TypeError, ["rows"], {}, "tensor is 'rows', wanted a tensor"),
        (ValueError, [torch.ones(2, 3)], {}, r"tensor has shape \(2, 3\), wanted \[B, H, N, D\]"),
        (TypeError, [torch.ones(1, 1, 1, 1).cfloat()], {}, "tensor has dtype torch.complex64"),
        (TypeError, [torch.ones(1, 1, 1, 1).to_sparse()], {}, "tensor has layout torch.sparse"),
        (ValueError, [torch.ones(1, 1, 1, 1)], {"tier": "gpu"}, "tier is 'gpu', wanted one of"),
        (ValueError, [torch.ones(1, 1, 1, 1)], {"device": "gpu"}, "device is 'gpu', wanted one th"),
        (
            ValueError,
            [torch.ones(1, 1, 1, 1)],
            {"device": "cuda:99"},
            "device is 'cuda:99', wanted",
        ),
        (ValueError, [torch.ones(1, 1, 1, 1)], {"device": 1.5}, "device is 1.5, wanted one that"),
    ],
)
def test_a_store_refuses(plain, kind, arguments, options, text):
    with pytest.raises(kind, match=text):
        plain.TieredStore(*arguments, **options)


@pytest.mark.parametrize(
    ("kind", "indices", "text"),
    [
        (TypeError, [[[0]]], r"indices is \[\[\[0\]\]\], wanted an int64 tensor"),
        (TypeError, IDS.int(), "indices has dtype torch.int32, wanted torch.int64"),
        (ValueError, IDS[0], r"indices has shape \(3, 4\), wanted \(2, 3, K\)"),
        (ValueError, IDS[:, :2], r"indices has shape \(2, 2, 4\), wanted \(2, 3, K\)"),
        (ValueError, IDS.to("meta"), "indices is on device meta, wanted cpu or cpu"),
        (ValueError, IDS + 5, "indices holds 5, wanted -1 .skip. or a row below 5"),
        (ValueError, IDS - 2, "indices holds -2, wanted -1 .skip. or a row below 5"),
    ],
)
@pytest.mark.parametrize("call", ["gather", "gather_async", "fetch", "prefetch"])
def test_wrong_indices_are_refused(plain, store, call, kind, indices, text):
    target = store if call.startswith("gather") else plain.HitCache(store, 4)
    with pytest.raises(kind, match=text):
        getattr(target, call)(indices)


@pytest.mark.parametrize(
    ("kind", "out", "text"),
    [
        (TypeError, "out", "out is 'out', wanted a torch.float32 tensor"),
        (TypeError, torch.ones(2, 3, 4, 2).half(), "out has dtype torch.float16, wanted torch.flo"),
        (ValueError, torch.ones(2, 3, 4, 1), r"out has shape \(2, 3, 4, 1\), wanted \(2, 3, 4, 2"),
        (ValueError, torch.ones(2, 3, 4, 2, device="meta"), "out is on device meta, wanted cpu"),
    ],
)
def test_a_wrong_out_is_refused(store, kind, out, text):
    with pytest.raises(kind, match=text):
        store.gather(IDS, out=out)
    with pytest.raises(kind, match=text):
        store.gather_async(IDS, out=out)


def test_an_index_out_of_range_leaves_out_alone(store):
    out = torch.full((2, 3, 4, 2), 7.0)
    wrong = IDS.clone()
    wrong[1, 2, 3] = 5
    with pytest.raises(ValueError, match="indices holds 5"):
        store.gather(wrong, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("kind", "rows", "text"),
    [
        (TypeError, 3, "rows is 3, wanted a tensor"),
        (TypeError, torch.ones(2, 3, 1, 2).half(), "rows has dtype torch.float16, wanted"),
        (ValueError, torch.ones(2, 3, 2), r"rows has shape \(2, 3, 2\), wanted"),
        (ValueError, torch.ones(2, 2, 1, 2), r"rows has shape \(2, 2, 1, 2\), wanted \(2, 3, n"),
        (ValueError, torch.ones(2, 3, 1, 3), r"rows has shape \(2, 3, 1, 3\), wanted \(2, 3, n"),
    ],
)
def test_wrong_rows_are_not_appended(store, kind, rows, text):
    with pytest.raises(kind, match=text):
        store.append(rows)
    assert store.shape == (2, 3, 5, 2)


@pytest.mark.parametrize(
    ("kind", "order", "text"),
    [
        (TypeError, [0], r"batch_indices is \[0\], wanted an int64 tensor"),
        (TypeError, torch.tensor([0.0]), "batch_indices has dtype torch.float32"),
        (ValueError, torch.tensor([[0]]), r"batch_indices has shape \(1, 1\), wanted one dim"),
        (ValueError, torch.tensor([0, 2]), "batch_indices holds 2, wanted 0 to 1"),
        (ValueError, torch.tensor([-1]), "batch_indices holds -1, wanted 0 to 1"),
    ],
)
def test_wrong_batch_indices_are_refused(store, kind, order, text):
    with pytest.raises(kind, match=text):
        store.select_rows(order)
    assert store.shape == (2, 3, 5, 2)


@pytest.mark.parametrize(
    ("kind", "n", "text"),
    [
        (TypeError, 2.0, "n is 2.0, wanted an int"),
        (TypeError, True, "n is True, wanted an int"),
        (ValueError, -1, "n is -1, wanted 0 to 5, the rows held"),
        (ValueError, 6, "n is 6, wanted 0 to 5, the rows held"),
    ],
)
def test_a_wrong_length_is_refused(store, kind, n, text):
    with pytest.raises(kind, match=text):
        store.truncate(n)
    assert store.shape == (2, 3, 5, 2)


def test_a_wrong_tier_is_refused(store):
    with pytest.raises(ValueError, match="tier is 'cloud', wanted one of 'device', 'host', 'disk'"):
        store.to_tier("cloud")


@pytest.mark.parametrize(
    "use",
    [
        lambda store: store.gather(IDS),
        lambda store: store.gather_async(IDS),
        lambda store: store.append(torch.ones(2, 3, 1, 2)),
        lambda store: store.to_tier("host"),
        lambda store: store.select_rows(torch.tensor([0])),
        lambda store: store.truncate(0),
        lambda store: store.shape,
        lambda store: store.dtype,
        lambda store: store.tier,
        lambda store: store.device,
        lambda store: store.nbytes,
        lambda store: store.lengths,
        lambda store: store.__enter__(),
    ],
)
def test_a_closed_store_says_so(plain, store, use):
    store.close()
    with pytest.raises(plain.StoreClosedError, match="the store is closed"):
        use(store)


@pytest.mark.parametrize("call", ["fetch", "prefetch", "select_rows", "reset"])
def test_a_cache_over_a_closed_store_says_so(plain, store, call):
    cache = plain.HitCache(store, 4)
    store.close()
    with pytest.raises(plain.StoreClosedError, match="the store is closed"):
        getattr(cache, call)(*([] if call == "reset" else [IDS]))


@pytest.mark.parametrize(
    ("kind", "capacity", "text"),
    [
        (TypeError, 4.0, "capacity is 4.0, wanted an int"),
        (TypeError, True, "capacity is True, wanted an int"),
        (ValueError, 0, "capacity is 0, wanted at least 1 row per head"),
    ],
)
def test_a_wrong_capacity_is_refused(plain, store, kind, capacity, text):
    with pytest.raises(kind, match=text):
        plain.HitCache(store, capacity)


def test_a_cache_wants_a_store_and_no_more_than_its_capacity(plain, store):
    with pytest.raises(TypeError, match="store is 3, wanted a TieredStore"):
        plain.HitCache(3, 4)
    with pytest.raises(ValueError, match="asks for 4 rows per head, wanted at most the capacity 3"):
        plain.HitCache(store, 3).fetch(IDS)


def test_a_cache_is_not_reordered_without_its_store(plain, store):
    cache = plain.HitCache(store, 4)
    order = torch.tensor([1, 0])
    with pytest.raises(ValueError, match=r"batch_indices is \[1, 0\].*TieredStore.select_rows fir"):
        cache.select_rows(order)
    store.select_rows(order)
    cache.select_rows(order)
    with pytest.raises(ValueError, match=r"those of the store's last select_rows, \[1, 0\]"):
        cache.select_rows(torch.tensor([0, 1]))
    with pytest.raises(TypeError, match=r"batch_indices is \[1, 0\], wanted an int64 tensor"):
        cache.select_rows([1, 0])


def test_storage_bytes_takes_tensors(plain):
    with pytest.raises(TypeError, match="storage_bytes takes tensors, got 3"):
        plain.storage_bytes(3)


# Files.


def test_a_path_in_use_is_left_alone(plain, tmp_path):
    path = tmp_path / "rows"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=r"path is in use.*rows"):
        plain.TieredStore(torch.ones(1, 1, 1, 1), tier="disk", path=path)
    assert path.read_text() == "mine"
    path.unlink()
    with plain.TieredStore(torch.ones(1, 1, 1, 1), tier="disk", path=path):
        other = plain.TieredStore(torch.ones(1, 1, 1, 1), tier="host", path=path)
        with pytest.raises(FileExistsError, match=r"path is in use.*rows"):
            other.to_tier("disk")
        assert other.tier == "host"
        assert other.gather(torch.zeros(1, 1, 1, dtype=torch.int64)).item() == 1
        assert path.exists()


def test_a_path_that_cannot_be_written_is_an_error(plain, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        plain.TieredStore(torch.ones(1, 1, 1, 1), tier="disk", path=tmp_path / "nowhere" / "rows")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="file"):
        plain.TieredStore(torch.ones(1, 1, 1, 1), tier="disk", path=tmp_path / "file" / "rows")
    with pytest.raises(NotADirectoryError, match="file"):
        plain.save_cache(tmp_path / "file" / "c", {}, method="m", fingerprint="f")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        plain.save_cache(tmp_path / "nowhere" / "c", {}, method="m", fingerprint="f")
    with pytest.raises(IsADirectoryError, match="cache not saved"):
        plain.save_cache(tmp_path, {}, method="m", fingerprint="f")
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_without_permission_is_an_error(plain):
    folder = Path(tempfile.mkdtemp())
    try:
        plain.save_cache(folder / "c", {"a": torch.ones(2)}, method="m", fingerprint="f")
        content = (folder / "c").read_bytes()
        folder.chmod(0o555)
        with as_nobody():
            with pytest.raises(
                PermissionError, match=r"cache not saved, what was at path is as it"
            ):
                plain.save_cache(folder / "c", {}, method="m", fingerprint="f")
            with pytest.raises(PermissionError, match="rows"):
                plain.TieredStore(torch.ones(1, 1, 1, 1), tier="disk", path=folder / "rows")
            store = plain.TieredStore(torch.ones(1, 1, 1, 1), tier="host", path=folder / "rows")
            with pytest.raises(PermissionError, match="rows"):
                store.to_tier("disk")
            assert store.tier == "host" and store.shape == (1, 1, 1, 1)
        assert (folder / "c").read_bytes() == content
        assert os.listdir(folder) == ["c"]
        (folder / "c").chmod(0)
        with as_nobody(), pytest.raises(PermissionError, match="c"):
            plain.load_cache(folder / "c")
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


@contextmanager
def as_nobody():
    """Permissions do not stop root, so root becomes somebody else for a while."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_file_that_took_the_stores_name_is_not_touched(plain, tmp_path):
    path = tmp_path / "rows"
    store = plain.TieredStore(torch.ones(1, 1, 2, 1), tier="disk", path=path)
    plain.save_cache(path, {"a": torch.ones(2)}, method="m", fingerprint="f")
    content = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"path is in use.*rows"):
        store.append(torch.ones(1, 1, 1, 1))
    assert store.shape == (1, 1, 2, 1)
    assert store.gather(torch.tensor([[[0, 1]]])).sum() == 2
    assert os.listdir(tmp_path) == ["rows"]
    store.close()
    assert path.read_bytes() == content


def test_a_scratch_file_that_was_removed_is_made_anew(plain, tmp_path):
    path = tmp_path / "rows"
    store = plain.TieredStore(torch.ones(1, 1, 2, 1), tier="disk", path=path)
    path.unlink()
    store.append(torch.ones(1, 1, 1, 1))
    assert store.gather(torch.tensor([[[0, 1, 2]]])).sum() == 3
    path.unlink()
    store.close()
    assert os.listdir(tmp_path) == []


def test_a_store_over_a_cache_file_does_not_write_into_that_file(plain, tmp_path):
    path = tmp_path / "c"
    plain.save_cache(path, {"a": torch.ones(1, 1, 2, 1)}, method="m", fingerprint="f")
    content = path.read_bytes()
    with plain.load_cache(path).store("a", path=path) as store:
        with pytest.raises(FileExistsError, match="path is in use"):
            store.append(torch.ones(1, 1, 1, 1))
        assert store.shape == (1, 1, 2, 1)
    assert path.read_bytes() == content


def test_a_file_larger_than_the_disk_takes_leaves_nothing(plain, tmp_path):
    # As test_a_full_disk_leaves_the_store_as_it_was, with an error of the system's own.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = plain.TieredStore(torch.ones(1, 1, 1 << 18, 1), tier="host", path=tmp_path / "rows")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
    try:
        with pytest.raises(OSError, match=r"no 1048576 bytes for the rows: .*rows"):
            store.to_tier("disk")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.tier == "host" and os.listdir(tmp_path) == []
    store.to_tier("disk")
    assert os.listdir(tmp_path) == ["rows"]
    store.close()


def test_blocks_are_reserved_without_posix_fallocate_too(plain, tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    rows = torch.arange(3e5).view(1, 1, -1, 1)
    with plain.TieredStore(rows, tier="disk", path=tmp_path / "rows") as store:
        assert (tmp_path / "rows").stat().st_blocks * 512 >= 12e5
        assert torch.equal(store.gather(torch.arange(300000).view(1, 1, -1)), rows)


def test_a_fetch_that_runs_out_of_memory_changes_nothing(plain, monkeypatch):
    rows = torch.arange(8.0).view(1, 1, 8, 1)
    store = plain.TieredStore(rows, tier="host")
    cache = plain.HitCache(store, 4)
    cache.fetch(torch.tensor([[[5, 1]]]))
    with monkeypatch.context() as patch:

        def out_of_memory(*_):
            raise torch.OutOfMemoryError("none left")

        patch.setattr(type(store._buffer), "take", out_of_memory)
        for call in (cache.fetch, cache.prefetch):
            with pytest.raises(torch.OutOfMemoryError):
                call(torch.tensor([[[1, 2]]]))
    assert (cache.hits, cache.misses, cache.prefetched) == (0, 2, 0)
    assert cache.fetch(torch.tensor([[[1, 5]]])).flatten().tolist() == [1, 5]
    assert (cache.hits, cache.misses) == (2, 2)


@pytest.mark.parametrize("change", ["append", "select_rows", "to_tier"])
def test_a_full_disk_leaves_the_store_as_it_was(plain, tmp_path, monkeypatch, change):
    rows = torch.arange(60.0).view(2, 3, 5, 2)
    tier = "host" if change == "to_tier" else "disk"
    store = plain.TieredStore(rows, tier=tier, path=tmp_path / "rows")
    before = os.listdir(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"no \d+ bytes for the rows: No space.*rows") as caught:
            {
                "append": lambda: store.append(rows),
                "select_rows": lambda: store.select_rows(torch.tensor([1])),
                "to_tier": lambda: store.to_tier("disk"),
            }[change]()
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == before
    assert store.tier == tier and store.shape == rows.shape
    assert torch.equal(store.gather(torch.arange(5).expand(2, 3, 5)), rows)
    store.append(rows)
    assert torch.equal(store.gather(torch.arange(5, 10).expand(2, 3, 5)), rows)
    store.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "tensors", "header", "text"),
    [
        (TypeError, {"a": 3}, {}, r"tensors\['a'\] is 3, wanted a tensor"),
        (TypeError, {3: torch.ones(1)}, {}, "a name in tensors is 3, wanted a str"),
        (TypeError, {"a": torch.ones(1).cfloat()}, {}, r"tensors\['a'\] has dtype torch.complex64"),
        (ValueError, {"__metadata__": torch.ones(1)}, {}, "'__metadata__', which safetensors res"),
        (TypeError, {}, {"method": 1}, "method is 1, wanted a str"),
        (TypeError, {}, {"fingerprint": None}, "fingerprint is None, wanted a str"),
        (TypeError, {}, {"extra": {"a": {1}}}, r"extra is {'a': \{1}}, wanted JSON"),
        (TypeError, {}, {"extra": [1]}, r"extra is \[1\], wanted a mapping"),
        (ValueError, {}, {"extra": {"a": float("nan")}}, "extra is {'a': nan}, wanted JSON"),
        (ValueError, {}, {"extra": {"a": (1,)}}, r"which JSON would change to {'a': \[1\]}"),
        (ValueError, {}, {"extra": {1: 1}}, "which JSON would change to {'1': 1}"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_writing(
    plain, tmp_path, kind, tensors, header, text
):
    fields = {"method": "m", "fingerprint": "f", **header}
    with pytest.raises(kind, match=text):
        plain.save_cache(tmp_path / "c", tensors, **fields)
    assert os.listdir(tmp_path) == []


def test_loading_says_what_is_missing(plain, tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        plain.load_cache(tmp_path / "nothing-here")
    with pytest.raises(IsADirectoryError):
        plain.load_cache(tmp_path)
    plain.save_cache(tmp_path / "c", {"a": torch.ones(2)}, method="m", fingerprint="f")
    with pytest.raises(TypeError, match="fingerprint is 3, wanted a str"):
        plain.load_cache(tmp_path / "c", fingerprint=3)
    cache = plain.load_cache(tmp_path / "c")
    with pytest.raises(ValueError, match=r"name is 'b', wanted one of \['a'\]"):
        cache.store("b")
    with pytest.raises(ValueError, match=r"a has shape \(2,\), wanted \[B, H, N, D\]"):
        cache.store("a")
