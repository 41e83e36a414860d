"""Training of a small GPT for a few steps, eagerly or with graphs of its segments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.graphs.cuda import CudaBackend
from lightning_megatron.graphs.effects import EffectObservers
from lightning_megatron.graphs.graph_keys import TRAINING
from lightning_megatron.graphs.items import CaptureTools
from lightning_megatron.graphs.recording import Recording
from lightning_megatron.graphs.runner import GraphRunner
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.encoder import Encoder, EncoderInput
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.pipeline.executor import BuildSchedule, PipelineExecutor
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.pipeline.step_run import BackwardPasses
from lightning_megatron.plan.actions import Action
from lightning_megatron.plan.custom_schedule import custom_schedule
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.plan.experts import Transport
from lightning_megatron.plan.schedule import Schedule, build_schedule
from tests.optimizer.runs import Run
from tests.tape import TapeBackend

EVALUATION = "validation_step"
SIZES: dict[str, Any] = {
    "vocab_size": 77, "max_seq_length": 12, "num_layers": 4, "hidden_size": 16, "num_heads": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Settings of a training: a model, a schedule by name or by a function that builds it, the number
    of microbatches of each step, what backward passes recompute, and how graphs capture it.
    """

    config: GPTConfig | EncoderConfig
    schedule: str | BuildSchedule = "1f1b"
    microbatches: Sequence[int] = (3, 3, 3, 3, 3)
    recompute: Any = "none"
    scopes: tuple[str, ...] = ("all",)
    #: Names of modules with whose first parameter a bucket begins.
    begins: tuple[str, ...] = ()
    transport: Transport = "auto"
    #: Number of places for clones of experts on every rank.
    places: int = 0
    dtype: torch.dtype = torch.float64
    #: Length of the sequences (tokens) by step and microbatch.
    length: Callable[[int, int], int] = lambda step, number: 8
    max_shapes: int = 1
    #: Number of microbatches that are evaluated after each step.
    evaluates: int = 0


@dataclass
class Trained:
    """Result of a training on one rank: losses of all microbatches, final parameters, numbers of
    collectives by axis, the runner if there are graphs, and the number of slots.
    """

    losses: list[Tensor]
    parameters: dict[str, Tensor]
    counts: dict[str, int]
    runner: GraphRunner | None
    model: GPT
    evaluated: list[Tensor]
    num_slots: int
    #: Parameters for which the last step has waited.
    waited: set[Tensor]


def train(
    case: Case, mesh: ParallelMesh, *, graphs: bool, spoil: Callable[[GPT], None] | None = None
) -> Trained:
    """Train eagerly, or with graphs that are captured after two steps. ``spoil`` changes the model
    before the training.
    """
    model: Any
    if isinstance(case.config, EncoderConfig):
        model = Encoder(case.config, mesh, seed=7).to(case.dtype)
    else:
        model = GPT(case.config, mesh, seed=7).to(case.dtype)
    model.recompute = case.recompute
    if spoil is not None:
        spoil(model)
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.transport = case.transport
            module.clones = ExpertClones(case.places) if case.places else None
    run = Run(dict(model.named_parameters()), mesh)
    waited = set[Tensor]()
    runner = graph_runner(case, mesh, run, model, waited.update) if graphs else None
    schedule: Any = case.schedule
    executor = PipelineExecutor(mesh, model, schedule, actions=runner)
    mixtures = list(model.mixtures.values())
    losses: list[Tensor] = []
    evaluated: list[Tensor] = []
    for step, number in enumerate(case.microbatches):
        if runner is not None and step == 2:
            runner.begin()
        run.zero_grad()
        waited.clear()

        def loss_of(result: Tensor, _: int, number: int = number) -> Tensor:
            losses.append(result.detach().clone())
            return result / number

        executor.run(
            partial(mean_loss, model),
            [batch_of(case, mesh, step, index) for index in range(number)],
            BackwardPasses(
                loss_of,
                weight_of=lambda _, number=number: 1.0 / number,  # type: ignore[misc]
                observer=run.reducer,
                loss_weight=mixtures[0].loss_weight if mixtures else None,
                weight_gradients=run.reducer.weight_gradients,
            ),
            step=step,
        )
        run.finish()
        run.step()
        if case.evaluates:
            if runner is not None and step == 1:
                runner.begin(EVALUATION)
            evaluated += evaluate(case, executor, model, runner, step)
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    num_slots = 0 if runner is None else runner.counts.num_slots
    counts = dict(mesh.journal.counts)
    return Trained(losses, parameters, counts, runner, model, evaluated, num_slots, waited)


