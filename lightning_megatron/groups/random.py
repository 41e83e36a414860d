"""Random streams whose draws depend on what is computed, not on which rank computes it or when."""

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

    Distinct tuples give unrelated seeds, so that streams cannot collide the way sums of small multiples of ranks do.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Position:
    """Name the place in training that a draw belongs to: step, microbatch over all data ranks, layer, run of the layer.

    Args:
        step: The optimizer step (steps).
        microbatch: Number of the microbatch within the step (microbatches).
        layer: Number of the layer in the whole model (layers).
        is_replay: Whether it is the second time, for activations that were not kept. Draws do not depend on it.
        run: How many times the layer has run before in the microbatch, where a step calls the model several times.
    """

    step: int = 0
    microbatch: int = 0
    layer: int = 0
    is_replay: bool = False
    run: int = 0


class RandomStreams:
    """Give every region of the model the random numbers it must share or must not share with other ranks.

    * ``replicated``: the same on all tensor-parallel ranks (dropout on activations that every one of them holds).
    * ``tensor``: different on every tensor-parallel rank (dropout inside a tensor-parallel region).
    * ``expert``: different on every expert-parallel and expert-tensor-parallel rank.

    All of them differ by data-parallel rank through the microbatch number and by context-parallel rank. What a stream
    draws is a function of (seed, stream, coordinates, step, microbatch, layer, run of the layer, draws so far in that
    run): the order in which a pipeline runs its microbatches, the stage that holds a layer, and activation
    recomputation do not change it.

    Args:
        seed: The seed of the run, equal on all ranks.
        tp: Position on the tensor axis.
        cp: Position on the context axis.
        ep: Position on the expert axis.
        etp: Position on the expert-tensor axis.
        device: Where the draws happen.

    Source: Shoeybi et al. 2019, appendix B.2.
    """

    def __init__(
        self, seed: int, *, tp: int = 0, cp: int = 0, ep: int = 0, etp: int = 0, device: str | torch.device = "cpu"
    ):
        self.seed = seed
        self.device = torch.device(device)
        self.position = Position()
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
            step: The optimizer step (steps).
            microbatch: Number of the microbatch within the step, unique over the data-parallel ranks (microbatches).
        """
        self._runs.clear()
        self._repeats.clear()
        self.seek(0, Position(step, microbatch))

    def seek(self, layer: int, position: Position | None = None) -> Position:
        """Move every stream to the start of ``layer`` and return that position.

        Args:
            layer: Number of the layer in the whole model: 0 is the embedding (layers).
            position: Take step, microbatch and run from here instead of from the current position; recomputation passes
                the position at which the layer first ran, because other microbatches have run since. Without, and
                outside of a replay, another run of the layer begins.
        """
        base = position or self.position
        run = base.run if position or base.is_replay else self._next_run(layer)
        self.position = replace(base, layer=layer, run=run)
        self._states.clear()
        return self.position

    def _next_run(self, layer: int) -> int:
        """Count a run of a layer, and return its number."""
        if torch._C._current_graph_task_id() == -1:
            self._runs[layer] += 1
            return self._runs[layer] - 1
        # A checkpoint of torch runs it again inside a backward pass, which goes through the latest run first.
        self._repeats[layer] += 1
        return max(self._runs[layer] - self._repeats[layer], 0)

    @contextmanager
    def fork(self, name: StreamName, purpose: str = "") -> Iterator[None]:
        """Let the draws inside the block come from the stream ``name``, and leave the default generators alone.

        Args:
            name: The stream.
            purpose: What has a stream of its own among those of this name, and so does not move the others on.
        """
        if name not in self._coordinates:
            raise ValueError(f"a random stream must be one of {', '.join(self._coordinates)}: {name!r}.")
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
        """Let torch's default generators inside the block start from the microbatch alone, and restore them after it.

        What a step draws by itself, such as the tokens that it masks, is then the same on all pipeline stages.
        """
        outside_cpu, outside = torch.default_generator.get_state(), self._get_state()
        try:
            seed = derive_seed(self.seed, "default", self.position.step, self.position.microbatch)
            torch.default_generator.manual_seed(seed)
            self._seed_default_generator(seed)
            yield
        finally:
            torch.default_generator.set_state(outside_cpu)
            self._set_state(outside)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to continue the streams."""
        return {"seed": self.seed, "position": asdict(self.position)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the streams of a checkpoint; the coordinates stay those of this rank."""
        self.seed = int(state["seed"])
        position = Position(**state["position"])
        self.seek(position.layer, position)

    def _seed_of(self, name: StreamName, purpose: str = "") -> int:
        here, words = self.position, (purpose,) if purpose else ()
        place = here.step, here.microbatch, here.layer, *((here.run,) if here.run else ())
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
