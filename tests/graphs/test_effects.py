"""Replays repeat the effects of captured passes: the counts, notices, sums and draws of eager
training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.graphs.effects import Effects
from lightning_megatron.groups.generators import GeneratorPool
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.recorded_draws import RecordedDraws
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.optimizer import DistributedOptimizerConfig
from lightning_megatron.optimizer.gradient_buckets import GradientBucket, RecordedGradients
from tests.graphs.trained import observers_of
from tests.optimizer.runs import Run
from tests.tape import TapeBackend

SIZES: dict[str, Any] = {
    "vocab_size": 40, "max_seq_length": 8, "num_layers": 2, "hidden_size": 16, "num_heads": 4,
}  # fmt: skip
CONFIG = GPTConfig.gpt2(**SIZES, hidden_dropout=0.2, attention_dropout=0.3)
NUM_STEPS = 3
NUM_MICROBATCHES = 2
#: A change of the effects before they are repeated.
Change = Callable[[Effects], Effects]
#: Omitted effects, by what they change.
OMISSIONS: dict[str, Change] = {
    "parameters": lambda effects: replace(effects, gradients=RecordedGradients()),
    "events": lambda effects: replace(effects, gradients=replace(effects.gradients, groups=())),
    "losses": lambda effects: replace(effects, draws=RecordedDraws()),
}


class Training:
    """Steps of a GPT on one rank, and records that distinguish them from another training."""

    def __init__(self, mesh: ParallelMesh, recompute: str) -> None:
        self.mesh = mesh
        self.model = GPT(CONFIG, mesh, seed=1)
        self.model.recompute = recompute
        named = dict(self.model.named_parameters())
        self.run = Run(named, mesh, DistributedOptimizerConfig(bucket_size=300))
        self.batch = torch.zeros(2, 2, 8, dtype=torch.long)
        self.records: dict[str, list[Any]] = {"losses": [], "events": [], "positions": []}

    def loss(self) -> Tensor:
        return self.model(self.batch[0], self.batch[1]).mean()

    def pass_of(self, step: int, number: int) -> tuple[Tensor, Any]:
        """Run the forward pass of a microbatch."""
        return self.loss(), None

    def back(self, loss: Tensor, position: Any) -> None:
        """Run the backward pass of a microbatch."""
        loss.backward()

    def microbatch(self, step: int, number: int) -> None:
        mesh = self.mesh
        seed = 100 * step + 10 * number + mesh.dp.rank
        self.batch.copy_(
            torch.randint(0, 40, self.batch.shape, generator=torch.Generator().manual_seed(seed))
        )
        mesh.random.begin_microbatch(step, number * mesh.dp.size + mesh.dp.rank)
        loss, position = self.pass_of(step, number)
        self.records["losses"].append(loss.item())
        self.records["positions"].append(mesh.random.position)
        # Another microbatch moves the streams before the backward pass.
        mesh.random.begin_microbatch(step, 1000 + number)
        if number == NUM_MICROBATCHES - 1:
            self.run.reducer.begin_last_backward(0)
        self.back(loss, position)
        self.records["positions"].append(mesh.random.position)

    def train(self) -> dict[str, Any]:
        """Run all steps, and return their records."""
        with pytest.MonkeyPatch.context() as patch:
            start = GradientBucket.start

            def record_start(bucket, *args):
                self.records["events"].append(bucket.names)
                start(bucket, *args)

            patch.setattr(GradientBucket, "start", record_start)
            for step in range(NUM_STEPS):
                self.run.zero_grad()
                for number in range(NUM_MICROBATCHES):
                    self.microbatch(step, number)
                self.records["events"].append("the last backward pass has ended")
                self.run.reducer.start_reduction(0)
                self.run.finish()
                self.run.step()
        self.records["parameters"] = [p.tolist() for p in self.model.parameters()]
        return self.records


class ReplayedTraining(Training):
    """The same steps, whose forward and backward passes are replays of a tape."""

    def __init__(
        self, mesh: ParallelMesh, recompute: str, change: Change = lambda effects: effects
    ) -> None:
        super().__init__(mesh, recompute)
        self.observers = observers_of(self.run)
        self.backend = TapeBackend(mesh.launcher)
        self.pool = self.backend.make_pool()
        before = (dict(mesh.journal.counts), mesh.journal.last, mesh.random.position)
        with mesh.random.preserve_position():
            self.forward = self.capture("all layers, forward", self.loss, "empty")
            loss = self.forward[1]

            def backward():
                loss.backward(retain_graph=True)

            self.first = self.capture("all layers, backward", backward, "empty")
            self.later = self.capture("all layers, backward", backward, "filled")
        assert before == (dict(mesh.journal.counts), mesh.journal.last, mesh.random.position)
        assert all(slot.is_empty for slot in self.run.reducer._slots.values())
        self.slots = self.first[2].gradients.slots
        self.change = change

    def capture(self, label: str, function: Callable[[], Any], state: Any) -> Any:
        generators = GeneratorPool(torch.device("cpu"))
        with self.observers.recording(label, generators, state) as recorded:
            graph, result = self.backend.capture(function, self.pool, generators)
        return graph, result, recorded()

    def pass_of(self, step: int, number: int) -> tuple[Tensor, Any]:
        graph, loss, effects = self.forward
        with self.observers.repeat(self.change(effects)) as position:
            graph.replay()
        return loss, position

    def back(self, loss: Tensor, position: Any) -> None:
        graph, _, effects = self.first if all(slot.is_empty for slot in self.slots) else self.later
        with self.observers.repeat(self.change(effects), position):
            graph.replay()


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def differences(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    """Return the records that differ between two trainings."""
    return {key for key in first if first[key] != second[key]}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_replays_with_repeated_effects_equal_eager_training(recompute):
    eager = Training(ParallelMesh.single(), recompute).train()
    replayed = ReplayedTraining(ParallelMesh.single(), recompute).train()
    assert not differences(eager, replayed)
    events = eager["events"]
    ended = max(index for index, event in enumerate(events) if isinstance(event, str))
    assert not isinstance(events[ended - 1], str), "sums start inside of the last backward pass"
    if recompute == "full":
        for changed, omit in OMISSIONS.items():
            other = ReplayedTraining(ParallelMesh.single(), recompute, omit).train()
            assert changed in differences(eager, other), f"an omission must change {changed}"


def test_failures_report_nothing():
    training = ReplayedTraining(ParallelMesh.single(), "full")
    _, position = training.pass_of(0, 0)
    with pytest.raises(KeyError), training.observers.repeat(training.first[2], position):
        raise KeyError
    assert all(slot.is_empty for slot in training.slots)


def test_passes_without_gradients_repeat_their_collectives():
    mesh = ParallelMesh.single()
    observers = observers_of(Run({"weight": nn.Parameter(torch.zeros(1))}, mesh))
    with observers.recording("evaluation", GeneratorPool(torch.device("cpu"))) as recorded:
        mesh.journal.note("all_reduce", "tp", (0,))
    effects = recorded()
    assert effects.label == "replay of evaluation, 1 collective", "hang reports name it"
    assert not effects.gradients.groups
    assert not effects.gradients.sums
    with observers.repeat(effects):
        assert mesh.journal.counts == {"tp": 1}