def mean_loss(model: Any, data: Any) -> Tensor:
    """Return the mean loss of a language model, of masked tokens or of the next ones."""
    tokens, labels = data
    if isinstance(model, Encoder):
        valid = torch.ones_like(tokens, dtype=torch.bool)
        valid[0, -2:] = False
        losses = model(EncoderInput(tokens, valid=valid), labels).losses
        assert losses is not None, "labels are given"
        return losses.mean()
    return model(tokens, labels).mean()


def evaluate(
    case: Case, executor: PipelineExecutor, model: GPT, runner: GraphRunner | None, step: int
) -> list[Tensor]:
    """Evaluate microbatches without gradients between two training steps."""
    model.eval()
    if runner is not None:
        runner.permit(EVALUATION, True)
    with torch.inference_mode():
        losses = executor.run(
            lambda data: model(data[0], data[1]).mean(),
            [batch_of(case, executor.mesh, step + 50, index) for index in range(case.evaluates)],
            step=step,
        )
    if runner is not None:
        runner.permit(TRAINING, True)
    model.train()
    return losses


def two_alive(rank: int, num_stages: int, number: int, num_chunks: int) -> Iterator[Action]:
    """Yield the actions of a stage that has two microbatches in flight."""
    for microbatch in range(number):
        yield Action("F", 0, microbatch)
        if microbatch:
            yield Action("B", 0, microbatch - 1)
    yield Action("B", 0, number - 1)


def two_in_flight(num_microbatches: int, forward_only: bool) -> Schedule:
    """Build the schedule of a single stage that has two microbatches in flight."""
    if forward_only:
        return build_schedule("1f1b", 1, num_microbatches, forward_only=True)
    return custom_schedule(two_alive, 1, num_microbatches)


@contextmanager
def counted_replays() -> Iterator[Counter[str]]:
    """Count the replays of forward graphs of training and of evaluation inside the block."""
    counts: Counter[str] = Counter()
    replay = Recording.replay_forward

    def count_replay(recording: Recording, tensors: Any) -> Any:
        counts["training" if recording.has_backward else "evaluation"] += 1
        return replay(recording, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recording, "replay_forward", count_replay)
        yield counts


def graph_runner(
    case: Case,
    mesh: ParallelMesh,
    run: Run,
    model: GPT,
    wait_for: Callable[[Collection[Tensor]], None],
) -> GraphRunner:
    """Return a runner with the backend for the device."""
    is_cpu = mesh.device.type == "cpu"
    buckets = [list(model.get_submodule(name).parameters()) for name in case.begins]
    tools = CaptureTools(
        TapeBackend(mesh.launcher) if is_cpu else CudaBackend(),
        observers_of(run),
        mesh.random,
        run.reducer.weight_gradients,
        case.scopes,
        buckets,
        redraws=case.recompute != "none",
        wait_for=wait_for,
        max_shapes=case.max_shapes,
    )
    runner = GraphRunner(model, tools, run.reducer)
    runner.permit(TRAINING, True)
    return runner


def observers_of(run: Run) -> EffectObservers:
    """Return observers of the objects that steps of an optimizer run change."""
    mesh = run.mesh
    return EffectObservers(mesh.random, mesh.journal, run.reducer, run.main.gather)


def batch_of(case: Case, mesh: ParallelMesh, step: int, number: int) -> Microbatch:
    """Draw the tokens and labels of a microbatch of this data-parallel rank."""
    place = (step * 100 + number) * mesh.dp.size + mesh.dp.rank
    generator = torch.Generator().manual_seed(place)
    shape = (2, 2, case.length(step, number))
    tokens, labels = torch.randint(0, 77, shape, generator=generator).to(mesh.device)
    return Microbatch((tokens, labels), 2)


def assert_equal_bits(actual: Trained, expected: Trained, label: str) -> None:
    """Assert that two trainings have equal losses, parameters and numbers of collectives."""
    losses = [*actual.losses, *actual.evaluated]
    references = [*expected.losses, *expected.evaluated]
    for number, (loss, reference) in enumerate(zip(losses, references, strict=True)):
        assert torch.equal(loss, reference), f"{label}: loss {number}: {loss} and {reference}"
    for name, parameter in actual.parameters.items():
        assert torch.equal(parameter, expected.parameters[name]), f"{label}: {name}"
    assert actual.counts == expected.counts, label
