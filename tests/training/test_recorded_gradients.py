"""Notices repeated after replays of recorded backward passes start the gradient sums of live passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.slot_states import fill_empty, mark_filled, state_of
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.training import DistributedOptimizerConfig
from lightning_megatron.training.gradient_bucket import GradientBucket
from lightning_megatron.training.recorded_gradients import RecordedGradients
from tests.training.runs import Run
from tests.world import run_world

CONFIG = GPTConfig.gpt2(
    vocab_size=40, max_seq_length=8, num_layers=2, hidden_size=16, num_heads=4, tie_embeddings=True
)
NUM_STEPS = 3
NUM_MICROBATCHES = 2
Events = list[Any]


class Training:
    """Train a GPT and record the starts of gradient buckets."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self.model = GPT(CONFIG, mesh, seed=1)
        self.run = Run(
            dict(self.model.named_parameters()), mesh, DistributedOptimizerConfig(bucket_size=300)
        )
        self.reducer = self.run.reducer
        self.queue = self.reducer.weight_gradients
        self.mesh = mesh
        self.events: Events = []

    def loss(self, step: int, number: int) -> Tensor:
        """Return the loss of a microbatch, which depends on the rank."""
        seed = 100 * step + 10 * number + self.mesh.rank
        tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(seed))
        return self.model(tokens, tokens.roll(1, 1)).mean()

    def train(self, backward: Callable[[Training, int, int], None]) -> tuple[Events, list[Tensor]]:
        """Run all steps, and return the starts of buckets and the gradients of every step."""
        gradients: list[Tensor] = []
        with pytest.MonkeyPatch.context() as patch:
            start = GradientBucket.start

            def record_start(bucket: GradientBucket, *args: Any) -> None:
                self.events.append(bucket.names)
                start(bucket, *args)

            patch.setattr(GradientBucket, "start", record_start)
            for step in range(NUM_STEPS):
                self.run.zero_grad()
                for number in range(NUM_MICROBATCHES):
                    backward(self, step, number)
                self.events.append("the last backward pass has ended")
                self.reducer.start_reduction(0)
                self.run.finish()
                gradients += [gradient.clone() for gradient in self.run.main.gradients()]
                self.run.step()
        return self.events, gradients


def is_last(number: int) -> bool:
    return number == NUM_MICROBATCHES - 1


def live(training: Training, step: int, number: int) -> None:
    loss = training.loss(step, number)
    if is_last(number):
        training.reducer.begin_last_backward(0)
    loss.backward()


def repeat_notices(training: Training, recorded: RecordedGradients) -> None:
    """Mark slots and gradients, as the code that replays a graph does after each replay."""
    mark_filled(recorded.slots, recorded.rows)
    for group in recorded.groups:
        training.reducer.mark_arrived(group)


def replayed(training: Training, step: int, number: int) -> None:
    loss = training.loss(step, number)
    if is_last(number):
        training.reducer.begin_last_backward(0)
    before = len(training.events)
    flags = {name: slot.is_empty for name, slot in training.reducer._slots.items()}
    with training.reducer.recording() as recorder:
        loss.backward()
    assert len(training.events) == before, "nothing starts while gradients are recorded"
    assert flags == {name: slot.is_empty for name, slot in training.reducer._slots.items()}
    assert recorder.recorded.is_first == (number == 0)
    table_gradients = [
        name for group in recorder.recorded.groups for name in group if "word" in name
    ]
    assert len(table_gradients) == 2, "the tied table gets two gradients"
    assert len(recorder.recorded.additions) == len(recorder.recorded.slots) + 1
    repeat_notices(training, recorder.recorded)


def live_halves(training: Training, step: int, number: int) -> None:
    loss = training.loss(step, number)
    with training.queue.open(number):
        loss.backward()
    if is_last(number):
        training.reducer.begin_last_weight_half(0, training.queue.count_left(number))
    training.queue.run(number)


def replayed_halves(training: Training, step: int, number: int) -> None:
    reducer = training.reducer
    queue = training.queue
    loss = training.loss(step, number)
    with queue.open("captured"), reducer.recording() as inputs:
        loss.backward()
    mark_filled(inputs.recorded.slots, inputs.recorded.rows)
    captured = queue.count_left("captured")
    # The input half has added to the tied table and the weight half adds again, so that slots are
    # mixed in the first microbatch.
    left = list(captured)
    assert state_of(left) == ("mixed" if number == 0 else "filled")
    fill_empty(left)
    with reducer.recording() as weights:
        queue.run("captured")
    repeat_notices(training, inputs.recorded)

    def replay() -> Callable[[], None]:
        return lambda: repeat_notices(training, weights.recorded)

    with queue.open(number):
        queue.put(replay, weights.recorded.additions)
    assert queue.count_left(number) == captured
    if is_last(number):
        reducer.begin_last_weight_half(0, queue.count_left(number))
    queue.run(number)


