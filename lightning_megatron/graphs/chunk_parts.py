"""Parts of a chunk that are captured one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

from torch import Tensor

from lightning_megatron.graphs.interception import Interception, interceptions_of
from lightning_megatron.graphs.report import runs_of
from lightning_megatron.layers.recomputed_block import is_recomputed
from lightning_megatron.models.layered import LayeredModule, LayerInputs

#: Names in messages of the fields of a call.
_NAMES = {"targets": "labels", "vectors": "embeddings"}


@dataclass(frozen=True, eq=False)
class ChunkPart:
    """Neighbouring layers of a chunk, with the embedding before them or the head behind them.

    Args:
        layers: Indices of the layers in the whole model.
        has_embedding: Whether the embedding comes before them.
        has_head: Whether the head follows them.
        keeps_inputs: Whether each layer is recomputed as a whole, so that it keeps its input only.
        label: Description of what graphs hold, such as ``layers 3..4``.
        interceptions: Calls at which a graph may begin, or which no graph may hold.
    """

    model: LayeredModule
    layers: tuple[int, ...]
    has_embedding: bool
    has_head: bool
    keeps_inputs: bool
    label: str
    interceptions: tuple[Interception, ...]

    def run(self, values: Any) -> Any:
        """Run the plain code.

        Args:
            values: Hidden states, inputs of the model, inputs of each kind of layer, and the number
                of the kind of each layer.
        """
        hidden, call, kinds, numbers = values
        layers = {index: kinds[number] for index, number in zip(self.layers, numbers, strict=True)}
        return self.model.run_layers(hidden, call, layers, self.has_head)


def chunk_parts(model: LayeredModule, chunk: int, scopes: Collection[str]) -> list[ChunkPart]:
    """Return the parts of a chunk in order.

    Layers that keep only their inputs are parts of their own, whose graphs all microbatches of the
    chunk can share.

    Args:
        model: A GPT or an encoder.
        scopes: Scopes that graphs capture; ``all`` means every scope.
    """
    places = interceptions_of(model, chunk, scopes)
    names = [place.name for place in places]
    eager = [place.name for place in places if place.reason is not None]

    # The embedding and the head are with layers that keep more.
    pieces: list[int | str] = list(model.layers_of_chunk[chunk])
    if model.is_first_stage(chunk):
        pieces.insert(0, "embedding")
    if model.is_last_stage(chunk):
        pieces.append("head")

    def keeps_inputs(piece: int | str) -> bool:
        is_layer = isinstance(piece, int) and f"layers.{piece}" not in eager
        return is_layer and is_recomputed(model.layers[str(piece)])

    parts = []
    for keeps, group in groupby(pieces, keeps_inputs):
        held = list(group)
        layers = tuple(piece for piece in held if isinstance(piece, int))
        own = tuple(place for place in places if _piece_of(place) in held)
        outside = {*eager, *(place.name for place in places if place not in own)}
        label = ", ".join(runs_of(names, outside))
        parts.append(
            ChunkPart(model, layers, "embedding" in held, "head" in held, keeps, label, own)
        )
    return parts


def _piece_of(place: Interception) -> int | str:
    """Return the index of the layer to which a call belongs, ``embedding`` or ``head``."""
    kind, _, rest = place.name.partition(".")
    return int(rest.partition(".")[0]) if kind == "layers" else kind


def describe(parts: Sequence[ChunkPart]) -> list[Hashable]:
    """Return what two divisions of one chunk have in common if graphs of one fit the other."""
    described: list[Hashable] = []
    for part in parts:
        places = tuple((place.name, place.reason) for place in part.interceptions)
        described.append((part.layers, part.keeps_inputs, places))
    return described


#: Runs one part on its inputs, given its number and these.
RunPart = Callable[[int, Any], Any]


@dataclass(frozen=True, eq=False)
class ChunkCall:
    """Inputs of a chunk; see ``LayeredModule.run_layers``."""

    hidden: Tensor | None
    call: Any
    layers: Mapping[int, LayerInputs]

    def by_name(self) -> dict[str, Any]:
        """Return the inputs by the names that messages give them."""
        call = {
            _NAMES.get(item.name, item.name): getattr(self.call, item.name)
            for item in fields(self.call)
        }
        return {**call, "hidden states": self.hidden, "span": self._kinds}

    @property
    def _kinds(self) -> tuple[LayerInputs, ...]:
        """Return the different inputs of layers, which many layers share."""
        return tuple(dict.fromkeys(self.layers.values()))

    def run(self, parts: Sequence[ChunkPart], run_part: RunPart) -> Any:
        """Run all parts, and return the output of the chunk."""
        output: Any = self.hidden
        for number, part in enumerate(parts):
            given = [self.layers[index] for index in part.layers]
            kinds = tuple(dict.fromkeys(given))
            numbers = tuple(map(kinds.index, given))
            needs_call = part.has_embedding or part.has_head
            output = run_part(number, (output, self.call if needs_call else None, kinds, numbers))
        return output
