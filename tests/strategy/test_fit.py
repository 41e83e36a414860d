"""Fits in one process: precisions, inputs, refusals, evaluation, and what a run leaves behind."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import GPT, MegatronStrategy
from lightning_megatron.errors import CheckpointMismatchError, ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.parameters.gradient_slot import slot_of
from lightning_megatron.optimizer.loss_scale import DynamicLossScale
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from lightning_megatron.strategy.private.loops import (
    ScheduledOptimization,
    automatic_optimization,
)
from lightning_megatron.strategy.run import Run
from tests.fits import Job, Language, Tokens, trainer_of


def trainer(
    strategy: Any = "ours", *callbacks: pl.Callback, precision: Any = "32-true", **options: Any
) -> pl.Trainer:
    """Return a trainer under MegatronStrategy with microbatches of two."""
    layout = {} if strategy == "ours" else strategy
    options = {"max_epochs": 1, "gradient_clip_val": None, **options}
    steps = options.pop("max_steps", -1)
    job = Job(strategy=layout, steps=steps, precision=precision, trainer=options)
    return trainer_of(job, 1, *callbacks)


def tokens() -> DataLoader:
    return DataLoader(Tokens(32), batch_size=8)


class Plain(pl.LightningModule):
    """Fit a sum by layers of torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.inputs: list[Any] = []

    def loss(self, batch: Any) -> Tensor:
        self.inputs.append((batch[0].dtype, len(batch[0])))
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def lines() -> DataLoader:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


@pytest.mark.parametrize(
    ("precision", "dtype", "main_dtype"),
    [
        ("64-true", torch.float64, torch.float64),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
        ("bf16-mixed", torch.bfloat16, torch.float32),
    ],
)
def test_precision_sets_the_dtypes_of_parameters_main_parameters_and_resumed_moments(
    precision, dtype, main_dtype, tmp_path
):
    model, runner = Language(), trainer(precision=precision, max_steps=3)
    assert runner.precision == precision
    runner.fit(model, tokens())
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    groups = runner.optimizers[0].param_groups
    assert {p.dtype for group in groups for p in group["params"]} == {main_dtype}
    runner.save_checkpoint(tmp_path / "after")
    resumed = trainer(precision=precision, max_steps=5, max_epochs=9)
    resumed.fit(Language(), tokens(), ckpt_path=tmp_path / "after")
    assert resumed.global_step == 5
    moments = [state["exp_avg"] for state in resumed.optimizers[0].state.values()]
    assert moments
    assert all(moment.any() for moment in moments)


class Perturbed(Plain):
    """Write other weights in place before a batch, and the former ones back in its step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.former = [parameter.clone() for parameter in self.parameters()]
            for parameter in self.parameters():
                parameter.mul_(1.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for parameter, former in zip(self.parameters(), self.former, strict=True):
                parameter.copy_(former)
        return super().training_step(batch, batch_idx)


def test_main_parameters_keep_their_bits_if_weights_are_changed_and_written_back():
    found = []
    for kind in (Plain, Perturbed):
        runner = trainer({"microbatch_size": "batch"}, precision="bf16-mixed")
        runner.fit(kind(), lines())
        (main,) = (group["params"] for group in runner.optimizers[0].param_groups)
        found.append(main)
    for actual, expected in zip(*found, strict=True):
        assert expected.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_float16_scales_the_loss_and_skips_steps_that_overflow():
    scale = DynamicLossScale(initial=2.0**40, hysteresis=1)
    plugin = MegatronPrecision("16-mixed", scale)
    runner, model = trainer(plugins=[plugin], precision=None, max_epochs=6), Language()
    runner.fit(model, tokens())
    assert "skipped_steps" not in runner.callback_metrics, "TrainingMetrics logs it"
    assert plugin.skipped_steps > 0
    assert scale.scale < 2.0**40
    assert runner.callback_metrics["loss"] < 5.6
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_optimizers_that_step_at_different_batches_share_a_loss_scale():
    class InTurns(Plain):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            for optimizer in self.optimizers()[: 1 + batch_idx % 2]:
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[part].parameters(), lr=0.1) for part in (0, 2)]

    ours, theirs = InTurns(), InTurns()
    # The scale changes between the batches that the second optimizer adds up.
    plugin = MegatronPrecision("16-mixed", DynamicLossScale(initial=2.0**10, growth_interval=1))
    trainer({}, plugins=[plugin], precision=None).fit(ours, lines())
    trainer(None).fit(theirs, lines())
    assert plugin.skipped_steps == 0
    for actual, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(actual.float(), expected, rtol=0, atol=2e-3)


def test_precisions_batches_and_options_that_cannot_be_honoured_are_refused():
    with pytest.raises(UnsupportedError, match="precision must be one of 32-true, 64-true"):
        trainer(precision="16-true")
    for layout, error, words in (
        ({"microbatch_size": 3}, ParallelPlanError, "batch_size .4. of the training dataloader"),
        ({"recompute": "full"}, UnsupportedError, "recompute .'full'. needs a model of this package"),
        ({"loss_chunk": "auto"}, UnsupportedError, "loss_chunk .'auto'. needs a decoder of this pack"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            trainer(layout).fit(Plain(), lines())


def test_inputs_of_user_modules_are_cast_and_split_into_microbatches():
    model = Plain()
    trainer(precision="bf16-mixed").fit(model, lines())
    assert model.inputs == [(torch.bfloat16, 2)] * 8


def test_a_collate_function_may_return_microbatches():
    def collate(samples):
        parts = [samples[:1], samples[1:]]
        return [
            Microbatch(tuple(map(torch.stack, zip(*part, strict=True))), len(part))
            for part in parts
        ]

    ours, theirs = Plain(), Plain()
    cut = DataLoader(lines().dataset, batch_size=4, collate_fn=collate)
    trainer({"microbatch_size": None}, precision="64-true").fit(ours, cut)
    trainer(None, precision="64-true").fit(theirs, lines())
    assert [size for _, size in ours.inputs] == [1, 3] * 4
    for actual, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(actual, expected)


def test_the_mesh_and_the_run_exist_only_while_the_trainer_runs():
    meshes: list[Any] = []

    class RecordsMesh(Plain):
        def configure_model(self) -> None:
            meshes.append(self.device_mesh)

    model, runner = RecordsMesh(), trainer(fast_dev_run=True)
    strategy = runner.strategy
    assert isinstance(strategy, MegatronStrategy)
    with pytest.raises(RuntimeError, match="from the `setup` hook on, which no run"):
        strategy.run  # noqa: B018
    with pytest.raises(RuntimeError, match="must be used while the Trainer runs"):
        strategy.mesh  # noqa: B018
    assert strategy.expert_statistics is None
    runner.fit(model, lines())
    assert isinstance(meshes[0], ParallelMesh)
    assert model.device_mesh is None
    assert isinstance(automatic_optimization(runner), ScheduledOptimization)


class BuiltInConstructor(Language):
    """Build the model in the constructor, before a Trainer exists."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(self.config, mesh=ParallelMesh.single(), seed=7)


