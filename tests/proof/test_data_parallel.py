"""Tests that any division of gradients, main parameters and parameters trains as one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_megatron import MegatronStrategy
from tests.proof.training import Job, Report, train
from tests.sweeps import chosen
from tests.world import run_world

pytestmark = pytest.mark.slow

#: Buckets of a few hundred elements, so that every model has many.
SMALL = {"bucket_size": 500}
DIVISIONS: dict[str, dict[str, Any]] = {
    "dp4": {},
    "dp4, many buckets": SMALL,
    "dp4, gathered beside the forward pass": SMALL | {"overlap_parameters": True},
    "dp4, nothing overlaps": SMALL | {"overlap_gradients": False, "overlap_parameters": False},
    "dp4, gradients are checked": SMALL | {"check_gradients": True},
    "dp4, zero 0": SMALL | {"zero": 0},
    "dp4, whole parameters": {"optimizer_slices": "parameters"},
    "pp2 dp2, many buckets": SMALL | {"pp": 2, "overlap_parameters": True},
    "pp2 dp2, zero 0": SMALL | {"pp": 2, "zero": 0},
    "pp2 dp2, whole parameters": {"pp": 2, "optimizer_slices": "parameters"},
    "pp2 vpp2 dp2, many buckets": SMALL | {"pp": 2, "vpp": 2, "overlap_parameters": True},
    "pp2 zb-v dp2, many buckets": SMALL
    | {"pp": 2, "vpp": 2, "schedule": "zb-v", "overlap_parameters": True},
    "pp2 zb-h1 dp2, gradients are checked": SMALL
    | {"pp": 2, "schedule": "zb-h1", "check_gradients": True},
    "tp2 dp2 sp, many buckets": SMALL
    | {"tp": 2, "overlap_parameters": True, "overlap_tensor_parallel": True},
    "tp2 dp2 sp, whole parameters": {"tp": 2, "optimizer_slices": "parameters"},
    "tp2 dp2 sp, zero 0": SMALL | {"tp": 2, "zero": 0},
    "tp2 pp2": SMALL | {"tp": 2, "pp": 2},
}
KINDS = ("gpt2-tied", "llama-untied")
#: Divisions that train both kinds: one of each way to divide. Other options of divisions do not
#: depend on the parameters of a model.
OF_BOTH = {
    "dp4, gathered beside the forward pass",
    "dp4, zero 0",
    "dp4, whole parameters",
    "pp2 dp2, many buckets",
    "pp2 zb-v dp2, many buckets",
    "tp2 dp2 sp, many buckets",
}
JOBS = chosen(
    {
        (name, kind): Job(kind, layout=options, compares=kind == KINDS[0] and name in OF_BOTH)
        for name, options in DIVISIONS.items()
        for kind in (KINDS if name in OF_BOTH else KINDS[:1])
    },
    ("dp4, gathered beside the forward pass", "llama-untied"),
    ("dp4, nothing overlaps", "gpt2-tied"),
    ("dp4, zero 0", "gpt2-tied"),
    ("pp2 dp2, whole parameters", "gpt2-tied"),
    ("pp2 zb-v dp2, many buckets", "gpt2-tied"),
    ("pp2 zb-h1 dp2, gradients are checked", "gpt2-tied"),
    ("tp2 dp2 sp, many buckets", "llama-untied"),
)


class Part(nn.Module):
    """Two layers, and a spare layer that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.spare = nn.Linear(6, 16), nn.Linear(16, 2), nn.Linear(6, 16)

    def forward(self, x: Tensor, with_spare: bool) -> Tensor:
        hidden = self.first(x) + self.spare(x) if with_spare else self.first(x)
        return self.second(hidden.tanh())


class Plain(pl.LightningModule):
    """Train torch.nn layers of which one may be unused, with a given optimizer."""

    def __init__(
        self, make: Callable[[Iterable[Any]], torch.optim.Optimizer], use_spare: bool = True
    ) -> None:
        super().__init__()
        self.make, self.use_spare = make, use_spare
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if not hasattr(self, "part"):
            generator = torch.Generator().manual_seed(3)
            self.part = Part().double()
            with torch.no_grad():
                for parameter in self.part.parameters():
                    parameter.copy_(
                        torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4
                    )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.part(x, self.use_spare), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return self.make(self.part.parameters())


class TwoOptimizers(Plain):
    """Step two optimizers in turn by manual optimization, each with the layers of the other off."""

    def __init__(self) -> None:
        super().__init__(torch.optim.SGD)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = nn.functional.mse_loss(self.part(x, True), y)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(
            [*self.part.first.parameters(), *self.part.spare.parameters()], lr=0.05
        )
        return [first, torch.optim.SGD(self.part.second.parameters(), lr=0.1, momentum=0.9)]


class Unfreeze(pl.Callback):
    """Add a frozen layer to the optimizer after the first epoch, as Lightning's finetuning
    callbacks do.
    """

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        part: Any = pl_module.part
        part.spare.requires_grad_(trainer.current_epoch > 0)
        if trainer.current_epoch == 1:
            trainer.optimizers[0].add_param_group(
                {"params": list(part.spare.parameters()), "lr": 0.02}
            )


OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


def _fit(
    module: Plain, size: int, strategy: Any, *callbacks: pl.Callback, epochs: int = 2
) -> Report:
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=strategy,
        precision="64-true",
        max_epochs=epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 6, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.stack([x.sum(1), x[:, 0] * 2], 1))
    sampler = DistributedSampler(data, num_replicas=size, rank=trainer.global_rank, shuffle=False)
    trainer.fit(module, DataLoader(data, batch_size=8 // size, sampler=sampler))
    return Report(
        module.losses, [], {name: p.detach().clone() for name, p in module.part.named_parameters()}
    )


def _plain_reports(size: int) -> dict[str, Report]:
    def strategy(**options: Any) -> Any:
        return MegatronStrategy(microbatch_size=2, **options) if size > 1 else "auto"

    reports = {
        name: _fit(Plain(make), size, strategy(**SMALL)) for name, make in OPTIMIZERS.items()
    }
    reports["adamw, zero 0"] = _fit(Plain(OPTIMIZERS["fused adamw"]), size, strategy(zero=0))
    reports["unused"] = _fit(Plain(OPTIMIZERS["fused adamw"], use_spare=False), size, strategy())
    reports["two optimizers"] = _fit(TwoOptimizers(), size, strategy())
    frozen = Plain(lambda p: torch.optim.AdamW(list(p)[:4], lr=0.05))
    reports["unfrozen later"] = _fit(frozen, size, strategy(), Unfreeze(), epochs=3)
    return reports


def _train_all(rank: int, size: int) -> tuple[dict[tuple[str, str], Report], dict[str, Report]]:
    return {name: train(job, size, "cpu") for name, job in JOBS.items()}, _plain_reports(size)


@pytest.fixture(scope="module")
def reports() -> list[tuple[dict[tuple[str, str], Report], dict[str, Report]]]:
    return run_world(_train_all, 4)


@pytest.fixture(scope="module")
def twins() -> dict[str, Report]:
    return {kind: train(Job(kind, "64-true", None), 1, "cpu") for kind in KINDS}


@pytest.fixture(scope="module")
def plain_twins() -> dict[str, Report]:
    return _plain_reports(1)


@pytest.mark.parametrize(("name", "kind"), JOBS)
def test_every_division_trains_as_one_process(
    name: str, kind: str, reports: Any, twins: dict[str, Report]
) -> None:
    assert twins[kind].losses[-1] < twins[kind].losses[0]
    for trained, _ in reports:
        report = trained[name, kind]
        torch.testing.assert_close(report.losses, twins[kind].losses, rtol=0, atol=1e-10)
        torch.testing.assert_close(report.norms, twins[kind].norms, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "name", [*OPTIMIZERS, "adamw, zero 0", "unused", "two optimizers", "unfrozen later"]
)
def test_every_optimizer_trains_as_one_process(
    name: str, reports: Any, plain_twins: dict[str, Report]
) -> None:
    twin = plain_twins[name]
    assert twin.losses[-1] < twin.losses[0]
    for _, plain in reports:
        torch.testing.assert_close(plain[name].losses, twin.losses, rtol=0, atol=1e-9)
        for key, weight in twin.weights.items():
            torch.testing.assert_close(
                plain[name].weights[key], weight, rtol=0, atol=1e-9, msg=f"{name}: {key}"
            )


def _resumed_job(name: str) -> Job:
    return Job("gpt2-tied", layout=DIVISIONS[name], compares=False)


RESUMED = ("dp4, many buckets", "dp4, zero 0", "dp4, whole parameters", "pp2 dp2, many buckets")
#: Division that saves, and division that continues; the few cases form a cycle.
WAYS = chosen(
    [(saver, name) for saver in RESUMED for name in RESUMED],
    ("dp4, many buckets", "pp2 dp2, many buckets"),
    ("pp2 dp2, many buckets", "dp4, zero 0"),
    ("dp4, zero 0", "dp4, whole parameters"),
    ("dp4, whole parameters", "dp4, many buckets"),
)


def _save_and_load(rank: int, size: int, folder: str) -> dict[str, Report]:
    for saver in RESUMED:
        train(_resumed_job(saver), size, "cpu", f"{folder}/{saver}", steps=2)
    return {
        f"{saver} -> {name}": train(
            _resumed_job(name), size, "cpu", resume_from=f"{folder}/{saver}"
        )
        for saver, name in WAYS
    }


def test_a_checkpoint_of_any_division_continues_under_any_other(
    tmp_path: Path, twins: dict[str, Report]
) -> None:
    for reports in run_world(_save_and_load, 4, str(tmp_path)):
        for name, report in reports.items():
            expected = twins["gpt2-tied"].losses[2:]
            torch.testing.assert_close(report.losses, expected, rtol=0, atol=1e-10, msg=name)
