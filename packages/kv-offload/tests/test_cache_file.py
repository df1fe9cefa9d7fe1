from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import resource
import signal
import stat
import struct
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offload_cases import dtypes, index_tensors, indexed, random_rows, same_bits, seeds, shapes
from safetensors import safe_open

import kv_offload.save_file
from kv_offload import (
    AlteredFileError,
    CacheFileError,
    FingerprintError,
    ForeignFileError,
    NewerFormatError,
    TieredStore,
    TruncatedFileError,
    load_cache,
    save_cache,
)

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@st.composite
def tensor_dicts(draw):
    """Tensors of any rank, 0 included, contiguous or not."""
    tensors = {}
    for name in draw(st.lists(names, max_size=4, unique=True)):
        shape = draw(st.lists(st.integers(0, 3), max_size=4))
        tensor = random_rows(shape, draw(dtypes), draw(seeds))
        views = [lambda t: t, lambda t: t.mT if t.ndim > 1 else t, lambda t: t[..., ::2]]
        tensors[name] = draw(st.sampled_from(views[: 3 if shape else 1]))(tensor)
    return tensors


def same_tensors(a, b) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


OLD = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2], dtype=torch.int8)}
NEW = {"a": -torch.arange(6.0).view(2, 3), "c": torch.ones(5, dtype=torch.bfloat16)}


def save(path, tensors=OLD, **changes):
    save_cache(path, tensors, **{"method": "m", "fingerprint": "f", **changes})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.safetensors"


@given(tensor_dicts(), names, names, st.dictionaries(names, json_values, max_size=3))
def test_what_is_loaded_is_what_was_saved(tmp_path, tensors, method, fingerprint, extra):
    file = tmp_path / "cache"
    save_cache(file, tensors, method=method, fingerprint=fingerprint, extra=extra)
    cache = load_cache(file, fingerprint=fingerprint)
    assert same_tensors(cache.tensors, tensors)
    assert (cache.method, cache.fingerprint, cache.extra) == (method, fingerprint, extra)
    assert os.listdir(tmp_path) == ["cache"]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_every_bit_pattern_comes_back_from_disk(tmp_path, dtype):
    """All of the 8 and 16 bit dtypes; of fp32 every sign and exponent with some mantissas."""
    word = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[dtype.itemsize]
    patterns = torch.arange(1 << min(8 * dtype.itemsize, 16))
    patterns = patterns * 65537 if dtype.itemsize == 4 else patterns
    rows = patterns.to(word).view(dtype).view(1, 1, -1, 8)
    every = torch.arange(rows.shape[2]).view(1, 1, -1)
    save(tmp_path / "cache", {"rows": rows})
    with load_cache(tmp_path / "cache").store("rows") as store:
        assert same_bits(store.gather(every), rows)
        store.append(rows)
        assert same_bits(store.gather(every + rows.shape[2]), rows)
    with TieredStore(rows, tier="disk", path=tmp_path / "rows") as store:
        assert same_bits(store.gather(every), rows)


@given(tensor_dicts())
def test_other_programs_read_it_as_safetensors(tmp_path, tensors):
    save(tmp_path / "cache", tensors)
    with safe_open(tmp_path / "cache", framework="pt") as file:
        assert same_tensors({name: file.get_tensor(name) for name in file.keys()}, tensors)  # noqa: SIM118
        assert file.metadata()["format"] == "kv-offload-cache"


@given(shapes, dtypes, seeds, st.data())
def test_a_store_over_a_cache_file_gathers_and_grows_and_leaves_the_file_alone(
    tmp_path, shape, dtype, seed, data
):
    rows = random_rows(shape, dtype, seed)
    file = tmp_path / "cache"
    save(file, {"other": torch.ones(3), "rows": rows})
    before = file.read_bytes()
    scratch = tmp_path / "scratch"
    with load_cache(file).store("rows", path=scratch) as store:
        assert store.nbytes == {"device": 0, "host": 0, "disk": rows.numel() * dtype.itemsize}
        indices = data.draw(index_tensors(*shape[:3]))
        assert same_bits(store.gather(indices), indexed(rows, indices))
        n = data.draw(st.integers(0, shape[2]))
        store.truncate(n)
        store.append(rows)
        assert scratch.exists() == (shape[0] * shape[2] > 0)
        whole = torch.cat([rows[:, :, :n], rows], 2)
        indices = data.draw(index_tensors(*whole.shape[:3]))
        assert same_bits(store.gather(indices), indexed(whole, indices))
    assert file.read_bytes() == before


@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_are_refused_by_name(tmp_path, content, with_length):
    if with_length:
        content = struct.pack("<Q", len(content) + 1) + b"{" + content
    (tmp_path / "cache").write_bytes(content)
    with pytest.raises(CacheFileError, match="cache"):
        load_cache(tmp_path / "cache")


@given(st.recursive(json_values, lambda inner: st.dictionaries(
    st.sampled_from(["__metadata__", "format", "format_version", "data_offsets", "a"]),
    inner | st.sampled_from(["kv-offload-cache", "1"]), max_size=4)))  # fmt: skip
