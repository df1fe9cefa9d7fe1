"""Reference points built from the same primitives as the methods."""

from kv_integration.baselines.cam import CaM
from kv_integration.baselines.chunkkv import ChunkKV
from kv_integration.baselines.d2o import D2O
from kv_integration.baselines.full import FullKV
from kv_integration.baselines.h2o import H2O
from kv_integration.baselines.infinigen import InfiniGen
from kv_integration.baselines.loki import Loki, loki_bases
from kv_integration.baselines.pyramidkv import PyramidKV
from kv_integration.baselines.quest import Quest
from kv_integration.baselines.snapkv import SnapKV
from kv_integration.baselines.streamingllm import StreamingLLM
from kv_integration.baselines.tova import TOVA

__all__ = [
    "D2O",
    "H2O",
    "TOVA",
    "CaM",
    "ChunkKV",
    "FullKV",
    "InfiniGen",
    "Loki",
    "PyramidKV",
    "Quest",
    "SnapKV",
    "StreamingLLM",
    "loki_bases",
]
