"""Gradient sums start as soon as their gradients are there, and parameters are gathered before
anybody reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_megatron import FP8, MegatronStrategy
from lightning_megatron.graphs.tape import TapeBackend
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import replicated_spec, set_shard_spec
from lightning_megatron.layers.init import initialize_
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.layers.slot_states import fill_empty, mark_filled, state_of
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.training import DistributedOptimizerConfig, MainParameters, fused_update
from lightning_megatron.training.gradient_bucket import GradientBucket
from lightning_megatron.training.recorded_gradients import RecordedGradients
from tests.oracles import assert_equal
from tests.strategy.tiny import loader
from tests.training.fused_fits import FusedLM, PlainKernel
from tests.training.row_exchanges import (
    DIVISIONS,
    EXPECTED,
    KINDS,
    errors_of_sums,
    weights_after,
    weights_of_twin,
)
from tests.training.runs import Run
from tests.world import run_world


def run_all(rank: int, size: int) -> dict[str, Any]:
    mesh = ParallelMesh.create(ParallelLayout(size), device="cpu")
    check_waits(mesh)
    check_deferred_gathers(mesh)
    check_gathers_during_updates(mesh)
    check_order_of_starts(mesh)
    row_exchanges = exchange_rows(mesh)
    check_fused_updates(size)
    check_fp8_weights(size)
    torch.set_default_dtype(torch.float64)
    check_weight_halves(mesh)
    check_replays(mesh)
    return row_exchanges


def test_sums_and_gathers_start_in_time_and_rows_are_exchanged_as_full_tables() -> None:
    twins = {kind: weights_of_twin(kind, 2) for kind in KINDS}
    limits = {"torch.float64": 1e-15, "torch.float32": 1e-6, "torch.bfloat16": 0.02}
    for rank, result in enumerate(run_world(run_all, 2)):
        for name, error in result.pop("sums").items():
            assert error <= limits.get(name, 0.0), (rank, name)
        for name, (weights, exchanges) in result.items():
            kind, _, _ = name.partition(", ")
            twin = twins[kind if kind in twins else "equal"]
            for key, weight in weights.items():
                torch.testing.assert_close(weight, twin[key], rtol=0, atol=1e-12, msg=name)
            assert exchanges == EXPECTED[kind](2), (rank, name)


# Parameters are gathered after an update.


class Gathered:
    """Layers whose weights are divided over two ranks, each weight a bucket of its own.

    Args:
        mesh: The groups of this rank.
        layers: The layers by name.
        size: Elements of a weight.
    """

    def __init__(self, mesh: ParallelMesh, layers: dict[str, nn.Linear], size: int = 6) -> None:
        self.mesh, self.layers = mesh, layers
        self.named = {f"{name}.weight": layer.weight for name, layer in layers.items()}
        self.main = MainParameters(self.named, mesh, DistributedOptimizerConfig(bucket_size=size))
        self.main.attach(torch.optim.SGD(self.named.values(), lr=0.1))
        self.gather, self.before = self.main.gather, 0
        self.before = self.started()

    def fill(self) -> None:
        with torch.no_grad():
            for main_slice in self.main.slices.values():
                main_slice.main.fill_(1.0)

    def started(self) -> int:
        """Return the number of collectives that have started since the last restart."""
        return sum(self.mesh.journal.counts.values()) - self.before

    def restart(self) -> None:
        self.before += self.started()


def small_layers(*names: str) -> dict[str, nn.Linear]:
    return {name: nn.Linear(2, 3, bias=False) for name in names}


def check_waits(mesh: ParallelMesh) -> None:
    """Readers wait for the parts of the last rank, which come late, and only for those."""
    layers = small_layers("outside", "waiting")
    run = Gathered(mesh, layers)
    run.gather.wait_before([layers["waiting"]], run.main.buffers)
    run.fill()
    time.sleep(0.2 * mesh.rank)
    run.main.publish(wait=False)
    assert layers["outside"].weight.min() == 1, "nobody would wait for it later"
    layers["waiting"](torch.zeros(1, 2))
    assert layers["waiting"].weight.min() == 1
    layers = small_layers("read", "unread")
    run = Gathered(mesh, layers)
    run.gather.wait_before(list(layers.values()), run.main.buffers)
    run.fill()
    time.sleep(0.2 * mesh.rank)
    run.main.publish(wait=False)
    assert len(run.gather._pending) == 2
    # Neither the forward pass of the module nor its hooks run.
    run.gather.wait_for([layers["read"].weight])
    assert layers["read"].weight.min() == 1
    run.gather.wait_for([nn.Parameter(torch.ones(1), requires_grad=False)])
    assert len(run.gather._pending) == 1
    run.main.wait()


def check_deferred_gathers(mesh: ParallelMesh) -> None:
    """Deferred gathers start with the first reader, and not in a recording."""
    layers = small_layers("read", "unread")
    run = Gathered(mesh, layers)
    run.gather.wait_before(list(layers.values()), run.main.buffers)
    run.gather.defers = True
    run.fill()
    run.main.publish(wait=False)
    assert (run.gather.is_deferred, run.started()) == (True, 0)
    # The capture undoes everything that runs on the tape of a graph.
    launcher = TapeBackend(mesh.launcher)
    with mesh.journal.recording(), run.gather.recording() as recorded:
        launcher.capture(run.main.wait, launcher.make_pool())
    assert (recorded.gathers, run.gather.is_deferred, run.started()) == (True, True, 0)
    layers["read"](torch.zeros(1, 2))
    assert (run.gather.is_deferred, run.started()) == (False, 2)
    assert layers["read"].weight.min() == 1
    run.main.wait()
    for config, is_deferred in (
        (DistributedOptimizerConfig(), True),
        (DistributedOptimizerConfig(zero=0), False),
    ):
        main = MainParameters({}, mesh, config)
        main.gather.defers = True
        main.publish(wait=False)
        assert main.gather.is_deferred == is_deferred


def check_gathers_during_updates(mesh: ParallelMesh) -> None:
    """Gathers start in a fixed order once their parameters are updated."""
    # Each dtype has its own buffer, and both ranks have a part of each bucket.
    dtypes = (torch.float64, torch.float32, torch.float64, torch.float32)
    layers = {str(n): nn.Linear(16, 16, bias=False, dtype=dtype) for n, dtype in enumerate(dtypes)}
    run = Gathered(mesh, layers, 256)
    run.gather.wait_before(list(layers.values()), run.main.buffers)
    run.main.publish(wait=False)
    buckets = [run.main.buffers[at].plan.buckets[number] for at, number in run.gather._pending]
    order = [placed.name for bucket in buckets for placed in bucket.placed]
    assert order == run.main.order.sorted(reversed(list(run.named))) == list(run.named)
    run.main.wait()
    layers = {str(number): nn.Linear(16, 16, bias=False) for number in range(3)}
    run = Gathered(mesh, layers, 256)
    run.gather.wait_before(list(layers.values()), run.main.buffers)
    run.gather.start_during_update(run.main.buffers, mesh, set(run.named))
    # The second bucket waits for the first bucket on all ranks.
    for name, num_started in {"1": 0, "0": 2, "2": 2}.items():
        layers[name].weight.data.fill_(1.0)
        if name != "2":
            run.gather.mark_updated([f"{name}.weight"])
        assert run.started() == num_started
    run.main.publish(wait=False, stored=True)
    assert run.started() == 3
    run.main.wait()
    assert all(layer.weight.min() == 1 for layer in layers.values())
    run.restart()
    run.main.publish()
    assert run.started() == 3
    run.restart()
    run.gather.defers = True
    run.gather.start_during_update(run.main.buffers, mesh, set(run.named))
    run.gather.mark_updated(list(run.named))
    run.main.publish(wait=False, stored=True)
    assert run.started() == 0
    run.main.wait()


def check_fused_updates(size: int) -> None:
    """Gathers of updated parameters start before the last piece is updated."""
    losses = {}
    for name, piece in {"hooked": 1, "one piece": 10**9, "many pieces": 1}.items():
        fused_update._PIECE = piece
        module = CountingLM(is_hooked=name == "hooked")
        fused_update._find_kernel = lambda device, module=module: (module.make_kernel, "")
        losses[name] = fused_losses(module, size)
        num_started = max(counts[-1] - counts[0] for counts in module.started)
        assert num_started > 2 if name == "many pieces" else num_started == 0
    assert losses["hooked"] == losses["one piece"] == losses["many pieces"]


def check_fp8_weights(size: int) -> None:
    """Weights in 8 bits that are gathered after fused updates give the losses of torch."""
    losses = []
    for kernel in (PlainKernel, None):
        fused_update._find_kernel = lambda device, kernel=kernel: (kernel, "torch steps by itself")
        fp8 = FP8("tensorwise", parameters="fp8", emulate=True)
        losses.append(fused_losses(FusedLM(), size, fp8=fp8))
    assert len(losses[0]) == 8
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


def fused_losses(module: FusedLM, size: int, **options: Any) -> list[float]:
    trainer = Trainer(
        accelerator="cpu",
        devices=size,
        strategy=MegatronStrategy(bucket_size=500, overlap_parameters=True, **options),
        precision="bf16-mixed",
        gradient_clip_val=0.1,
        max_epochs=1,
        barebones=True,
    )
    trainer.fit(module, loader(batch_size=2))
    return module.losses


class CountingLM(FusedLM):
    """Record, for each step, the number of started collectives at each call of the kernel."""

    def __init__(self, is_hooked: bool) -> None:
        super().__init__()
        self.is_hooked = is_hooked
        self.started: list[list[int]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.started.append([])

    def configure_optimizers(self) -> Any:
        configuration = super().configure_optimizers()
        if self.is_hooked:
            configuration["optimizer"].register_step_post_hook(lambda *_: None)
        return configuration

    def make_kernel(self) -> Any:
        kernel = PlainKernel()

        def call(*args: Any, **kwargs: Any) -> None:
            self.started[-1].append(sum(self.device_mesh.journal.counts.values()))
            kernel(*args, **kwargs)

        return call


# Buckets start their sums in the backward pass, also after replays and in weight halves.


@contextmanager
def recorded_buckets(started: list[Any]) -> Iterator[None]:
    """Add the names of buckets to a list when their sums start."""
    start = GradientBucket.start

    def record_start(bucket: GradientBucket, *args: Any) -> None:
        started.append(bucket.names)
        start(bucket, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientBucket, "start", record_start)
        yield


def check_order_of_starts(mesh: ParallelMesh) -> None:
    """Buckets of experts do not wait for buckets of parameters that are used earlier."""
    order = ("table", "experts.0", "dense", "experts.1")
    named = {name: nn.Parameter(torch.ones(16, 8, dtype=torch.float64)) for name in order}
    for name, parameter in named.items():
        spec = replicated_spec(parameter, mesh.tp.rank)
        set_shard_spec(parameter, replace(spec, is_expert=name.startswith("experts")))
    run = Run(named, mesh, DistributedOptimizerConfig(bucket_size=128))
    started: list[Any] = []
    before_last: list[Any] = []
    with recorded_buckets(started):
        for _ in range(2):
            run.zero_grad()
            started.clear()
            run.reducer.begin_last_backward(0)
            for name in reversed(order):
                before_last = list(started)
                (run.main.parameter(name) * 2.0).sum().backward()
            run.reducer.start_reduction(0)
            run.finish()
    assert before_last == [("experts.1",), ("dense",), ("experts.0",)]


def started_parameters(run: Run) -> set[str]:
    """Return the parameters whose sums over the ranks have started."""
    return {
        name
        for bucket in run.reducer._starts.buckets
        if bucket.pending is not None
        for name in bucket.names
    }


def check_weight_halves(mesh: ParallelMesh) -> None:
    model = nn.ModuleDict({"unused": ColumnParallelLinear(4, 4, mesh, bias=False)})
    model["first"] = ColumnParallelLinear(4, 4, mesh)
    model["last"] = ColumnParallelLinear(4, 4, mesh)
    initialize_(model, "cpu", seed=1)
    # Each parameter is a bucket of its own.
    run = Run(dict(model.named_parameters()), mesh, DistributedOptimizerConfig(bucket_size=1))
    queue = run.reducer.weight_gradients
    inputs = torch.randn(2, 3, 1, 4, generator=torch.Generator().manual_seed(3))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    references = {name: weight.requires_grad_() for name, weight in weights.items()}
    hidden = inputs @ references["first.weight"].t() + references["first.bias"]
    (hidden.tanh() @ references["last.weight"].t() + references["last.bias"]).sin().sum().backward()
    for step in range(2):
        run.zero_grad()
        with queue.open(step):
            model["last"](model["first"](inputs[mesh.rank]).tanh()).sin().sum().backward()
        assert not started_parameters(run)
        run.reducer.begin_last_weight_half(0, queue.count_left(step))
        # Sums start in the order of the buffers, up to the first bucket that lacks a product.
        assert "last.weight" not in started_parameters(run)
        assert "first.weight" not in started_parameters(run)
        queue.run(step)
        assert started_parameters(run) == set(references)
        run.reducer.start_reduction(0)
        run.finish()
        for name, main_slice in run.main.slices.items():
            assert (main_slice.main.grad is None) == (name == "unused.weight")
            views = (
                ()
                if main_slice.main.grad is None
                else main_slice.placement.local_views(main_slice.main.grad)
            )
            for box, view in views:
                full = references[name].grad / 2
                for dim, (start, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                    full = full.narrow(dim, start, length)
                assert_equal(view, full, f"step {step}: {name}", 1e-12)


CONFIG = GPTConfig.gpt2(
    vocab_size=40, max_seq_length=8, num_layers=2, hidden_size=16, num_heads=4, tie_embeddings=True
)
NUM_STEPS = 2
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
        with recorded_buckets(self.events):
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


def check_replays(mesh: ParallelMesh) -> None:
    """Notices repeated after a replay start the same buckets, and give the same gradients."""
    for way, replayed_way in ((live, replayed), (live_halves, replayed_halves)):
        events, gradients = Training(mesh).train(way)
        assert isinstance(events[-1], str), "all sums start inside the last backward pass"
        actual_events, actual = Training(mesh).train(replayed_way)
        assert actual_events == events
        assert len(actual) == len(gradients)
        assert all(map(torch.equal, actual, gradients))


# Gradients of embeddings that ranks exchange by rows.


def exchange_rows(mesh: ParallelMesh) -> dict[str, Any]:
    outcomes: dict[str, Any] = {"sums": errors_of_sums(mesh)}
    for kind in KINDS:
        for name, division in DIVISIONS.items():
            outcomes[f"{kind}, {name}"] = weights_after(mesh, division, kind)
    outcomes["default buckets"] = weights_after(mesh, DistributedOptimizerConfig(), "equal")
    return outcomes
