"""Cache of the keys and values of earlier tokens, to which later tokens attend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.shapes import Bool, Float, Int

#: Keys and values of a layer, heads first.
KeysAndValues = tuple[
    Float[Tensor, "batch kv_heads _ head_dim"], Float[Tensor, "batch kv_heads _ value_dim"]
]


@dataclass(frozen=True, eq=False)
class CachedTokens:
    """New tokens of a call and the cache whose tokens they follow.

    Args:
        count: Number of new tokens of each row. Later positions of the call are padding, which is
            not stored (tokens).
        visible: False for padding among the earlier and new tokens; None means no padding.
        key_places: Place in its row of each token that the layer attends to; None if no scores
            depend on distances. ``layers.attention.cached_attention`` derives it (tokens).
        padding: Number of padding tokens before each row, used instead of ``visible`` if only the
            device knows the place of the new token; None means none (tokens).
    """

    cache: KeyValueCache
    count: int
    visible: Bool[Tensor, "batch _"] | None = None
    key_places: Int[Tensor, "#batch _"] | None = None
    padding: Int[Tensor, " batch"] | None = None

    def query_places(self, seq_length: int, device: torch.device) -> Int[Tensor, " seq"]:
        """Return the place in its row of each new position.

        Padding after the tokens gets the place of the last token and attends to the same keys, so
        that no position is without keys.
        """
        first = self.cache.length
        places = torch.arange(first, first + seq_length, device=device)
        return places.clamp(max=first + self.count - 1)


class KeyValueCache:
    """Cache of the keys and values of rows of at most ``max_length`` tokens.

    Each layer gets its memory at its first use, for the key/value heads of this rank. A layer with
    a sliding window keeps only the tokens of the window, in a ring buffer. If ranks of cp share the
    rows, ``held`` contains the tokens of this rank.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        #: Place of the new token of each row, while only the device knows the place.
        self.place: Int[Tensor, "1"] | None = None
        #: Tokens of this rank if ranks share the rows.
        self.held: HeldTokens | None = None
        self._layers: dict[int, KeysAndValues] = {}

    @contextmanager
    def at(self, place: Int[Tensor, "1"]) -> Iterator[None]:
        """Take the place of the one new token of each row from the device, inside the block.

        A CUDA graph can capture the calls. ``extend`` then returns all slots, of which slot
        ``p % slots`` holds the token at place ``p``, which must be below ``max_length``.
        """
        self.place = place
        try:
            yield
        finally:
            self.place = None

    def advance(self, count: int) -> None:
        """Count new tokens of each row that all layers have stored."""
        if self.held is not None:
            self.held.advance(self.length, count)
        self.length += count

    def clear(self) -> None:
        """Discard all tokens; the memory is kept unless ranks share the rows."""
        self.length = 0
        self.held = None

    def reorder(self, rows: Int[Tensor, " _"]) -> None:
        """Replace each of the first rows by the row of the given number, for a beam search."""
        for buffers in self._layers.values():
            for buffer in buffers:
                buffer[: len(rows)] = buffer.index_select(0, rows.to(buffer.device))
        if self.held is not None:
            self.held.reorder(rows)

    def extend(
        self,
        layer: int,
        key: Float[Tensor, "_ batch kv_heads head_dim"],
        value: Float[Tensor, "_ batch kv_heads value_dim"],
        window: int | None,
    ) -> KeysAndValues:
        """Store a layer's new keys and values, and return all that the new tokens may attend to.

        A second call before the length has grown stores the same tokens again.
        """
        last = self.length + key.shape[0]
        if last > self.max_length:
            raise ParallelPlanError(
                f"rows must fit into their cache of {self.max_length} tokens: they would have "
                f"{last} tokens. The size of a cache is fixed. Use a cache with a larger "
                "max_length."
            )
        new = key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)
        if layer not in self._layers:
            slots = self._slots(window)
            keys, values = (
                tensor.new_empty(*tensor.shape[:2], slots, tensor.shape[3]) for tensor in new
            )
            self._layers[layer] = keys, values
        keys, values = self._layers[layer]
        if self.place is not None:
            self._store(key, value, keys, values, self.place)
            return keys, values
        return self._written(keys, new[0]), self._written(values, new[1])

    def stored(self, layer: int) -> KeysAndValues:
        """Return all slots of a layer that has stored tokens."""
        return self._layers[layer]

    def places(self, window: int | None, count: int, device: torch.device) -> Int[Tensor, " _"]:
        """Return the places in their rows of the tokens that ``extend`` returns for new tokens."""
        slots = self._slots(window)
        first = self.length
        if first + count <= slots:
            return torch.arange(first + count, device=device)
        if count == 1:
            # In a full ring buffer, slot s holds the latest token whose place is s modulo its size.
            return first - (first - torch.arange(slots, device=device)).remainder(slots)
        return torch.arange(max(0, first - slots), first + count, device=device)

    def _slots(self, window: int | None) -> int:
        return self.max_length if window is None else min(window, self.max_length)

    @staticmethod
    def _store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, place: Tensor) -> None:
        """Write one token of each row into the slot of its place."""
        kernels = fused_kernels(key)
        if kernels is not None:
            kernels.store_token(key, value, keys, values, place)
            return
        for buffer, new in ((keys, key), (values, value)):
            slot = place.remainder(buffer.shape[2])
            buffer.index_copy_(2, slot, new.permute(1, 2, 0, 3))

    def _written(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Write new tokens, and return the tokens that they may attend to, sorted by place."""
        slots = buffer.shape[2]
        first = self.length
        last = first + new.shape[2]
        if last <= slots:
            buffer[:, :, first:last] = new
            return buffer[:, :, :last]
        if new.shape[2] == 1:
            buffer[:, :, first % slots] = new[:, :, 0]
            return buffer
        # The new tokens overwrite earlier tokens to which the first new tokens still attend.
        earlier = torch.arange(max(0, first - slots), first, device=new.device) % slots
        whole = torch.cat((buffer[:, :, earlier], new), 2)
        kept = torch.arange(last - slots, last, device=new.device) % slots
        buffer[:, :, kept] = whole[:, :, -slots:]
        return whole


class HeldTokens:
    """This rank's part of the first tokens of shared rows, and every ``ranks``-th later token.

    ``places`` are those of this part; from the place ``count`` on it is padding.
    """

    def __init__(
        self, places: Int[Tensor, "#batch _"], count: int, ranks: int, rank: int, max_length: int
    ) -> None:
        self._num_first = places.shape[1]
        self._count = count
        self._ranks = ranks
        self._rank = rank
        later = max(0, max_length - count)
        #: Keys and values of these tokens.
        self.cache = KeyValueCache(self._num_first + -(-later // ranks))
        #: Place in its row of each token; -1 for padding, which no token attends to.
        self._places = places.masked_fill(places >= count, -1)

    def local_indices(self, first: int, count: int) -> list[int]:
        """Return the indices of the new tokens that this rank holds.

        ``first`` is the place of the first new token, after the first tokens of the rows.
        """
        behind = first - self._count
        return [index for index in range(count) if (behind + index) % self._ranks == self._rank]

    def places_with(self, first: int, count: int) -> Int[Tensor, "#batch _"]:
        """Return the places of the tokens that this rank holds after new ones; -1 for padding."""
        new = [first + index for index in self.local_indices(first, count)]
        added = torch.tensor(new, dtype=torch.long, device=self._places.device)
        return torch.cat((self._places, added.expand(len(self._places), -1)), 1)

    def advance(self, first: int, count: int) -> None:
        """Count new tokens of each row that all layers have stored, from the place ``first`` on."""
        # The first call counts the first tokens, whose places are known from the start.
        if self.cache.length == 0:
            self.cache.advance(self._num_first)
            return
        self._places = self.places_with(first, count)
        self.cache.advance(len(self.local_indices(first, count)))

    def reorder(self, rows: Int[Tensor, " _"]) -> None:
        """Replace each of the first rows, as :meth:`KeyValueCache.reorder` does."""
        self.cache.reorder(rows)
        if len(self._places) > 1:
            chosen = self._places.index_select(0, rows.to(self._places.device))
            self._places = torch.cat((chosen, self._places[len(rows) :]))
