"""The published methods, one file each."""

from kv_integration.methods.sablock import SABlock
from kv_integration.methods.sekv import SeKV
from kv_integration.methods.semanticache import SemantiCache
from kv_integration.methods.sentencekv import SentenceKV
from kv_integration.methods.shadowkv import ShadowKV
from kv_integration.methods.shadowkvplus import ShadowKVPlus

__all__ = ["SABlock", "SeKV", "SemantiCache", "SentenceKV", "ShadowKV", "ShadowKVPlus"]
