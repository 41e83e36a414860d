"""Random streams whose draws depend on what is computed, not on the rank or the order."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.generators import (
    GeneratorPool,
    StreamName,
    StreamPosition,
    default_generator,
)
from lightning_megatron.groups.recorded_draws import (
    Draw,
    DrawRecorder,
    MaskDraw,
    Move,
    MoveKind,
    RecordedDraws,
)
from lightning_megatron.shapes import Int

#: State of a default generator, or the generator that takes its place in a captured computation.
_State = torch.Tensor | torch.Generator
#: Position of the streams, with the states and counts of the draws since the last move.
_Place = tuple[Any, ...]


def derive_seed(*parts: int | str) -> int:
    """Hash integers and words into a 63-bit seed.

    Distinct tuples give unrelated seeds. Sums of small multiples of ranks, in contrast, can
    collide.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class RandomStreams:
    """Random streams, equal on the ranks that need equal draws and different on all others.

    * ``replicated``: equal on all tensor-parallel ranks (dropout on replicated activations).
    * ``tensor``: different on every tensor-parallel rank (dropout inside a tensor-parallel region).
    * ``expert``: different on every expert-parallel and expert-tensor-parallel rank.

    All of them differ between data-parallel ranks, through the microbatch index, and between
    context-parallel ranks. The draws of a stream are a function of (seed, stream, coordinates,
    step, microbatch, layer, run of the layer, draws so far in that run). They do not depend on the
    order of microbatches in a pipeline, on the stage of a layer, or on activation recomputation.

    The keys of dropout masks (:meth:`mask_key`) are equal on all ranks. Masks are functions of a
    key and of the numbers of an element in the whole batch, so no layout changes them.

    Source: Shoeybi et al. 2019, appendix B.2.
    """

    def __init__(
        self,
        seed: int,
        *,
        tp: int = 0,
        cp: int = 0,
        ep: int = 0,
        etp: int = 0,
        device: str | torch.device = "cpu",
    ):
        self.seed = seed
        self.device = torch.device(device)
        self.position = StreamPosition()
        self._coordinates: dict[StreamName, tuple[int, ...]] = {
            "replicated": (cp,),
            "tensor": (cp, tp),
            "expert": (cp, ep, etp),
        }
        self._states: dict[tuple[StreamName, str], _State] = {}
        #: Whether the ranks of dp take the samples of a batch in turn, as a DistributedSampler
        #: deals them; otherwise each rank takes adjacent ones.
        self.deals_in_turn = False
        self._masks: Counter[str] = Counter()
        self._runs: Counter[int] = Counter()
        self._repeats: Counter[int] = Counter()
        self._recorder: DrawRecorder | None = None

    def begin_microbatch(
        self, step: int, microbatch: int, samples: tuple[int, int, int] = (0, 1, 0)
    ) -> None:
        """Move every stream to the start of a microbatch.

        Args:
            step: Number of the batch in the training run (batches).
            microbatch: Index of the microbatch within the step, unique over the data-parallel ranks
                (microbatches).
            samples: Number of the microbatch's first sample in the batch of all data ranks, the
                distance between the numbers of neighbouring samples, and the number of samples; 0
                samples mean that each row of a call is a sample.
        """
        self._runs.clear()
        self._repeats.clear()
        first, stride, count = samples
        self._move_to(
            StreamPosition(
                step, microbatch, first_sample=first, sample_stride=stride, num_samples=count
            )
        )
        if self._recorder is not None:
            self._recorder.move("begin", self.position, in_backward=False)

    def samples_of(
        self, part: range, num_samples: int, rank: int, size: int
    ) -> tuple[int, int, int]:
        """Return the samples of a part of a rank's batch, for :meth:`begin_microbatch`.

        ``rank`` counts among the ``size`` ranks that read different data.
        """
        if self.deals_in_turn:
            return rank + size * part.start, size, len(part)
        return rank * num_samples + part.start, 1, len(part)

    def seek(self, layer: int, position: StreamPosition | None = None) -> StreamPosition:
        """Move every stream to the start of ``layer`` and return that position.

        Args:
            position: Source of step, microbatch and run; None means the current position.
                Recomputation passes the position of the layer's first run, because other
                microbatches have run since. Without a position, and outside of a replay, a new run
                of the layer begins.
        """
        # torch's activation checkpointing runs a layer again inside a backward pass.
        in_backward = torch._C._current_graph_task_id() != -1
        if position is None:
            self._enter(layer, in_backward)
        else:
            self._move_to(replace(position, layer=layer))
        if self._recorder is not None:
            kind: MoveKind = "enter"
            if position is not None:
                kind = "replay" if position.is_replay else "return"
            self._recorder.move(kind, self.position, in_backward)
        return self.position

    def _enter(self, layer: int, in_backward: bool) -> None:
        base = self.position
        run = base.run if base.is_replay else self._next_run(layer, in_backward)
        self._move_to(replace(base, layer=layer, run=run))

    def _move_to(self, position: StreamPosition) -> None:
        self.position = position
        self._states.clear()
        self._masks.clear()

    def _next_run(self, layer: int, in_backward: bool) -> int:
        """Count a run of a layer, and return its index."""
        if not in_backward:
            self._runs[layer] += 1
            return self._runs[layer] - 1
        # A backward pass recomputes the latest run first.
        self._repeats[layer] += 1
        return max(self._runs[layer] - self._repeats[layer], 0)

    @contextmanager
    def fork(self, name: StreamName, purpose: str = "") -> Iterator[None]:
        """Draw from the stream ``name`` inside the block, then restore the default generators.

        Args:
            purpose: Name of an independent substream of this stream, whose draws do not advance the
                other substreams.
        """
        if name not in self._coordinates:
            raise ValueError(
                f"a random stream must be one of {', '.join(self._coordinates)}: {name!r}."
            )
        if self._recorder is not None:
            with self._recorded_fork(self._recorder, name, purpose):
                yield
            return
        outside = self._get_state()
        try:
            if (name, purpose) in self._states:
                self._set_state(_tensor(self._states[name, purpose]))
            else:
                self._seed_default_generator(self._seed_of(name, purpose))
            yield
            self._states[name, purpose] = self._get_state()
        finally:
            self._set_state(outside)

    def mask_key(self, purpose: str, num_rows: int) -> Int[torch.Tensor, "4"]:
        """Return the key of the next dropout mask in this layer.

        The key consists of a seed, the number of the first row's sample, the distance between the
        numbers of neighbouring samples, and the rows of each sample. It lies on the CPU, or in
        memory of the device that each replay of a captured computation reads.
        """
        draw = MaskDraw(purpose, num_rows)
        values = self._next_mask(draw)
        if self._recorder is not None:
            return self._recorder.mask_key(draw, values)
        return torch.tensor(values, dtype=torch.int64)

    @contextmanager
    def fork_default(self) -> Iterator[None]:
        """Seed torch's default generators by the microbatch alone, inside the block only.

        Draws of the step itself, such as those that choose masked tokens, are then equal on all
        pipeline stages.
        """
        if self._recorder is not None:
            with self._recorded_default(self._recorder):
                yield
            return
        outside_cpu = torch.default_generator.get_state()
        outside = self._get_state()
        try:
            seed = self._default_seed()
            torch.default_generator.manual_seed(seed)
            self._seed_default_generator(seed)
            yield
        finally:
            torch.default_generator.set_state(outside_cpu)
            self._set_state(outside)

    @contextmanager
    def recording(self, pool: GeneratorPool) -> Iterator[DrawRecorder]:
        """Let each stream draw from its own generator inside the block, and record the draws.

        A CUDA graph is captured once and replayed often, and its replays run no Python. Before each
        replay :meth:`seed_generators` seeds them by the position of that replay, as :meth:`fork`
        would seed the default generator. The draws are then bitwise those of the same computation
        without a graph.

        The streams move inside the block as they would without it. :meth:`preserve_position`
        restores them after one or several recordings.

        Args:
            pool: Generators of this computation, one for each stream at each position. Inside a
                capture of a CUDA graph they are not seeded, because a capture draws nothing.
                Elsewhere the block draws the numbers that it would draw without a recording.
        """
        if self._recorder is not None:
            raise RuntimeError(
                "recordings of random draws must not be nested, because a draw would belong to two "
                "captured computations. End the first recording before the next one starts."
            )
        self._recorder = DrawRecorder(pool, self.position)
        try:
            yield self._recorder
        finally:
            self._recorder = None

    def seed_generators(
        self, recorded: RecordedDraws, position: StreamPosition | None = None
    ) -> StreamPosition:
        """Prepare the generators of a recorded computation for its next replay.

        The streams move as the computation would move them, so that code after the replay draws the
        same numbers as without a graph.

        Args:
            position: Step and microbatch of the replay; None means the current ones. A backward
                pass that recomputes activations needs the position that this method returned for
                the forward pass.

        Returns:
            The position to pass for the backward pass of the same computation.
        """
        if self._recorder is not None or (recorded.recomputes and position is None):
            raise RuntimeError(
                "generators must be seeded outside of recordings, and those of recomputed "
                "activations by the position of their forward pass: seed_generators() got position "
                f"{position} while the streams are "
                f"{'recorded' if self._recorder is not None else 'not recorded'}. Other "
                "microbatches may have run since. Pass what it returned for the forward pass."
            )
        origin = position or self.position
        interrupted = self.position
        earlier_runs = 0
        keys = []
        for move in recorded.moves:
            self._repeat(move, origin, interrupted)
            if move.kind in ("stay", "enter"):
                earlier_runs = self.position.run - move.position.run
            for draw in move.draws:
                self._seed_generator(draw)
            keys += [self._next_mask(mask) for mask in move.masks]
        if recorded.keys is not None:
            recorded.keys.write(keys)
        return replace(origin, run=earlier_runs)

    @contextmanager
    def preserve_position(self) -> Iterator[None]:
        """Restore the current position when the block ends, and discard the draws of the block."""
        before = self.exchange(None)
        try:
            yield
        finally:
            self.exchange(before)

    def exchange(self, other: _Place | None) -> _Place:
        """Continue from another place, and return the present one; None continues from a copy."""
        here = (self.position, self._states, self._runs, self._repeats, self._masks)
        position, *counts = other or here
        if other is None:
            counts = [one.copy() for one in counts]
        self.position = position
        self._states, self._runs, self._repeats, self._masks = counts
        return here

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and the position, with which a resumed run continues the streams."""
        return {"seed": self.seed, "position": asdict(self.position)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the streams of a checkpoint; the coordinates remain those of this rank."""
        self.seed = int(state["seed"])
        position = StreamPosition(**state["position"])
        self.seek(position.layer, position)

    @contextmanager
    def _recorded_fork(
        self, recorder: DrawRecorder, name: StreamName, purpose: str
    ) -> Iterator[None]:
        generator, is_new = recorder.generator_of(name, purpose)
        if is_new and not recorder.pool.is_capturing:
            self._seed_generator(Draw(name, purpose, generator))
        with recorder.pool.draw_from(generator):
            yield
        self._states[name, purpose] = generator

    @contextmanager
    def _recorded_default(self, recorder: DrawRecorder) -> Iterator[None]:
        seed = self._default_seed()
        generator = recorder.new_generator("default")
        if not recorder.pool.is_capturing:
            generator.manual_seed(seed)
        outside_cpu = torch.default_generator.get_state()
        try:
            torch.default_generator.manual_seed(seed)
            seeded = torch.default_generator.get_state()
            with recorder.pool.draw_from(generator):
                yield
            if recorder.pool.is_capturing:
                _check_not_drawn(seeded)
        finally:
            torch.default_generator.set_state(outside_cpu)

    def _repeat(self, move: Move, origin: StreamPosition, interrupted: StreamPosition) -> None:
        position = move.position
        place = replace(position if move.is_own else origin, step=origin.step)
        if move.kind == "begin":
            samples = place.first_sample, place.sample_stride, place.num_samples
            self.begin_microbatch(place.step, place.microbatch, samples)
        elif move.kind == "enter":
            self._enter(position.layer, move.in_backward)
        elif move.kind == "replay":
            # The forward pass may have been a later run of the layer than the captured one.
            run = position.run + origin.run
            self._move_to(replace(place, layer=position.layer, is_replay=True, run=run))
        elif move.kind == "return":
            before = replace(position, step=origin.step) if move.is_own else interrupted
            self._move_to(before)

    def _seed_generator(self, draw: Draw) -> None:
        """Set a generator to the state in which the default generator would draw now."""
        if draw.stream == "default":
            draw.generator.manual_seed(self._default_seed())
            return
        key = (draw.stream, draw.purpose)
        if key in self._states:
            draw.generator.set_state(_tensor(self._states[key]))
        else:
            draw.generator.manual_seed(self._seed_of(draw.stream, draw.purpose))
        self._states[key] = draw.generator

    def _next_mask(self, draw: MaskDraw) -> tuple[int, int, int, int]:
        """Count a dropout mask, and return the values of its key."""
        here = self.position
        number = self._masks[draw.purpose]
        self._masks[draw.purpose] += 1
        seed = derive_seed(self.seed, "mask", draw.purpose, here.step, here.layer, here.run, number)
        rows = here.rows_of_sample(draw.num_rows)
        return seed, here.first_sample, here.sample_stride, rows

    def _default_seed(self) -> int:
        return derive_seed(self.seed, "default", self.position.step, self.position.microbatch)

    def _seed_of(self, name: StreamName, purpose: str = "") -> int:
        here = self.position
        # The first run and a stream without a purpose add no words to the seed, so that programs
        # without these features keep their random numbers.
        words = (purpose,) if purpose else ()
        run = (here.run,) if here.run else ()
        return derive_seed(
            self.seed,
            name,
            *words,
            *self._coordinates[name],
            here.step,
            here.microbatch,
            here.layer,
            *run,
        )

    def _seed_default_generator(self, seed: int) -> None:
        default_generator(self.device).manual_seed(seed)

    def _get_state(self) -> torch.Tensor:
        return default_generator(self.device).get_state()

    def _set_state(self, state: torch.Tensor) -> None:
        default_generator(self.device).set_state(state)


def _check_not_drawn(seeded: torch.Tensor) -> None:
    """Refuse draws of a captured step from torch's generator of the CPU."""
    if not torch.equal(torch.default_generator.get_state(), seeded):
        raise UnsupportedError(
            "a captured step must not draw random numbers on the host: the step used torch's CPU "
            "generator. A replay runs no Python, so it would repeat the numbers of the capture. "
            "Draw on the device, as in torch.rand(..., device=self.device), or in the dataset."
        )


def _tensor(state: _State) -> torch.Tensor:
    return state if isinstance(state, torch.Tensor) else state.get_state()
