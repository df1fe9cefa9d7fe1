"""Training of SeKV's router: surprisal spans, a full-KV teacher, mixed-resolution students."""

from kv_integration.router_training.log import plot
from kv_integration.router_training.loop import DivergedError, train_router
from kv_integration.router_training.settings import Training
from kv_integration.router_training.texts import TextTooShortError

__all__ = ["DivergedError", "TextTooShortError", "Training", "plot", "train_router"]
