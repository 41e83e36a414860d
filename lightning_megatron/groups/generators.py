"""Random generators of captured computations, which take the place of torch's default generators.

The kernels of a CUDA graph read their generator at every replay. A default generator cannot be
seeded inside a capture, and a graph knows a generator only if it was registered before. Each random
stream of a captured computation therefore gets a generator of its own from a pool.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from lightning_megatron.shapes import Int

StreamName = Literal["replicated", "tensor", "expert"]
#: Integers of a key.
KEY_SIZE = 4


@dataclass(frozen=True)
class StreamPosition:
    """Position in training at which a random stream draws.

    Args:
        is_replay: Whether activations are being recomputed. Draws do not depend on it.
        run: Number of earlier runs of the layer in the microbatch; above 0 if a step calls the
            model several times.
        first_sample: Number of the microbatch's first sample in the batch of all data ranks.
        sample_stride: Distance between the numbers of neighbouring samples.
        num_samples: Samples of the microbatch; 0 if each row is a sample (samples).
    """

    step: int = 0
    microbatch: int = 0
    layer: int = 0
    is_replay: bool = False
    run: int = 0
    first_sample: int = 0
    sample_stride: int = 1
    num_samples: int = 0

    def rows_of_sample(self, num_rows: int) -> int:
        """Return the rows of each sample in a call of the model; samples follow one another."""
        is_multiple = self.num_samples > 0 and num_rows % self.num_samples == 0
        return num_rows // self.num_samples if is_multiple else 1


def default_generator(device: torch.device) -> torch.Generator:
    """Return torch's default generator of a device; without an index, of the current GPU."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


@contextmanager
def draw_from(generator: torch.Generator) -> Iterator[None]:
    """Replace the default generator by this one inside the block, also inside a capture.

    The state of ``generator`` advances, and that of the default generator does not.
    """
    default = default_generator(generator.device)
    if generator.device.type == "cuda":
        # No state is copied, because a captured kernel refers to the state itself.
        shared = default.graphsafe_get_state()
        default.graphsafe_set_state(generator)
        try:
            yield
        finally:
            default.graphsafe_set_state(shared)
        return
    outside = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(default.get_state())
        default.set_state(outside)


class GeneratorPool:
    """Generators of one captured computation, one for each random stream that it draws from.

    The code that captures a CUDA graph makes a pool of a fixed size and registers all its
    :attr:`generators` with the graph before the capture begins. A recording of single operators
    makes a pool without a size. It reads :attr:`current` when it records an operator, and runs the
    operator again inside :func:`draw_from`.

    Args:
        size: Number of generators; None creates each one when it is taken, which a capture of a
            CUDA graph does not allow. An ordinary run with such a pool determines the size that a
            capture needs, :attr:`num_taken`.
        idle: Positions of streams from which nothing is drawn, such as dropout with probability 0.
            Their generators are not among :attr:`generators`, because a graph spends time on each
            generator at every replay.
    """

    def __init__(
        self,
        device: torch.device,
        size: int | None = None,
        idle: Collection[int] = (),
        num_keys: int = 0,
    ) -> None:
        self.device = device
        #: Keys of the dropout masks.
        self.keys = MaskKeys(device, None if size is None else num_keys)
        #: The generators of all streams in order, idle ones included.
        self.of_streams = [torch.Generator(device) for _ in range(size or 0)]
        self._idle = frozenset(idle)
        #: Number of generators that are taken.
        self.num_taken = 0
        #: Generator from which operators draw now; None outside of random streams.
        self.current: torch.Generator | None = None
        self._is_fixed = size is not None

    def take(self) -> torch.Generator:
        """Return the next generator."""
        if self.num_taken == len(self.of_streams):
            if self._is_fixed:
                raise RuntimeError(
                    f"a captured computation must draw from at most the {len(self.of_streams)} "
                    "random streams of its generator pool, because a graph registers its "
                    "generators before the capture. Count the streams first, in an eager run with "
                    "a pool without a size."
                )
            self.of_streams.append(torch.Generator(self.device))
        self.num_taken += 1
        return self.of_streams[self.num_taken - 1]

    def exact(self) -> GeneratorPool:
        """Return a pool of the size that this run needed, for a capture of the same computation.

        Streams from which the run has drawn nothing are idle in the new pool.
        """
        return self.part((0, 0), (self.num_taken, self.keys.num_taken))

    def part(self, start: tuple[int, int], end: tuple[int, int]) -> GeneratorPool:
        """Return a pool for a part of the computation, as :meth:`exact` does for all of it.

        ``start`` and ``end`` are the numbers of generators and keys taken before and after the
        part.
        """
        streams = self.of_streams[start[0] : end[0]]
        idle = [number for number, generator in enumerate(streams) if _is_fresh(generator)]
        return GeneratorPool(self.device, len(streams), idle, end[1] - start[1])

    @property
    def generators(self) -> list[torch.Generator]:
        """List the generators that draw, in the order in which they are taken."""
        return [
            generator
            for number, generator in enumerate(self.of_streams)
            if number not in self._idle
        ]

    def is_idle(self, generator: torch.Generator) -> bool:
        """Return whether a generator belongs to an idle stream."""
        return any(self.of_streams[number] is generator for number in self._idle)

    @contextmanager
    def draw_from(self, generator: torch.Generator) -> Iterator[None]:
        """Draw from one of the generators inside the block; blocks may be nested."""
        outside = self.current
        self.current = generator
        try:
            with draw_from(generator):
                yield
        finally:
            self.current = outside

    @property
    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is being captured, so that no generator can be seeded."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _is_fresh(generator: torch.Generator) -> bool:
    """Return whether a generator has drawn nothing since it was seeded."""
    unused = torch.Generator(generator.device)
    unused.manual_seed(generator.initial_seed())
    return torch.equal(unused.get_state(), generator.get_state())


class MaskKeys:
    """Keys of the masks of one captured computation, in the order in which it takes them.

    Args:
        size: Number of keys; None creates each one when it is taken, which a capture of a CUDA
            graph does not allow (keys).
    """

    def __init__(self, device: torch.device, size: int | None = None) -> None:
        self._device = device
        #: Number of keys that are taken.
        self.num_taken = 0
        self._table = None
        if size and device.type != "cpu":
            self._table = torch.zeros(size, KEY_SIZE, dtype=torch.int64, device=device)
        #: Memory of keys on the CPU. It is written without operators, which a recording of
        #: operators would repeat.
        self._host: list[array[int]] = []

    def take(self, values: Sequence[int] | None) -> Int[torch.Tensor, "4"]:
        """Return the next key; without values, :meth:`write` sets them before a replay."""
        self.num_taken += 1
        if self._device.type == "cpu":
            self._host.append(array("q", values or [0] * KEY_SIZE))
            return torch.frombuffer(self._host[-1], dtype=torch.int64)
        if values is not None:
            # On the CPU, as outside of recordings: a recomputation compares the places of tensors.
            return torch.tensor(values, dtype=torch.int64)
        assert self._table is not None, "keys of a capture are counted in an eager run before it"
        return self._table[self.num_taken - 1]

    def write(self, keys: Sequence[Sequence[int]]) -> None:
        """Set the values of all keys, in the order in which they were taken, before a replay."""
        for memory, values in zip(self._host, keys, strict=False):
            for index, value in enumerate(values):
                memory[index] = value
        if self._table is not None:
            # The allocator of pinned memory reuses it only after the copy.
            pinned = torch.tensor(keys, dtype=torch.int64).pin_memory()
            self._table[: len(keys)].copy_(pinned, non_blocking=True)
