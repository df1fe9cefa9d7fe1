"""The errors that only this package raises."""

from __future__ import annotations


class StoreClosedError(RuntimeError):
    """A store was used after `close()`."""


class CacheFileError(ValueError):
    """A cache file was refused. Nothing of it was loaded."""


class ForeignFileError(CacheFileError):
    """The file was not written by `save_cache`."""


class TruncatedFileError(CacheFileError):
    """The file ends before its header says it should."""


class AlteredFileError(CacheFileError):
    """The file's bytes do not match its checksum or its own header."""


class NewerFormatError(CacheFileError):
    """The file's format version is newer than this package knows."""


class FingerprintError(CacheFileError):
    """The file was made for another model than the one asked for."""