def test_any_header_is_refused_by_name(tmp_path, header):
    text = json.dumps({"__metadata__": header, "a": header}, separators=(",", ":")).encode()
    (tmp_path / "cache").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CacheFileError, match="cache"):
        load_cache(tmp_path / "cache")


def write_with_checksum(path, header, data=b""):
    """What `save_cache` would write, whatever the header says."""
    text = json.dumps(header, separators=(",", ":")).encode()
    raw = struct.pack("<Q", len(text)) + text
    digest = hashlib.sha256(raw + data).hexdigest().encode()
    path.write_bytes(raw.replace(b"0" * 64, digest, 1) + data)


METADATA = {
    "format": "kv-offload-cache",
    "format_version": "1",
    "method": "m",
    "fingerprint": "f",
    "extra": "{}",
    "checksum": "sha256:" + "0" * 64,
}
sizes = st.integers(-1, 5) | st.sampled_from([True, 2.0, "2", None, 1 << 40, 1 << 62, 1 << 70])
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "F8_E5M2", "C64", "nothing", None, []]),
        "shape": st.lists(sizes, max_size=3) | sizes,
        "data_offsets": st.lists(sizes, min_size=1, max_size=3) | st.just([0, 4]) | sizes,
    },
)
fields = st.dictionaries(
    st.sampled_from(["method", "fingerprint", "extra", "format_version"]),
    st.sampled_from([1, None, "{}", "[]", "{", "1", "9" * 5000, "-1", "0", "x", ["1"]]),
    max_size=2,
)


@given(st.dictionaries(st.sampled_from("ab"), entries | json_values, max_size=2), fields)
def test_nonsense_with_the_right_checksum_is_refused_by_name(tmp_path, tensors, changes):
    file = tmp_path / "cache"
    write_with_checksum(file, {**tensors, "__metadata__": {**METADATA, **changes}}, b"12345678")
    with pytest.raises(CacheFileError, match="cache"):
        load_cache(file)


def test_a_header_with_the_right_checksum_that_says_what_follows_is_read(path):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    write_with_checksum(path, {"a": entry, "__metadata__": METADATA}, b"12345678")
    assert load_cache(path).tensors["a"].numpy().tobytes() == b"12345678"
    for change, error, text in [
        ({"shape": [3]}, AlteredFileError, "has a header that cannot be read"),
        ({"shape": [0, 1 << 62, 1 << 62]}, AlteredFileError, "has a header that cannot be read"),
        ({"dtype": "C64", "shape": [1]}, CacheFileError, "holds the dtype C64, unknown here"),
    ]:
        write_with_checksum(path, {"a": entry | change, "__metadata__": METADATA}, b"12345678")
        with pytest.raises(error, match=text):
            load_cache(path)


def test_every_changed_byte_is_refused(path, plain):
    save(path)
    content = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for place, byte in enumerate(content):
            for change in [1 << bit for bit in range(8)] + [0xFF]:
                os.pwrite(file.fileno(), bytes([byte ^ change]), place)
                with pytest.raises(plain.CacheFileError, match="cache"):
                    plain.load_cache(path)
            os.pwrite(file.fileno(), bytes([byte]), place)
    assert same_tensors(load_cache(path).tensors, OLD)


