"""What the next layer would ask for this layer's input: for methods that fetch ahead of time.

The inputs of one layer's attention and of the next one's are much alike, since a layer adds little
to the residual stream (InfiniGen, section 4.2). So the next layer's attention module is given this
layer's input and stopped short of attending: its projections, norms and RoPE make the query.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kv_integration.cache import KVCache
from kv_integration.layer import CompressedLayer


class Lookahead:
    """Asks the attention module `following`, before the one ahead of it runs."""

    def __init__(self, following: nn.Module) -> None:
        self.following = following

    def __call__(self, cache: KVCache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Arguments are those of the module ahead, whose layer of `cache` is compressed."""
        after = cache.layers[int(self.following.layer_idx)]  # type: ignore[arg-type]
        # Layers of two kinds may rotate by unlike angles, and only a decoding step is looked for.
        if not isinstance(after, CompressedLayer):
            return
        state = after.state
        if state is None or not state.looks_ahead or cache.tokens - after.seen != 1:
            return
        without = [None if x is cache else x for x in args]
        named = {name: None if x is cache else x for name, x in kwargs.items()}
        try:
            self.following.forward(*without, **{**named, "kv_layer": Probe()})
        except Asked as asked:
            state.expect(asked.queries, scale=asked.scale)


class Asked(Exception):
    """Ends a forward pass that has come to its queries: what it would do after is not wanted."""

    def __init__(self, queries: Tensor, scale: float) -> None:
        super().__init__("a layer was asked for its queries")
        self.queries, self.scale = queries, scale


class Probe:
    """Stands in for a cache's layer, and stops the module that would have it attend."""

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, **unused: object
    ) -> Tensor:
        """Raises `Asked`."""
        raise Asked(queries, scale)
