"""Fits in one process: precisions, modules of users, manual optimization, checkpoints, refusals."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import GPT, MegatronStrategy, ParallelPlanError, UnsupportedError
from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from lightning_megatron.strategy.private.loops import automatic_optimization
from lightning_megatron.strategy.step.scheduled_loop import ScheduledOptimization
from lightning_megatron.training.loss_scale import DynamicLossScale
from tests.strategy.tiny import TinyLM, loader


def trainer_of(strategy: Any = None, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "devices": 1, "max_epochs": 1}
    strategy = MegatronStrategy(microbatch_size=2) if strategy is None else strategy
    return Trainer(**{**quiet, **options}, strategy=strategy, use_distributed_sampler=False)


class Plain(LightningModule):
    """Fit a sum by layers of torch."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.inputs: list[Any] = []
        for name, value in options.items():
            setattr(self, name, value)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.inputs.append((x.dtype, len(x)))
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Manual(Plain):
    """Step the first of two optimizers at every batch, and the second at every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.manual_backward(loss)
        self.clip_gradients(first, 0.5, "norm")
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
            second.zero_grad()
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net[0].parameters(), lr=0.1),
            torch.optim.Adam(self.net[2].parameters(), lr=0.01),
        ]


def make_line_loader(batch_size: int = 4) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)


@pytest.mark.parametrize("module", [Plain, Manual])
def test_modules_of_a_user_match_a_fit_without_the_strategy(module: type[Plain]) -> None:
    ours, theirs = module(), module()
    trainer_of().fit(ours, make_line_loader())
    trainer_of("auto").fit(theirs, make_line_loader())
    for actual, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def test_lbfgs_matches_a_fit_without_the_strategy() -> None:
    class LBFGSModule(Plain):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    ours, theirs = LBFGSModule(), LBFGSModule()
    trainer_of().fit(ours, make_line_loader())
    trainer_of("auto").fit(theirs, make_line_loader())
    for actual, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("precision", "parameters", "main_parameters"),
    [
        ("32-true", torch.float32, torch.float32),
        ("64-true", torch.float64, torch.float64),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
        ("bf16-mixed", torch.bfloat16, torch.float32),
    ],
)
def test_precision_sets_the_dtypes_of_parameters_and_main_parameters(
    precision: Any, parameters: torch.dtype, main_parameters: torch.dtype, tmp_path: Path
) -> None:
    model, trainer = TinyLM(), trainer_of(precision=precision, max_steps=3)
    assert trainer.precision == precision
    trainer.fit(model, loader())
    assert {parameter.dtype for parameter in model.parameters()} == {parameters}
    trained = [
        parameter for group in trainer.optimizers[0].param_groups for parameter in group["params"]
    ]
    assert {parameter.dtype for parameter in trained} == {main_parameters}
    assert trainer.callback_metrics["loss"].isfinite()
    trainer.save_checkpoint(tmp_path / "after")
    resumed_model, resumed_trainer = (
        TinyLM(),
        trainer_of(precision=precision, max_steps=5, max_epochs=2),
    )
    resumed_trainer.fit(resumed_model, loader(), ckpt_path=tmp_path / "after")
    assert resumed_trainer.global_step == 5


def test_losses_in_mixed_precision_are_close_to_those_in_full_precision() -> None:
    losses = {}
    for precision in ("32-true", "bf16-mixed"):
        trainer = trainer_of(precision=precision, max_epochs=3)
        trainer.fit(TinyLM(), loader())
        losses[precision] = trainer.callback_metrics["loss"].item()
    assert losses["bf16-mixed"] == pytest.approx(losses["32-true"], rel=0.05)


def test_float16_scales_the_loss_and_skips_steps_that_overflow() -> None:
    scale = DynamicLossScale(initial=2.0**40, hysteresis=1)
    plugin = MegatronPrecision("16-mixed", scale)
    trainer, model = trainer_of(plugins=[plugin], max_epochs=6), TinyLM()
    trainer.fit(model, loader())
    assert plugin.skipped_steps > 0
    assert scale.scale < 2.0**40
    assert trainer.callback_metrics["skipped_steps"] == plugin.skipped_steps
    assert trainer.callback_metrics["loss"] < 3.3
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_optimizers_that_step_at_different_batches_share_a_loss_scale() -> None:
    class TwoSGD(Manual):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[part].parameters(), lr=0.1) for part in (0, 2)]

    ours, theirs = TwoSGD(), TwoSGD()
    # The scale changes between the batches that the second optimizer adds up.
    plugin = MegatronPrecision("16-mixed", DynamicLossScale(initial=2.0**10, growth_interval=1))
    trainer_of(plugins=[plugin]).fit(ours, make_line_loader())
    trainer_of("auto").fit(theirs, make_line_loader())
    assert plugin.skipped_steps == 0
    for actual, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(actual.float(), expected, rtol=0, atol=2e-3)


def test_unknown_precisions_are_refused() -> None:
    with pytest.raises(
        UnsupportedError, match="precision must be one of 32-true, 64-true, bf16-true, bf16-mixed"
    ):
        trainer_of(precision="16-true")


def test_inputs_of_user_modules_are_cast_and_split_into_microbatches() -> None:
    model = Plain()
    trainer_of(precision="bf16-mixed").fit(model, make_line_loader())
    assert model.inputs == [(torch.bfloat16, 2)] * 8


def test_a_collate_function_may_return_microbatches() -> None:
    def collate(samples: list[tuple[Tensor, ...]]) -> list[Microbatch]:
        parts = [samples[:1], samples[1:]]
        return [
            Microbatch(tuple(map(torch.stack, zip(*part, strict=True))), len(part))
            for part in parts
        ]

    ours, theirs = Plain(), Plain()
    trainer_of(precision="64-true").fit(
        ours, DataLoader(make_line_loader().dataset, batch_size=4, collate_fn=collate)
    )
    trainer_of("auto", precision="64-true").fit(theirs, make_line_loader())
    assert [size for _, size in ours.inputs] == [1, 3] * 4
    for actual, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_batch_that_is_not_a_multiple_of_the_microbatch_is_refused() -> None:
    with pytest.raises(
        ParallelPlanError, match="batch_size .4. of the training dataloader must be a multiple"
    ):
        trainer_of(MegatronStrategy(microbatch_size=3)).fit(Plain(), make_line_loader())


def test_recomputation_and_loss_chunks_need_a_model_of_this_package() -> None:
    with pytest.raises(UnsupportedError, match="recompute .'full'. needs a model of this package"):
        trainer_of(MegatronStrategy(recompute="full")).fit(Plain(), make_line_loader())
    with pytest.raises(UnsupportedError, match="loss_chunk .'auto'. needs a decoder of this pack"):
        trainer_of(MegatronStrategy(loss_chunk="auto")).fit(Plain(), make_line_loader())


def test_recomputation_is_set_on_the_model() -> None:
    model = TinyLM()
    trainer_of(MegatronStrategy(recompute="selective"), fast_dev_run=True).fit(model, loader())
    assert model.net is not None
    assert model.net.recompute.parts == ("selective",)


def test_the_module_has_a_device_mesh_only_during_a_run() -> None:
    meshes: list[Any] = []

    class RecordsMesh(Plain):
        def configure_model(self) -> None:
            meshes.append(self.device_mesh)

    model, trainer = RecordsMesh(), trainer_of(fast_dev_run=True)
    trainer.fit(model, make_line_loader())
    assert isinstance(meshes[0], ParallelMesh)
    assert model.device_mesh is None
    assert isinstance(automatic_optimization(trainer), ScheduledOptimization)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("weights_only", [False, True])
def test_a_trainer_evaluates_and_saves_checkpoints_after_a_fit(
    precision: Any, weights_only: bool, tmp_path: Path
) -> None:
    trainer, model = trainer_of(precision=precision, max_steps=3), TinyLM()
    trainer.fit(model, loader())
    trainer.save_checkpoint(tmp_path / "first", weights_only=weights_only)
    expected = trainer.validate(model, loader(), ckpt_path=tmp_path / "first", verbose=False)
    trainer.save_checkpoint(tmp_path / "second")
    resumed_trainer = trainer_of(precision=precision, max_steps=5, max_epochs=2)
    resumed_trainer.fit(TinyLM(), loader(), ckpt_path=tmp_path / "second")
    assert resumed_trainer.global_step == 5
    moments = [state["exp_avg"] for state in resumed_trainer.optimizers[0].state.values()]
    assert moments
    assert all(moment.any() for moment in moments)
    assert (
        trainer.validate(TinyLM(), loader(), ckpt_path=tmp_path / "second", verbose=False)
        == expected
    )


class BuiltInConstructor(TinyLM):
    """Build the model in the constructor, before a Trainer exists."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GPT(self.config, mesh=ParallelMesh.single(), seed=7)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("make", [TinyLM, BuiltInConstructor])