def forgotten_notices(training: Training, step: int, number: int) -> None:
    loss = training.loss(step, number)
    if is_last(number):
        training.reducer.begin_last_backward(0)
    with training.reducer.recording() as recorder:
        loss.backward()
    mark_filled(recorder.recorded.slots, recorder.recorded.rows)


def forgotten_marks(training: Training, step: int, number: int) -> None:
    loss = training.loss(step, number)
    if is_last(number):
        training.reducer.begin_last_backward(0)
    with training.reducer.recording() as recorder:
        loss.backward()
    for group in recorder.recorded.groups:
        training.reducer.mark_arrived(group)


WAYS = (live, replayed, live_halves, replayed_halves, forgotten_notices, forgotten_marks)


def _train_in_every_way(rank: int, size: int) -> dict[str, tuple[Events, list[Tensor]]]:
    torch.set_default_dtype(torch.float64)
    mesh = ParallelMesh.create(ParallelLayout(size))
    outcomes = {way.__name__: Training(mesh).train(way) for way in WAYS}
    mesh.destroy()
    return outcomes


@pytest.fixture(scope="module")
def results() -> list[dict[str, tuple[Events, list[Tensor]]]]:
    return run_world(_train_in_every_way, 2)


def all_equal(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return len(actual) == len(expected) and all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("kind", ["", "_halves"])
def test_notices_repeated_after_a_replay_start_the_same_buckets_and_gradients(
    results: list[Any], kind: str
) -> None:
    for outcomes in results:
        events, gradients = outcomes[f"live{kind}"]
        assert isinstance(events[-1], str), "all sums start inside the last backward pass"
        assert outcomes[f"replayed{kind}"][0] == events
        assert all_equal(outcomes[f"replayed{kind}"][1], gradients)


def test_forgotten_notices_delay_sums_and_forgotten_marks_change_gradients(
    results: list[Any],
) -> None:
    for outcomes in results:
        events, gradients = outcomes["live"]
        # Sums start late, but are right.
        assert outcomes["forgotten_notices"][0] != events
        assert all_equal(outcomes["forgotten_notices"][1], gradients)
        assert not all_equal(outcomes["forgotten_marks"][1], gradients)


def single_training() -> Run:
    return Run({name: nn.Parameter(torch.ones(2)) for name in "ab"}, ParallelMesh.single())


def test_reductions_and_nested_recordings_inside_a_recording_are_refused() -> None:
    run = single_training()
    with (
        pytest.raises(RuntimeError, match="no gradient sum over the ranks may start"),
        run.reducer.recording(),
    ):
        run.reducer.start_reduction(0)
    with (
        pytest.raises(RuntimeError, match="must not be nested"),
        run.reducer.recording(),
        run.reducer.recording(),
    ):
        pass
    # Both recordings have ended with their errors.
    run.backward({"a": torch.ones(2), "b": torch.ones(2)})
    run.finish()
    assert len(run.main.gradients()) == 2


@pytest.mark.parametrize("state", ["empty", "filled"])
def test_recording_in_a_requested_state_does_not_depend_on_the_slots(state: Any) -> None:
    run = single_training()
    run.backward({"a": torch.ones(2)}, is_last=False)
    slots = run.reducer._slots
    for slot in slots.values():
        slot.gradient.fill_(8.0)
    with run.reducer.recording(state) as recorder:
        assert state_of(slots.values()) == state
        run.backward({"a": torch.ones(2), "b": torch.ones(2)}, is_last=False)
    assert recorder.recorded.is_first == (state == "empty")
    assert [slot.is_empty for slot in slots.values()] == [False, True]
    expected = 1.0 if state == "empty" else 9.0
    assert all(slot.gradient.eq(expected).all() for slot in slots.values())


def test_a_recording_over_mixed_sums_is_refused() -> None:
    run = single_training()
    run.backward({"a": torch.ones(2)}, is_last=False)
    with run.reducer.recording() as recorder:
        run.backward({"a": torch.ones(2), "b": torch.ones(2)}, is_last=False)
    with pytest.raises(RuntimeError, match="overwrote 1 of 2, such as that of 'b'") as error:
        _ = recorder.recorded
    assert "state 'empty' or 'filled'" in str(error.value)
