"""Published KV-cache methods under stock `generate()` of Hugging Face transformers."""

from kv_integration.attach import Attached, attach
from kv_integration.baselines import (
    D2O,
    H2O,
    CaM,
    ChunkKV,
    FullKV,
    PyramidKV,
    SnapKV,
    StreamingLLM,
)
from kv_integration.cache import KVCache
from kv_integration.eviction import Eviction
from kv_integration.method import LayerState, Method, Plan, Row
from kv_integration.methods import SABlock, SeKV, SemantiCache, SentenceKV
from kv_integration.report import Report

__version__ = "0.1.0"

METHODS: dict[str, type[Method]] = {
    "full": FullKV,
    "sentencekv": SentenceKV,
    "semanticache": SemantiCache,
    "sablock": SABlock,
    "sekv": SeKV,
    "streamingllm": StreamingLLM,
    "h2o": H2O,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "chunkkv": ChunkKV,
    "cam": CaM,
    "d2o": D2O,
}

__all__ = [
    "D2O",
    "H2O",
    "METHODS",
    "Attached",
    "CaM",
    "ChunkKV",
    "Eviction",
    "FullKV",
    "KVCache",
    "LayerState",
    "Method",
    "Plan",
    "PyramidKV",
    "Report",
    "Row",
    "SABlock",
    "SeKV",
    "SemantiCache",
    "SentenceKV",
    "SnapKV",
    "StreamingLLM",
    "attach",
]
