"""Parts of a chunk that are captured one by one, and what their first eager passes show."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from lightning_megatron.graphs.interception import Interception, interceptions_of
from lightning_megatron.graphs.observation import Observation
from lightning_megatron.graphs.report import runs_of
from lightning_megatron.graphs.values import flatten
from lightning_megatron.groups.random import RandomStreams
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

    def keeps_inputs(index: int) -> bool:
        return is_recomputed(model.layers[str(index)]) and f"layers.{index}" not in eager

    groups = [
        (keeps, tuple(group))
        for keeps, group in groupby(model.layers_of_chunk(chunk), keeps_inputs)
    ]
    # The embedding and the head are with layers that keep more.
    if model.is_first_stage(chunk) and (not groups or groups[0][0]):
        groups.insert(0, (False, ()))
    if model.is_last_stage(chunk) and (not groups or groups[-1][0]):
        groups.append((False, ()))
    parts = []
    for number, (keeps, layers) in enumerate(groups):
        has_embedding = number == 0 and model.is_first_stage(chunk)
        has_head = number == len(groups) - 1 and model.is_last_stage(chunk)
        own = tuple(place for place in places if _belongs(place, layers, has_embedding, has_head))
        outside = {*eager, *(place.name for place in places if place not in own)}
        label = ", ".join(runs_of(names, outside))
        parts.append(ChunkPart(model, layers, has_embedding, has_head, keeps, label, own))
    return parts


def _belongs(
    place: Interception, layers: Sequence[int], has_embedding: bool, has_head: bool
) -> bool:
    kind, _, rest = place.name.partition(".")
    if kind == "layers":
        return int(rest.partition(".")[0]) in layers
    return has_embedding if kind == "embedding" else has_head


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


class ChunkObserver:
    """Observer of eager passes through a chunk's parts, before their capture.

    Args:
        buckets: Parameters of each bucket that several ranks reduce or gather.
    """

    def __init__(
        self,
        parts: Sequence[ChunkPart],
        random: RandomStreams,
        buckets: Sequence[Collection[nn.Parameter]],
    ) -> None:
        self.parts = parts
        self._num_passes = 0
        # The tensors are kept, because another tensor could get the address of a tensor that is
        # not.
        self._fixed: dict[int, Tensor] = {}
        #: What the passes have shown of each part.
        self.observations = [Observation(random, buckets) for _ in parts]

    def run(self, chunk_call: ChunkCall, key: Hashable) -> Any:
        """Run the chunk eagerly; equal to the chunk without graphs.

        Args:
            chunk_call: Inputs of the chunk.
            key: Key of the call.
        """
        tensors = flatten(tuple(chunk_call.by_name().values())).tensors
        by_address = {tensor.data_ptr(): tensor for tensor in tensors}
        if self._num_passes == 0:
            self._fixed = by_address
        self._fixed = {
            address: tensor for address, tensor in self._fixed.items() if address in by_address
        }
        self._num_passes += 1

        def observe(number: int, values: Any) -> Any:
            part = self.parts[number]
            return self.observations[number].observe(part.run, values, part.interceptions, key)

        return chunk_call.run(self.parts, observe)

    @property
    def has_observed(self) -> bool:
        """Return whether a pass has run, so that the draws are known."""
        return self._num_passes > 0

    def knows(self, key: Hashable) -> bool:
        """Return whether the results of all calls that no graph holds are known for a key."""
        return all(observation.knows(key) for observation in self.observations)

    @property
    def keeping_inputs(self) -> list[int]:
        """Return the numbers of the parts whose backward passes read nothing of the forward passes
        but the inputs of layers.
        """
        pairs = enumerate(zip(self.parts, self.observations, strict=True))
        return [
            number
            for number, (part, observation) in pairs
            if part.keeps_inputs and observation.keeps_inputs
        ]

    @property
    def constants(self) -> frozenset[int]:
        """Return the addresses of inputs that had the same address in all passes."""
        return frozenset(self._fixed if self._num_passes > 1 else ())