def test_every_truncation_and_every_addition_is_refused(path):
    save(path)
    content = path.read_bytes()
    for length in reversed(range(len(content))):
        os.truncate(path, length)
        with pytest.raises(TruncatedFileError, match="cache"):
            load_cache(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(AlteredFileError, match="its header says"):
        load_cache(path)


def test_a_changed_byte_of_the_data_is_called_altered(path):
    save(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(AlteredFileError, match="does not match its checksum"):
        load_cache(path)


def test_other_files_are_called_foreign(path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, path)
    with pytest.raises(ForeignFileError, match="not written by save_cache"):
        load_cache(path)
    save_file({"a": torch.ones(3)}, path, metadata={"format": "pt", "format_version": "1"})
    with pytest.raises(ForeignFileError, match="has format 'pt'"):
        load_cache(path)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" * 4)
    with pytest.raises(ForeignFileError, match="does not start as safetensors does"):
        load_cache(path)
    path.write_bytes(struct.pack("<Q", 100_000) + b'{"a":' + b"[" * 99_995)
    with pytest.raises(ForeignFileError, match="not written by save_cache"):
        load_cache(path)


def test_a_newer_format_version_says_so(path, monkeypatch):
    monkeypatch.setattr(kv_offload.save_file, "FORMAT_VERSION", 7)
    save(path)
    with pytest.raises(NewerFormatError, match="format version 7, this kv-offload reads up to 1"):
        load_cache(path)


def test_another_models_cache_is_refused(path):
    save(path, fingerprint="llama-8b")
    assert load_cache(path).fingerprint == "llama-8b"
    with pytest.raises(FingerprintError, match="for the model 'llama-8b', wanted 'llama-70b'"):
        load_cache(path, fingerprint="llama-70b")


def test_loaded_tensors_are_private_and_outlive_the_file(path):
    save(path)
    content = path.read_bytes()
    tensors = load_cache(path).tensors
    tensors["b"].zero_()
    assert path.read_bytes() == content
    save(path, NEW)
    assert same_bits(tensors["a"], OLD["a"])
    path.unlink()
    assert same_bits(tensors["a"], OLD["a"])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux' /proc")
def test_opening_takes_no_memory_for_the_rows(path):
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    size = 64 << 20
    save(path, {"rows": torch.zeros(1, 1, size // 1024, 1024, dtype=torch.uint8)})
    load_cache(path)
    before = resident()
    store = load_cache(path).store("rows")
    assert resident() - before < size // 4
    assert store.gather(torch.zeros(1, 1, 1, dtype=torch.int64)).sum() == 0
    store.close()


# Nothing that was there is lost.


def fail_with(error):
    def fail(*args, **kwargs):
        raise error

    return fail


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken disk"), KeyboardInterrupt()])
def test_a_failed_save_keeps_the_old_file_and_leaves_nothing_else(path, monkeypatch, call, error):
    save(path)
    content = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail_with(error))
        with pytest.raises(type(error)) as caught:
            save(path, NEW)
    if isinstance(error, OSError):
        assert caught.value.errno == errno.EIO
        assert "cache not saved, what was at path is as it was: broken disk" in str(caught.value)
        assert str(path) in str(caught.value)
    assert path.read_bytes() == content
    assert os.listdir(path.parent) == [path.name]


def test_a_folder_that_cannot_be_flushed_says_that_the_file_is_saved(path, monkeypatch):
    save(path)
    fsync = os.fsync

    def of_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(failure, "of a folder")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    failure = errno.EIO
    with pytest.raises(OSError, match="cache saved, but its name may not survive a power cut"):
        save(path, NEW)
    assert same_tensors(load_cache(path).tensors, NEW)
    failure = errno.EINVAL  # a file system without it
    save(path)
    assert same_tensors(load_cache(path).tensors, OLD)


@contextmanager
def files_of_at_most(size):
    """A limit on the size of files fails in the middle of a write, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_full_at_any_byte_is_an_error_that_keeps_the_old_file(path):
    save(path, NEW)
    needed = path.stat().st_size
    save(path)
    content = path.read_bytes()
    for size in range(needed):
        with files_of_at_most(size), pytest.raises(OSError, match="cache not saved"):
            save(path, NEW)
        assert path.read_bytes() == content
        assert os.listdir(path.parent) == [path.name]
    with files_of_at_most(needed):
        save(path, NEW)
    assert same_tensors(load_cache(path).tensors, NEW)


def test_a_full_disk_is_an_error_that_keeps_the_old_file(path):
    save(path)
    content = path.read_bytes()
    with files_of_at_most(1 << 20), pytest.raises(OSError, match="cache not saved"):
        save(path, {"big": torch.zeros(3 << 20, dtype=torch.uint8)})
    assert path.read_bytes() == content
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_save_killed_at_any_line_leaves_the_old_file_or_the_new_one(path):
    source = kv_offload.save_file.__file__

    def killed_at(line: int) -> bool:
        """Save in a child that dies before its `line`th line; False if it came to the end."""
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
            return os.WIFSIGNALED(status)
        seen = 0

        def trace(frame, event, _):
            nonlocal seen
            if frame.f_code.co_filename != source:
                return None
            if event == "line":
                seen += 1
                if seen == line:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        status = 1
        try:
            sys.settrace(trace)
            save(path, NEW)
            status = 0
        finally:
            os._exit(status)

    outcomes = []
    line = 1
    while True:
        save(path)
        killed = killed_at(line)
        found = load_cache(path).tensors
        old, new = same_tensors(found, OLD), same_tensors(found, NEW)
        assert old != new
        outcomes.append(new)
        if not killed:
            break
        line += 1
    assert outcomes == sorted(outcomes) and outcomes[-1] and not outcomes[0]
    assert len(outcomes) > 30


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_saves_killed_at_any_time_leave_the_old_file_or_the_new_one(path):
    """Unlike the test before it, this one also kills inside of a write, a flush, a rename."""
    tensors = [{"a": torch.full((1 << 18,), number)} for number in range(2)]
    save(path, tensors[0])
    seen = set()
    for round_ in range(40):
        child = os.fork()
        if not child:
            try:
                for step in range(1 << 20):
                    save(path, tensors[step % 2])
            finally:
                os._exit(1)
        time.sleep(random.Random(round_).uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        found = load_cache(path).tensors
        seen.add(next(number for number in range(2) if same_tensors(found, tensors[number])))
        save(path, tensors[round_ % 2])
        assert same_tensors(load_cache(path).tensors, tensors[round_ % 2])
    assert seen == {0, 1}
