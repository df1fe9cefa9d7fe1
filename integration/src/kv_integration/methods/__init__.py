"""The published methods, one file each."""

from kv_integration.methods.sablock import SABlock
from kv_integration.methods.sekv import SeKV
from kv_integration.methods.semanticache import SemantiCache
from kv_integration.methods.sentencekv import SentenceKV

__all__ = ["SABlock", "SeKV", "SemantiCache", "SentenceKV"]
