"""Published KV-cache methods under stock `generate()` of Hugging Face transformers."""

from kv_integration.attach import Attached, attach
from kv_integration.baselines import (
    D2O,
    H2O,
    TOVA,
    CaM,
    ChunkKV,
    FullKV,
    InfiniGen,
    Loki,
    PyramidKV,
    Quest,
    SnapKV,
    StreamingLLM,
    loki_bases,
)
from kv_integration.cache import KVCache
from kv_integration.eviction import Eviction
from kv_integration.method import LayerState, Method, Plan, Row
from kv_integration.methods import (
    SABlock,
    SeKV,
    SemantiCache,
    SentenceKV,
    ShadowKV,
    ShadowKVPlus,
)
from kv_integration.report import Report

__version__ = "0.1.0"

METHODS: dict[str, type[Method]] = {
    "full": FullKV,
    "sentencekv": SentenceKV,
    "semanticache": SemantiCache,
    "sablock": SABlock,
    "shadowkv": ShadowKV,
    "shadowkvplus": ShadowKVPlus,
    "sekv": SeKV,
    "streamingllm": StreamingLLM,
    "h2o": H2O,
    "tova": TOVA,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "chunkkv": ChunkKV,
    "cam": CaM,
    "d2o": D2O,
    "quest": Quest,
    "loki": Loki,
    "infinigen": InfiniGen,
}

__all__ = [
    "D2O",
    "H2O",
    "METHODS",
    "TOVA",
    "Attached",
    "CaM",
    "ChunkKV",
    "Eviction",
    "FullKV",
    "InfiniGen",
    "KVCache",
    "LayerState",
    "Loki",
    "Method",
    "Plan",
    "PyramidKV",
    "Quest",
    "Report",
    "Row",
    "SABlock",
    "SeKV",
    "SemantiCache",
    "SentenceKV",
    "ShadowKV",
    "ShadowKVPlus",
    "SnapKV",
    "StreamingLLM",
    "attach",
    "loki_bases",
]
