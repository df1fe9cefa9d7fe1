"""Published KV-cache methods under stock `generate()` of Hugging Face transformers."""

from kv_integration.attach import Attached, attach
from kv_integration.baselines import FullKV
from kv_integration.cache import KVCache
from kv_integration.method import Eviction, LayerState, Method, Plan, Row
from kv_integration.methods import SABlock, SentenceKV
from kv_integration.report import Report

__version__ = "0.1.0"

METHODS: dict[str, type[Method]] = {"full": FullKV, "sentencekv": SentenceKV, "sablock": SABlock}

__all__ = [
    "METHODS",
    "Attached",
    "Eviction",
    "FullKV",
    "KVCache",
    "LayerState",
    "Method",
    "Plan",
    "Report",
    "Row",
    "SABlock",
    "SentenceKV",
    "attach",
]