@pytest.mark.parametrize(
    ("make", "precision"), [(Language, "bf16-mixed"), (BuiltInConstructor, "32-true")]
)
def test_a_trainer_evaluates_an_earlier_checkpoint_after_a_fit(make, precision, tmp_path):
    paths = {False: tmp_path / "all", True: tmp_path / "weights only"}
    first = trainer(precision=precision, max_steps=1)
    first.fit(make(), tokens())
    for weights_only, path in paths.items():
        first.save_checkpoint(path, weights_only=weights_only)
    runner, model = trainer(precision=precision, max_steps=3), make()
    runner.fit(model, tokens())
    late = runner.validate(model, tokens(), verbose=False)
    fresh = trainer(precision=precision)
    early = fresh.validate(make(), tokens(), ckpt_path=paths[False], verbose=False)
    assert early != late
    for path in paths.values():
        assert early == runner.validate(model, tokens(), ckpt_path=path, verbose=False)
        assert early == runner.validate(make(), tokens(), ckpt_path=path, verbose=False)
    with pytest.raises(CheckpointMismatchError, match="must hold optimizer states"):
        trainer(precision=precision).fit(make(), tokens(), ckpt_path=paths[True])
    with pytest.raises(CheckpointMismatchError, match="is neither"):
        trainer(precision=precision).fit(make(), tokens(), ckpt_path=tmp_path)


# ---- what a run leaves behind


class CountFrozenObjects(pl.Callback):
    """Record how many objects are frozen for garbage collection; raise if ``fails``."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.counts = fails, list[int]()

    def on_train_batch_start(self, *args: Any) -> None:
        self.counts.append(gc.get_freeze_count())
        if self.fails:
            raise RuntimeError("as asked")


def test_earlier_objects_are_frozen_for_garbage_collection_during_a_fit(monkeypatch):
    gc.unfreeze()
    count = gc.get_freeze_count
    try:
        # Python 3.12 starts with some hundred frozen objects.
        for fails, at_start in ((False, 0), (True, 0), (False, 375)):
            monkeypatch.setattr(gc, "get_freeze_count", lambda more=at_start: count() + more)
            counter = CountFrozenObjects(fails)
            with pytest.raises(RuntimeError, match="as asked") if fails else nullcontext():
                trainer({}, counter).fit(Plain(), lines())
            assert min(counter.counts) > 10_000, "objects of torch and of the model"
            assert count() == 0
        # A fit freezes nothing if the program has frozen objects, whose number only falls.
        gc.freeze()
        before = count()
        monkeypatch.setattr(gc, "get_freeze_count", count)
        counter = CountFrozenObjects()
        trainer({}, counter).fit(Plain(), lines())
        assert max(counter.counts) <= before
        assert 10_000 < count() <= before
    finally:
        gc.freeze()


REPLACED = {
    "advance",
    "_broadcast_sigterm_tensor",
    "_sigterm_notifier_fn",
    "on_advance_end",
    "_slurm_sigusr_handler_fn",
    "_requires_distributed_sampler",
}


def test_a_fit_and_a_failed_setup_restore_the_replaced_methods_of_the_trainer(monkeypatch):
    runners = [trainer(), trainer()]
    runners[0].fit(Language(), tokens())

    def fail(*_):
        raise ValueError("no steps")

    monkeypatch.setattr(Run, "_patch_fit", fail)
    with pytest.raises(ValueError, match="no steps"):
        runners[1].fit(Language(), tokens())
    for runner in runners:
        loop = runner.fit_loop
        owners = (loop, loop.epoch_loop, runner._signal_connector, runner._data_connector)
        assert all(REPLACED.isdisjoint(vars(owner)) for owner in owners)


class RecordsSlots(Language):
    """Record at each batch whether all trained parameters have a gradient slot."""

    has_slots: tuple[bool, ...] = ()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.has_slots += (all(slot_of(p) is not None for p in self.parameters()),)


def test_a_second_fit_has_gradient_slots_and_removes_them_at_its_end():
    runner, module = trainer(max_steps=2, max_epochs=9), RecordsSlots()
    runner.fit(module, tokens())
    runner.fit_loop.epoch_loop.max_steps = 4
    runner.fit(module, tokens())
    assert module.has_slots == (True,) * 4
    assert slot_of(next(module.parameters())) is None
