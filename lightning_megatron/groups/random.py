"""Random streams whose draws depend on what is computed, not on the rank or the order."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

StreamName = Literal["replicated", "tensor", "expert"]


def derive_seed(*parts: int | str) -> int:
    """Hash integers and words into a 63-bit seed.

    Distinct tuples give unrelated seeds. Sums of small multiples of ranks, in contrast, can
    collide.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class StreamPosition:
    """Position in training that a draw belongs to.

    Args:
        step: Optimizer step (steps).
        microbatch: Index of the microbatch within the step, over all data ranks (microbatches).
        layer: Index of the layer in the whole model (layers).
        is_replay: Whether activations are being recomputed. Draws do not depend on it.
        run: Number of earlier runs of the layer in the microbatch; above 0 if a step calls the
            model several times.
    """

    step: int = 0
    microbatch: int = 0
    layer: int = 0
    is_replay: bool = False
    run: int = 0


class RandomStreams:
    """Random streams, equal on the ranks that need equal draws and different on all others.

    * ``replicated``: equal on all tensor-parallel ranks (dropout on replicated activations).
    * ``tensor``: different on every tensor-parallel rank (dropout inside a tensor-parallel region).
    * ``expert``: different on every expert-parallel and expert-tensor-parallel rank.

    All of them differ between data-parallel ranks, through the microbatch index, and between
    context-parallel ranks. The draws of a stream are a function of (seed, stream, coordinates,
    step, microbatch, layer, run of the layer, draws so far in that run). They do not depend on the
    order of microbatches in a pipeline, on the stage of a layer, or on activation recomputation.

    Args:
        seed: Seed of the training run, equal on all ranks.
        tp: Position on the tensor axis.
        cp: Position on the context axis.
        ep: Position on the expert axis.
        etp: Position on the expert-tensor axis.
        device: Device of the draws.

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
        self._states: dict[tuple[StreamName, str], torch.Tensor] = {}
        self._runs: Counter[int] = Counter()
        self._repeats: Counter[int] = Counter()

    def begin_microbatch(self, step: int, microbatch: int) -> None:
        """Move every stream to the start of a microbatch.

        Args:
            step: Optimizer step (steps).
            microbatch: Index of the microbatch within the step, unique over the data-parallel ranks
                (microbatches).
        """
        self._runs.clear()
        self._repeats.clear()
        self.seek(0, StreamPosition(step, microbatch))

    def seek(self, layer: int, position: StreamPosition | None = None) -> StreamPosition:
        """Move every stream to the start of ``layer`` and return that position.

        Args:
            layer: Index of the layer in the whole model: 0 is the embedding (layers).
            position: Source of step, microbatch and run; None means the current position.
                Recomputation passes the position of the layer's first run, because other
                microbatches have run since. Without a position, and outside of a replay, a new run
                of the layer begins.
        """
        base = position or self.position
        run = base.run if position or base.is_replay else self._next_run(layer)
        self.position = replace(base, layer=layer, run=run)
        self._states.clear()
        return self.position

    def _next_run(self, layer: int) -> int:
        """Count a run of a layer, and return its index."""
        if torch._C._current_graph_task_id() == -1:
            self._runs[layer] += 1
            return self._runs[layer] - 1
        # torch's activation checkpointing runs the layer again inside a backward pass, which starts
        # with the latest run.
        self._repeats[layer] += 1
        return max(self._runs[layer] - self._repeats[layer], 0)

    @contextmanager
    def fork(self, name: StreamName, purpose: str = "") -> Iterator[None]:
        """Draw from the stream ``name`` inside the block, then restore the default generators.

        Args:
            name: Name of the stream.
            purpose: Name of an independent substream of this stream, whose draws do not advance the
                other substreams.
        """
        if name not in self._coordinates:
            raise ValueError(
                f"a random stream must be one of {', '.join(self._coordinates)}: {name!r}."
            )
        outside = self._get_state()
        try:
            if (name, purpose) in self._states:
                self._set_state(self._states[name, purpose])
            else:
                self._seed_default_generator(self._seed_of(name, purpose))
            yield
            self._states[name, purpose] = self._get_state()
        finally:
            self._set_state(outside)

    @contextmanager
    def fork_default(self) -> Iterator[None]:
        """Seed torch's default generators by the microbatch alone, inside the block only.

        Draws of the step itself, such as those that choose masked tokens, are then equal on all
        pipeline stages.
        """
        outside_cpu = torch.default_generator.get_state()
        outside = self._get_state()
        try:
            seed = derive_seed(self.seed, "default", self.position.step, self.position.microbatch)
            torch.default_generator.manual_seed(seed)
            self._seed_default_generator(seed)
            yield
        finally:
            torch.default_generator.set_state(outside_cpu)
            self._set_state(outside)

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and the position, from which a checkpoint continues the streams."""
        return {"seed": self.seed, "position": asdict(self.position)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the streams of a checkpoint; the coordinates remain those of this rank."""
        self.seed = int(state["seed"])
        position = StreamPosition(**state["position"])
        self.seek(position.layer, position)

    def _seed_of(self, name: StreamName, purpose: str = "") -> int:
        here = self.position
        # The first run and a stream without purpose add nothing, so that their seeds do not depend
        # on these features.
        words = (purpose,) if purpose else ()
        run = (here.run,) if here.run else ()
        place = (here.step, here.microbatch, here.layer, *run)
        return derive_seed(self.seed, name, *words, *self._coordinates[name], *place)

    def _seed_default_generator(self, seed: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.default_generators[self._cuda_index()].manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)

    def _get_state(self) -> torch.Tensor:
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self._cuda_index()].get_state()
        return torch.default_generator.get_state()

    def _set_state(self, state: torch.Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.default_generators[self._cuda_index()].set_state(state)
        else:
            torch.default_generator.set_state(state)

    def _cuda_index(self) -> int:
        return torch.cuda.current_device() if self.device.index is None else self.device.index
