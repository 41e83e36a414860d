"""Static and eager pieces of a chunk, and properties of them that its first eager passes show."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_megatron.graphs.foreign_functions import runs_foreign
from lightning_megatron.graphs.segments import SegmentList, split
from lightning_megatron.graphs.values import flatten
from lightning_megatron.groups.generators import GeneratorPool
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.user_code import is_compiled

#: Runs one piece on its inputs, given its number and these.
RunPiece = Callable[[int, tuple[Any, ...]], tuple[Any, ...]]


class ChunkPieces:
    """Alternating static and eager pieces of a chunk.

    Args:
        segments: Segments of the chunk.
        scopes: Scopes that graphs capture.
        cuts: Names of segments after which a static piece ends, of any chunk.
        keeps_whole: Function that returns whether a module must be called itself.
        wait_for: Function that waits until parameters are complete.
    """

    def __init__(
        self,
        segments: SegmentList,
        scopes: Collection[str],
        cuts: Collection[str] = (),
        keeps_whole: Callable[[nn.Module], bool] = is_compiled,
        wait_for: Callable[[Collection[nn.Parameter]], None] = lambda parameters: None,
    ) -> None:
        self._segments = segments
        self._wait_for = wait_for
        opened = segments.expand(keeps_whole)
        # Other chunks of the stage have the other cuts.
        own_cuts = {segment.name for segment in opened}.intersection(cuts)
        self.pieces = split(opened, scopes, own_cuts, keeps_whole)
        #: Names of all segments in order.
        self.names = tuple(segment.name for piece in self.pieces for segment in piece)
        self._parameters = [piece.parameters for piece in self.pieces]
        self._dropped = _last_reads(self.pieces, segments.outputs)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the inputs of the chunk."""
        return self._segments.inputs

    @property
    def runs(self) -> list[tuple[bool, tuple[str, ...]]]:
        """Return of each piece whether it is static, and the names of its segments."""
        return [
            (piece.is_static, tuple(segment.name for segment in piece)) for piece in self.pieces
        ]

    def names_outside(self, number: int) -> frozenset[str]:
        """Return the names of the segments of all pieces but one.

        Args:
            number: Number of the piece.
        """
        return frozenset(self.names).difference(segment.name for segment in self.pieces[number])

    def run(self, values: Sequence[Any], run_piece: RunPiece) -> tuple[Any, ...]:
        """Run all pieces, and return the outputs of the chunk.

        Args:
            values: Inputs of the chunk.
            run_piece: Function that runs one of them.
        """
        held = dict(zip(self._segments.inputs, values, strict=True))
        for number, (piece, dropped) in enumerate(zip(self.pieces, self._dropped, strict=True)):
            # Neither a replay nor an opened piece calls the modules whose hooks would wait.
            self._wait_for(self._parameters[number])
            outputs = run_piece(number, tuple([held[name] for name in piece.inputs]))
            held.update(zip(piece.outputs, outputs, strict=True))
            # A remaining reference would keep a value's memory until the end of the chunk.
            del outputs
            for name in dropped:
                del held[name]
        return tuple([held[name] for name in self._segments.outputs])


def _last_reads(pieces: Sequence[SegmentList], outputs: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return, for each piece, the names of the values that nothing reads after it."""
    needed = set(outputs)
    last_reads: list[tuple[str, ...]] = []
    for piece in reversed(pieces):
        last_reads.insert(0, tuple({*piece.inputs, *piece.outputs} - needed))
        needed |= set(piece.inputs)
    return last_reads


class ChunkObserver:
    """Observer of eager passes through a chunk's pieces, before their capture.

    Args:
        pieces: The pieces.
        random: Random streams.
    """

    def __init__(self, pieces: ChunkPieces, random: RandomStreams) -> None:
        self._pieces = pieces
        self._random = random
        self._num_passes = 0
        # The tensors are kept, because another tensor could get the address of a tensor that is
        # not.
        self._fixed: dict[int, Tensor] = {}
        #: Generators from which each static piece has drawn, by its number.
        self.draws: dict[int, GeneratorPool] = {}
        #: Numbers of the static pieces whose backward passes read nothing from the forward passes
        #: but the inputs of the segments.
        self.keeping_inputs: set[int] = set()

    def run(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Run the chunk eagerly; equal to the chunk without graphs."""
        by_address = {tensor.data_ptr(): tensor for tensor in flatten(tuple(values)).tensors}
        if self._num_passes == 0:
            self._fixed = by_address
        self._fixed = {
            address: tensor for address, tensor in self._fixed.items() if address in by_address
        }
        self._num_passes += 1
        return self._pieces.run(values, self._run)

    @property
    def has_observed(self) -> bool:
        """Return whether a pass has run, so that the draws are known."""
        return self._num_passes > 0

    @property
    def constants(self) -> frozenset[int]:
        """Return the addresses of inputs that had the same address in all passes."""
        return frozenset(self._fixed if self._num_passes > 1 else ())

    def _run(self, number: int, values: tuple[Any, ...]) -> tuple[Any, ...]:
        piece = self._pieces.pieces[number]
        if not piece.is_static:
            return piece(values)
        generators = GeneratorPool(self._random.device)
        with self._random.recording(generators):
            outputs = piece(values)
        self.draws[number] = generators
        given = flatten(values).tensors
        if piece.keeps_only_inputs and not runs_foreign(flatten(outputs).tensors, given):
            self.keeping_inputs.add(number)
        return outputs
