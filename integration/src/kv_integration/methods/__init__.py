"""The published methods, one file each."""

from kv_integration.methods.sablock import SABlock
from kv_integration.methods.semanticache import SemantiCache
from kv_integration.methods.sentencekv import SentenceKV

__all__ = ["SABlock", "SemantiCache", "SentenceKV"]
