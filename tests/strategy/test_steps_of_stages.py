"""Hooks and steps that change attributes, weights or batches train in stages as in one process.

Steps that cannot run on stages are refused with their line.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy, UnsupportedError
from tests.world import run_world


class Block(nn.Module):
    """A residual block with a scale that hooks set."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.inner.offset = 0.0
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x) + self.shift + float(self.inner.offset)


class Net(L.LightningModule):
    """A classifier with a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inp = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.losses: list[float] = []
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class KeepsWeights(Net):
    """Keep the weights when a validation begins, and give them back at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.counts: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.extend(batch[1].tolist())
        return loss

    def on_validation_epoch_start(self) -> None:
        self.counts.append(len(self.seen))
        self.seen.clear()
        self.kept = [parameter.data.clone() for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.data.mul_(0.5)

    def on_validation_epoch_end(self) -> None:
        for parameter, kept in zip(self.parameters(), self.kept, strict=True):
            parameter.data.copy_(kept)


class SetsAttributes(Net):
    """Set attributes of blocks, of their modules and buffers in hooks, and in the step."""

    def on_train_epoch_start(self) -> None:
        for number, block in enumerate(self.blocks):
            block.scale = 1.0 / (1 + self.current_epoch + number)
            block.shift = torch.full((8,), 0.1 * number, dtype=torch.float64)
        self.blocks[3].inner.offset -= 0.25
        if self.current_epoch:
            del self.blocks[0].scale

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.blocks[2].scale = 0.5 + batch_idx
        return super().training_step(batch, batch_idx)


class ChangesBatch(Net):
    """Change the batch in place, and remove an entry."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].mul_(0.5)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(0.5)
        super().validation_step(batch, batch_idx)


class GroupsBlocks(Net):
    """Build a parameter group for each block, and groups of parameters inside of the blocks."""

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [{"params": list(self.inp.parameters()), "lr": 0.01}]
        for number, block in enumerate(self.blocks):
            rate = 0.1 * 0.5**number
            groups.append({"params": [block.inner[0].weight], "lr": rate})
        biases = [
            parameter
            for block in self.blocks
            for name, parameter in block.named_parameters()
            if name.endswith("bias")
        ]
        groups.append({"params": biases, "lr": 0.2})
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        optimizer.add_param_group({"params": self.head.parameters()})
        return optimizer


class SumsBefore(Net):
    """Sum a value over all ranks before the call of the model."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        total = batch[0].sum()
        dist.all_reduce(total)
        return super().training_step([batch[0] / total, batch[1]], batch_idx)


class SumsAfter(Net):
    """Sum the loss over all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        dist.all_reduce(loss.detach().clone())
        return loss


class TakesItems(Net):
    """Take further data from an iterator of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.more = itertools.cycle([1.0, 2.0, 3.0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch[0] * next(self.more), batch[1]], batch_idx)


class MakesIterator(TakesItems):
    """Make the iterator in the first step."""

    def __init__(self) -> None:
        super().__init__()
        del self.more

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self, "more"):
            self.more = itertools.cycle([1.0, 2.0, 3.0])
        return super().training_step(batch, batch_idx)


class GivesModule(Net):
    """Give a block another module in a hook."""

    def on_train_start(self) -> None:
        self.blocks[0].inner = nn.Identity()


class SetsLate(Net):
    """Set an attribute of a block that has run."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.blocks[0].scale = 0.5
        return loss


class Losses(L.Callback):
    """Record the losses, which the Trainer has on every rank."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.losses.append(float(outputs["loss"]))


#: What the errors of kinds name that cannot train in stages.
REFUSED: dict[type[Net], str] = {
    SumsBefore: r"allreduce at .*: 'dist.all_reduce\(total\)'. Only the last stage",
    SumsAfter: r"allreduce at .*: 'dist.all_reduce\(loss.detach\(\).clone\(\)\)'",
    TakesItems: r"takes an item of self.more at .*next\(self.more\), batch\[1\]\]",
    MakesIterator: r"takes an item of self.more in the step",
    GivesModule: r"'blocks.0' gets a new module .* 'inner'.*self.blocks\[0\].inner = nn.Ident",
    SetsLate: r"'scale' after the block has run.*self.blocks\[0\].scale = 0.5",
}
KINDS: tuple[type[Net], ...] = (KeepsWeights, SetsAttributes, ChangesBatch, GroupsBlocks)


def fit(strategy: Any, kind: type[Net]) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Return the losses, the weights of this rank, and further values that a kind has recorded."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 6, dtype=torch.float64, generator=generator)
    data = TensorDataset(x, torch.randint(3, (16,), generator=generator))
    module = kind()
    trainer = L.Trainer(
        accelerator="cpu", devices=1 if strategy == "auto" else 2, strategy=strategy, precision="64-true",
        max_epochs=2, logger=False, enable_checkpointing=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Losses()],
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
    weights = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    more = [*getattr(module, "counts", ()), float(trainer.callback_metrics["val"])]
    return module.losses, weights, more


def two_stages() -> MegatronStrategy:
    return MegatronStrategy(pp=2, microbatch_size=2, pipeline_plan={"blocks": "blocks"})


def run_two_stages(rank: int, size: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for kind, message in REFUSED.items():
        with pytest.raises(UnsupportedError, match=message):
            fit(two_stages(), kind)
    return {kind.__name__: fit(two_stages(), kind) for kind in KINDS}


@pytest.fixture(scope="module")
def staged() -> list[dict[str, Any]]:
    return run_world(run_two_stages, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_what_hooks_and_steps_change_has_the_same_effect_in_stages(
    staged: list[dict[str, Any]], kind: type[Net]
) -> None:
    losses, weights, more = fit("auto", kind)
    found = set()
    for rank in staged:
        rank_losses, rank_weights, rank_more = rank[kind.__name__]
        assert rank_losses == pytest.approx(losses, abs=1e-10)
        assert rank_more == pytest.approx(more, abs=1e-10)
        for name, weight in rank_weights.items():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-10)
        found |= rank_weights.keys()
    assert found == weights.keys()
