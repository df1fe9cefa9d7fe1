"""RoPE as a model's layers do it: how each turns its keys, and the tables of the tokens seen."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from kv_integration.buffer import KVBuffer
from kv_integration.storable import storable
from kv_lowrank import rotate

Form: TypeAlias = Literal["half", "interleaved"]
GIVEN = "position_embeddings"  # what transformers calls (cos, sin) among a module's arguments


@storable
class Rotation(NamedTuple):
    """Which channels form a pair, and how the columns of cos and sin name the frequencies.

    Both as in `kv_lowrank.rotate`.
    """

    layout: Form
    table: Form


# In the order of how many families do it: Llama; Cohere; GLM.
KNOWN = (
    Rotation("half", "half"),
    Rotation("interleaved", "interleaved"),
    Rotation("interleaved", "half"),
    Rotation("half", "interleaved"),
)


class Turn(NamedTuple):
    """What one attention module was given: cos, sin [1 or B, Q, R], and what it does with them.

    given: cos as the model made it, before it was moved between devices.
    """

    given: weakref.ref[Tensor]
    cos: Tensor
    sin: Tensor
    rotation: Rotation


def takes_tables(module: nn.Module) -> bool:
    """Whether an attention module is given cos and sin."""
    return GIVEN in inspect.signature(module.forward).parameters


def turn_of(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    cache: object,
    known: dict[int, Rotation | None],
) -> Turn | None:
    """How an attention module is about to turn its keys; None if it does not.

    args, kwargs: what it is called with, `cache` among them. known: rotations by the layer's index;
    what is not yet there is found out and added.
    """
    tables = kwargs.get(GIVEN)
    if tables is None:
        return None
    if not (isinstance(tables, tuple) and len(tables) == 2):
        raise ValueError(
            f"{type(module).__name__} is given {type(tables).__name__} for {GIVEN}, wanted "
            "(cos, sin): keys cannot be taken back to before their RoPE"
        )
    index = int(module.layer_idx)  # type: ignore[arg-type]
    if index not in known:
        known[index] = rotation_of(module, args, kwargs, cache)
    rotation = known[index]
    return None if rotation is None else Turn(weakref.ref(tables[0]), *tables, rotation)


class _Keys(Exception):
    """Carries the keys that a module was about to store."""


class _Catch:
    """Stands in for a cache: takes the keys and ends the call."""

    def update(self, keys: Tensor, *args: object, **kwargs: object) -> None:
        raise _Keys(keys)


@torch.no_grad()
def rotation_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], cache: object
) -> Rotation | None:
    """How `module` turns its keys, found by trying it on random tokens and tables.

    The module runs up to where it stores its keys, once with tables that turn nothing and then
    with random ones, until a known way to turn the first keys gives the second. What a family's
    code looks like does not matter.

    Raises:
        ValueError: no known way does.
    """
    cos = kwargs[GIVEN][0]
    draw = torch.Generator().manual_seed(0)
    hidden = args[0] if args else kwargs["hidden_states"]
    tokens = torch.randn(1, 4, hidden.shape[-1], generator=draw).to(hidden)
    angles = 6.0 * torch.rand(1, 4, cos.shape[-1] // 2, generator=draw)

    def replaced(x: Any) -> Any:
        return tokens if x is hidden else _Catch() if x is cache else x

    def keys(cosine: Tensor, sine: Tensor) -> Tensor:
        given = {name: replaced(x) for name, x in kwargs.items()}
        given[GIVEN] = (cosine, sine)
        try:
            module.forward(*(replaced(x) for x in args), **given)
        except _Keys as caught:
            caught_keys: Tensor = caught.args[0]
            return caught_keys.float()
        raise ValueError(f"{type(module).__name__} stores no keys in its cache")

    def tables(way: Form) -> tuple[Tensor, Tensor]:
        return spread(angles.cos(), way).to(cos), spread(angles.sin(), way).to(cos)

    still = torch.ones_like(tables("half")[0])
    plain = keys(still, torch.zeros_like(still))
    for way in KNOWN:
        turned = keys(*tables(way.table))
        if _near(turned, plain):
            return None
        if _near(turned, rotate(plain, *tables(way.table), layout=way.layout, table=way.table)):
            return way
    raise ValueError(
        f"{type(module).__name__} does not turn its keys in a known way of RoPE: keys cannot be "
        "taken back to before it"
    )


def spread(pairs: Tensor, table: Form) -> Tensor:
    """One column per pair [..., R / 2] as a table [..., R] of that kind."""
    if table == "interleaved":
        return pairs.repeat_interleave(2, dim=-1)
    return torch.cat([pairs, pairs], dim=-1)


def _gone() -> None:
    """A reference to a tensor that is no more."""


def _near(x: Tensor, y: Tensor) -> bool:
    """Equal but for the rounding of a half type; another way to turn is off by about the norm."""
    return bool((x - y).norm() <= 0.05 * y.norm())


@storable
class RopeTables:
    """cos and sin [B, N, R] of every row's tokens, padding left out; entry n is a row's token n.

    Layers that were given the same tables share them. They are held in the form that belongs to
    `layout`, as `kv_attn_triton.lowrank_attention` reads them, whatever form the model has.

    grows: whether tokens after the prompt are wanted, too. seen: tokens of the batch so far,
    padding included.
    """

    def __init__(self, turn: Turn, device: torch.device, *, grows: bool) -> None:
        self.given: Callable[[], Tensor | None] = turn.given
        self.device, self.rotation = device, turn.rotation
        self.grows = grows
        self.seen = 0
        self._held: KVBuffer | None = None

    def stored_fields(self) -> dict[str, Any]:
        """For a file: the tensor that the model made is gone when it is read."""
        own = {name: getattr(self, name) for name in ("rotation", "grows", "seen")}
        return own | {"held": self._buffer}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> RopeTables:
        """As `stored_fields` gave them."""
        held, own = fields["held"], {name: x for name, x in fields.items() if name != "held"}
        tables = cls.__new__(cls)
        vars(tables).update(own, _held=held, device=held.keys.device, given=_gone)
        return tables

    @property
    def interleaved(self) -> bool:
        """Whether channels 2i and 2i + 1 form a pair."""
        return self.rotation.layout == "interleaved"

    @property
    def cos(self) -> Tensor:
        """[B, N, R]"""
        return self._buffer.keys[:, 0, : self._buffer.count]

    @property
    def sin(self) -> Tensor:
        """[B, N, R]"""
        return self._buffer.values[:, 0, : self._buffer.count]

    @property
    def _buffer(self) -> KVBuffer:
        if self._held is None:
            raise RuntimeError("RopeTables is read before its first tokens came")
        return self._held

    def shared_by(self, turn: Turn, device: torch.device, seen: int) -> bool:
        """Whether a layer that is given `turn` now can use these."""
        given = self.given()  # None when it is gone: another tensor may be where it was
        same = given is not None and given is turn.given()
        return same and (self.rotation, self.device, self.seen) == (turn.rotation, device, seen)

    def append(self, cos: Tensor, sin: Tensor, valid: Tensor | None, *, batch: int) -> None:
        """Add cos, sin [1 or B, n, R] of new tokens; of row b only where `valid` [B, n] holds."""
        cos, sin = (self._formed(x).expand(batch, -1, -1)[:, None] for x in (cos, sin))
        if self._held is None and valid is None:
            self._held = KVBuffer(cos.contiguous(), sin.contiguous())
            return
        if self._held is None:
            self._held = KVBuffer.empty((batch, 1), cos, sin)
        self._held.append(cos, sin, valid)

    def row(self, index: int, tokens: slice) -> tuple[Tensor, Tensor]:
        """cos and sin [1, n, R] of these tokens of a row."""
        cos, sin = self._buffer.row(index)
        return cos[:, 0, tokens], sin[:, 0, tokens]

    def crop(self, tokens: int) -> None:
        """The last `tokens` of every row, which came after the prompt, are forgotten."""
        self.seen -= tokens
        if self.grows:
            self._buffer.crop(tokens)

    def select_rows(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        self._buffer.select_rows(rows.to(self.device))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that exist."""
        return 0 if self._held is None else self._held.nbytes

    def _formed(self, x: Tensor) -> Tensor:
        x = x.to(self.device)
        if self.rotation.layout == self.rotation.table:
            return x
        pairs = x[..., ::2] if self.rotation.table == "interleaved" else x.chunk(2, dim=-1)[0]
        return spread(pairs, self.rotation.layout)
