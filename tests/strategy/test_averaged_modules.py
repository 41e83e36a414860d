"""An ``AveragedModel`` of a part of a module averages as in one process, or is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader

from lightning_megatron.checkpoint import read_full
from lightning_megatron.checkpoint.consolidate import MODEL
from tests.oracles import assert_equal
from tests.strategy.replica_runs import Batches, Outcome, Regress, run
from tests.world import run_world

TP = {
    "tp": 2,
    "tensor_parallel_plan": {
        "net.blocks.*.0": "column",
        "net.blocks.*.2": "row",
        "net.last": "column_gather",
    },
}
PP = {"pp": 2, "pipeline_plan": {"net.blocks": "blocks"}, "microbatch_size": 2}
LAYOUTS = {"tp": TP, "pp": PP}


class Net(nn.Module):
    """Blocks between a module of the first stage and one of the last stage, with a buffer each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(6).requires_grad_(False).eval())
        self.blocks = nn.Sequential(*(self.block() for _ in range(2)))
        self.last = nn.Linear(8, 8)

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))

    def forward(self, x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
        return last(self.blocks(first(x)))


class Averaged(Regress):
    """Average a part of the network, validate with the average, and save all at the end.

    Args:
        when: Hook that makes the average.
        part: Name of the part.
        uses: Whether validation calls the average in place of the part.
        updates: Name of the part that updates the average; None means the part itself.
        is_listed: Whether the average is in a list.
    """

    def __init__(
        self,
        when: str,
        part: str,
        uses: bool,
        updates: str | None = None,
        is_listed: bool = False,
    ) -> None:
        super().__init__(Net)
        self.when, self.part, self.uses, self.updates = when, part, uses, updates or part
        self.is_listed = is_listed
        self.path: Path | None = None
        self.make("__init__")

    def make(self, when: str) -> None:
        if when == self.when and not hasattr(self, "average"):
            average = AveragedModel(self.named(self.part), avg_fn=get_ema_avg_fn(0.5))
            average.requires_grad_(False)
            self.average = nn.ModuleList([average]) if self.is_listed else average

    @property
    def only_average(self) -> Any:
        return self.average[0] if self.is_listed else self.average

    def named(self, name: str) -> Any:
        first, _, index = name.partition(".")
        part = getattr(self.net, first)
        return part[int(index)] if index else part

    def configure_model(self) -> None:
        self.make("configure_model")

    def on_fit_start(self) -> None:
        self.make("on_fit_start")

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0], self.net.first, self.net.last), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        self.only_average.update_parameters(self.named(self.updates))

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        first, last = (
            self.only_average if self.uses and self.part == name else getattr(self.net, name)
            for name in ("first", "last")
        )
        self.log("validated", F.mse_loss(self.net(batch[0], first, last), batch[1]))

    def val_dataloader(self) -> DataLoader:
        return Batches(self, 1, 1)

    def on_validation_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["validated"]))

    def on_train_end(self) -> None:
        if self.path is not None:
            self.trainer.save_checkpoint(self.path)


#: Layout and arguments of the modules.
EQUAL: dict[str, tuple[str, tuple[Any, ...]]] = {
    "sharded": ("tp", ("__init__", "last", True)),
    "sharded later": ("tp", ("on_fit_start", "last", True)),
    "last stage": ("pp", ("__init__", "last", True)),
    "first stage": ("pp", ("configure_model", "first", True)),
    "last stage later": ("pp", ("on_fit_start", "last", False)),
    "first stage later": ("pp", ("on_fit_start", "first", False)),
    "first block": ("pp", ("__init__", "blocks.0", False)),
    "in a list": ("pp", ("__init__", "last", True, None, True)),
    "last block": ("pp", ("__init__", "blocks.1", False)),
}
REFUSED: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "called copy": (
        "pp",
        ("on_fit_start", "last", True),
        r"copy of 'net.last' cannot be called in a step with pp .*test_averaged_modules.py:\d+",
    ),
    "blocks": (
        "pp",
        ("__init__", "blocks", False),
        r"AveragedModel 'average' cannot average 'net.blocks' with pp above 1",
    ),
    "other module": (
        "tp",
        ("__init__", "last", False, "blocks.0"),
        r"AveragedModel 'average' cannot average this module.*\(4, 8\).*\(6, 8\)",
    ),
    "other stage": (
        "pp",
        ("__init__", "last", False, "first"),
        r"AveragedModel 'average' cannot average this module.*'average.module'",
    ),
}


def train(rank: int, size: int, folder: Path) -> dict[str, Outcome]:
    outcomes = {}
    for name, (layout, arguments, *_) in {**EQUAL, **REFUSED}.items():
        module = Averaged(*arguments)
        # What a hook creates has no known place in a checkpoint.
        module.path = folder / name if arguments[0] != "on_fit_start" else None
        outcomes[name] = run(module, size, LAYOUTS[layout])
    return outcomes


def test_averages_of_parts_equal_those_of_one_process_or_are_refused(tmp_path: Path) -> None:
    ranks = run_world(train, 2, tmp_path)
    for name, (_, arguments) in EQUAL.items():
        module = Averaged(*arguments)
        expected = run(module)
        assert not expected.error
        for outcomes in ranks:
            assert not outcomes[name].error, f"{name}: {outcomes[name].error}"
            assert outcomes[name].losses == pytest.approx(expected.losses, rel=1e-10), name
        if arguments[0] == "on_fit_start":
            continue
        saved = {
            key.removeprefix(MODEL): tensor
            for key, tensor in read_full(tmp_path / name).items()
            if key.startswith(MODEL)
        }
        assert saved.keys() == module.state_dict().keys(), name
        for key, tensor in module.state_dict().items():
            assert_equal(saved[key].double(), tensor.double(), f"{name}: {key}")
    for outcomes in ranks:
        for name, (_, _, message) in REFUSED.items():
            assert re.search(message, outcomes[name].error), f"{name}: {outcomes[name].error}"
