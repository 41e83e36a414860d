"""What an eager pass through plain code shows before its capture."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_megatron.graphs.chunk_parts import ChunkCall, ChunkPart
from lightning_megatron.graphs.interception import Interception, intercepted
from lightning_megatron.graphs.items import CaptureTools
from lightning_megatron.graphs.values import FlatValues, flatten, without_values
from lightning_megatron.groups.generators import GeneratorPool
from lightning_megatron.groups.random import RandomStreams


@dataclass
class _Mark:
    """Intercepted call of the pass.

    Args:
        place: The call.
        before: Random generators and keys of masks that were taken before the call.
        after: The same after it.
    """

    place: Interception
    before: tuple[int, int]
    after: tuple[int, int] = (0, 0)


@dataclass
class Observation:
    """Random draws and calls of a part, observed in an eager pass.

    Args:
        buckets: Parameters of each bucket that several ranks reduce or gather.
    """

    part: ChunkPart
    random: RandomStreams
    buckets: Sequence[Collection[nn.Parameter]] = ()
    _pool: GeneratorPool | None = None
    _marks: list[_Mark] = field(default_factory=list)
    _results: dict[Hashable, list[FlatValues]] = field(default_factory=dict)
    _runs_foreign: bool = False

    def observe(self, values: Any, key: Hashable) -> Any:
        """Run the part eagerly, and return its result.

        Args:
            values: Its inputs.
            key: Key of the call of the chunk.
        """
        pool = GeneratorPool(self.random.device)
        marks: list[_Mark] = []
        results: list[FlatValues] = []

        def on_call(place: Interception, original: Any, /, *args: Any, **kwargs: Any) -> Any:
            mark = _Mark(place, (pool.num_taken, pool.keys.num_taken))
            marks.append(mark)
            result = original(*args, **kwargs)
            mark.after = (pool.num_taken, pool.keys.num_taken)
            if place.reason is not None:
                results.append(without_values(flatten(result)))
            return result

        with self.random.recording(pool), intercepted(self.part.interceptions, on_call):
            outputs = self.part.run(values)
        self._pool = pool
        self._marks = marks
        self._results[key] = results
        if _runs_foreign(flatten(outputs).tensors, flatten(values).tensors):
            self._runs_foreign = True
        return outputs

    @property
    def keeps_inputs(self) -> bool:
        """Return whether the backward pass reads nothing of the forward pass but the inputs of
        layers.
        """
        return self.part.keeps_inputs and not self._runs_foreign

    def knows(self, key: Hashable) -> bool:
        """Return whether the results of the calls that no graph holds are known for a key."""
        has_calls = any(mark.place.reason is not None for mark in self._marks)
        return not has_calls or key in self._results

    def results_of(self, key: Hashable) -> Sequence[FlatValues]:
        """Return the results of the calls that no graph holds, in order, as tensors on meta."""
        return self._results.get(key, ())

    def begins(self) -> frozenset[int]:
        """Return the numbers of the calls at which a graph begins, because a bucket begins.

        A backward pass runs the calls in reverse order, and the reduction of a bucket can start
        when the graph with its last gradient has ended. So a graph must begin, in forward order, at
        the first call that reads a parameter of the bucket. The first forward pass waits for a
        gathered bucket there, too.
        """
        first_read: dict[int, int] = {}
        for number, mark in enumerate(self._marks):
            for parameter in mark.place.parameters:
                first_read.setdefault(id(parameter), number)
        begins = set[int]()
        for bucket in self.buckets:
            reads = [first_read[id(part)] for part in bucket if id(part) in first_read]
            if reads:
                begins.add(min(reads))
        return frozenset(begins - {0})

    def graph_needs(self) -> list[GraphNeeds]:
        """Return what each forward graph draws and reads, in order."""
        assert self._pool is not None, "a pass was observed"
        begins = self.begins()
        graphs = [GraphNeeds((0, 0))]
        for number, mark in enumerate(self._marks):
            if mark.place.reason is not None or number in begins:
                graphs[-1].end = mark.before
                is_held = mark.place.reason is None
                graphs.append(GraphNeeds(mark.before if is_held else mark.after))
            if mark.place.reason is None:
                graphs[-1].parameters += mark.place.parameters
        graphs[-1].end = (self._pool.num_taken, self._pool.keys.num_taken)
        return graphs

    def generators(self, needs: GraphNeeds) -> GeneratorPool:
        """Return new generators for the capture of a graph."""
        assert self._pool is not None, "a pass was observed"
        return self._pool.part(needs.start, needs.end)


@dataclass
class GraphNeeds:
    """Random generators and keys that one forward graph takes, and parameters that it reads.

    Args:
        start: Generators and keys that were taken before it.
        end: The same after it.
        parameters: Parameters of the calls that it holds.
    """

    start: tuple[int, int]
    end: tuple[int, int] = (0, 0)
    parameters: tuple[nn.Parameter, ...] = ()

    @property
    def num_draws(self) -> int:
        """Return the number of generators."""
        return self.end[0] - self.start[0]

    @property
    def num_keys(self) -> int:
        """Return the number of keys of masks."""
        return self.end[1] - self.start[1]


class ChunkObserver:
    """Observer of eager passes through a chunk's parts, before their capture."""

    def __init__(self, parts: Sequence[ChunkPart], tools: CaptureTools) -> None:
        self.parts = parts
        self._num_passes = 0
        # The tensors are kept, because another tensor could get the address of a tensor that is
        # not.
        self._fixed: dict[int, Tensor] = {}
        #: What the passes have shown of each part.
        self.observations = [Observation(part, tools.random, tools.buckets) for part in parts]

    def run(self, chunk_call: ChunkCall, key: Hashable) -> Any:
        """Run the chunk eagerly; equal to the chunk without graphs.

        Args:
            chunk_call: Inputs of the chunk.
            key: Key of the call.
        """
        tensors = flatten(tuple(chunk_call.by_name().values())).tensors
        by_address = {tensor.data_ptr(): tensor for tensor in tensors}
        earlier = self._fixed if self._num_passes else by_address
        self._fixed = {address: earlier[address] for address in earlier if address in by_address}
        self._num_passes += 1
        return chunk_call.run(
            self.parts, lambda number, values: self.observations[number].observe(values, key)
        )

    @property
    def has_observed(self) -> bool:
        """Return whether a pass has run, so that the draws are known."""
        return self._num_passes > 0

    def knows(self, key: Hashable) -> bool:
        """Return whether the results of all calls that no graph holds are known for a key."""
        return all(observation.knows(key) for observation in self.observations)

    @property
    def constants(self) -> frozenset[int]:
        """Return the addresses of inputs that had the same address in all passes."""
        return frozenset(self._fixed if self._num_passes > 1 else ())


#: Modules whose functions keep tensors only by ``save_for_backward``, beside parameters and tensors
#: that keep their addresses.
_KNOWN = (
    "lightning_megatron.experts",
    "lightning_megatron.groups.collectives",
    "lightning_megatron.groups.in_flight",
    "lightning_megatron.kernels.triton",
    "lightning_megatron.layers.fused.dropout",
    "lightning_megatron.layers.parameters.parameter_stack",
    "lightning_megatron.layers.linear.regions",
    "torch.utils.checkpoint",
)


def _runs_foreign(results: Iterable[Tensor], inputs: Iterable[Tensor]) -> bool:
    """Return whether the backward pass between results and inputs runs an unknown Python function.

    Such a function may keep a tensor as an attribute of its context. A recomputation does not
    replace it, so that the backward pass reads it from the first forward pass.

    Args:
        results: Results of a forward pass.
    """
    nodes = [result.grad_fn for result in results]
    visited = {tensor.grad_fn for tensor in inputs}
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        function = getattr(node, "_forward_cls", None)
        if function is not None and not function.__module__.startswith(_KNOWN):
            return True
        nodes += [following for following, _ in node.next_functions]
    return False