def test_a_trainer_evaluates_an_earlier_checkpoint_after_a_fit(
    make: type[TinyLM], precision: Any, tmp_path: Path
) -> None:
    first = trainer_of(precision=precision, max_steps=1)
    first.fit(make(), loader())
    first.save_checkpoint(tmp_path / "first")
    trainer, model = trainer_of(precision=precision, max_steps=6), make()
    trainer.fit(model, loader())
    late = trainer.validate(model, loader(), verbose=False)
    early = trainer.validate(model, loader(), ckpt_path=tmp_path / "first", verbose=False)
    assert early != late
    fresh = trainer_of(precision=precision)
    assert early == fresh.validate(make(), loader(), ckpt_path=tmp_path / "first", verbose=False)


def test_resuming_needs_optimizer_states(tmp_path: Path) -> None:
    trainer = trainer_of(max_steps=1)
    trainer.fit(Plain(), make_line_loader())
    trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    second_trainer = trainer_of()
    with pytest.raises(CheckpointMismatchError, match="must hold optimizer states"):
        second_trainer.fit(Plain(), make_line_loader(), ckpt_path=tmp_path / "weights")


def test_a_path_that_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match="is neither"):
        trainer_of().fit(Plain(), make_line_loader(), ckpt_path=tmp_path)


