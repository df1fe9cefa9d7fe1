"""Reference points built from the same primitives as the methods."""

from kv_integration.baselines.full import FullKV

__all__ = ["FullKV"]
