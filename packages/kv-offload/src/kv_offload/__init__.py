"""Tiered storage for KV caches: device, host and disk, gather by index, hit cache, cache files."""

from kv_offload._pending import PendingRows
from kv_offload._rows import storage_bytes
from kv_offload.cache_file import CacheFile, load_cache
from kv_offload.errors import (
    AlteredFileError,
    CacheFileError,
    FingerprintError,
    ForeignFileError,
    NewerFormatError,
    StoreClosedError,
    TruncatedFileError,
)
from kv_offload.hit_cache import HitCache
from kv_offload.records import RecordStore
from kv_offload.save_file import save_cache
from kv_offload.store import TieredStore

__version__ = "0.1.0"

__all__ = [
    "AlteredFileError",
    "CacheFile",
    "CacheFileError",
    "FingerprintError",
    "ForeignFileError",
    "HitCache",
    "NewerFormatError",
    "PendingRows",
    "RecordStore",
    "StoreClosedError",
    "TieredStore",
    "TruncatedFileError",
    "load_cache",
    "save_cache",
    "storage_bytes",
]