def test_seeds_of_data_loaders_depend_on_the_data_rank_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(os.environ, "PL_SEED_WORKERS", "1")
    strategy = MegatronStrategy(tp=2)
    Trainer(
        accelerator="cpu", devices=4, strategy=strategy, logger=False, enable_checkpointing=False
    )
    draws = []
    for rank in range(4):
        strategy.cluster_environment.set_global_rank(rank)  # type: ignore[union-attr]
        prepared: Any = strategy.process_dataloader(DataLoader(range(4), shuffle=True))
        draws.append((prepared.generator.initial_seed(), prepared.worker_init_fn.keywords["rank"]))
        assert prepared.sampler.generator.initial_seed() not in dict(draws)
    assert draws[0] == draws[1] != draws[2] == draws[3]


@pytest.fixture
def no_frozen_objects() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


class CountFrozenObjects(Callback):
    """Record how many objects are frozen for garbage collection; raise if ``fails``."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.counts = fails, [gc.get_freeze_count()]

    def on_train_batch_start(self, *args: Any) -> None:
        self.counts.append(gc.get_freeze_count())
        if self.fails:
            raise RuntimeError("as asked")


@pytest.mark.parametrize("fails", [False, True])
def test_earlier_objects_are_frozen_for_garbage_collection_during_a_fit(
    fails: bool, no_frozen_objects: None
) -> None:
    counter = CountFrozenObjects(fails)
    with pytest.raises(RuntimeError, match="as asked") if fails else nullcontext():
        trainer_of(callbacks=[counter]).fit(Plain(), make_line_loader())
    before, *during = counter.counts
    assert before == 0
    assert min(during) > 10_000, "objects of torch and of the model"
    assert gc.get_freeze_count() == 0


def test_a_fit_freezes_objects_although_python_starts_with_some_frozen_objects(
    no_frozen_objects: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = gc.get_freeze_count
    # Python 3.12 starts with some hundred frozen objects.
    monkeypatch.setattr(gc, "get_freeze_count", lambda: count() + 375)
    counter = CountFrozenObjects()
    trainer_of(callbacks=[counter]).fit(Plain(), make_line_loader())
    assert min(counter.counts[1:]) > 10_000
    assert gc.get_freeze_count() == 375


def test_a_fit_freezes_no_objects_if_the_program_has_frozen_objects(
    no_frozen_objects: None,
) -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    counter = CountFrozenObjects()
    trainer_of(callbacks=[counter]).fit(Plain(), make_line_loader())
    # The number of frozen objects falls when objects end, and never grows.
    assert max(counter.counts) <= count
    assert 10_000 < gc.get_freeze_count() <= count
