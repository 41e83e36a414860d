"""Habits of users' modules have on several ranks the effect that they have in one process, or are
refused with the line that does it.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.strategy.modules.buffers import check_synchronised_norms
from tests.fits import (
    VOCABULARY,
    Job,
    Language,
    Module,
    Regress,
    Report,
    Tokens,
    Vectors,
    check_equal,
    joined,
    run_job,
    run_jobs,
    run_jobs_on,
)
from tests.world import run_world

PP: dict[str, Any] = {
    "pp": 2,
    "pipeline_plan": {"blocks": "blocks"},
    "job.check_microbatches": True,
}
WHOLE_BATCH = {"microbatch_size": "batch"}
STAGES = ("train", "val")


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


class Net(Module):
    """Blocks between a layer of the first stage and one of the last stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(8, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])


class KeepsWeights(Net):
    """Validate with other weights."""

    def on_validation_epoch_start(self) -> None:
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
    """Change the batch in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].mul_(0.5)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(0.5)
        super().validation_step(batch, batch_idx)


class GroupsBlocks(Net):
    """Build a parameter group for each block, and groups of parameters inside of the blocks."""

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [{"params": list(self.first.parameters()), "lr": 0.01}]
        for number, block in enumerate(self.blocks):
            groups.append({"params": [block.inner[0].weight], "lr": 0.1 * 0.5**number})
        named = [pair for block in self.blocks for pair in block.named_parameters()]
        groups.append({"params": [p for name, p in named if name.endswith("bias")], "lr": 0.2})
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        optimizer.add_param_group({"params": self.last.parameters()})
        return optimizer


class DrawsInValidation(Net):
    """Draw a frozen weight in each validation, that before the training included."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Parameter(torch.zeros(8, dtype=torch.float64), requires_grad=False)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.noise.data.normal_()
        self.log("val_loss", loss, sync_dist=True)


class SumsBefore(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        total = batch[0].sum()
        dist.all_reduce(total)
        return super().training_step([batch[0] / total, batch[1]], batch_idx)


class SumsAfter(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        dist.all_reduce(loss.detach().clone())
        return loss


class TakesItems(Net):
    """Take further data from an iterator of the module, made in the first step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self, "more"):
            self.more = itertools.cycle([1.0, 2.0, 3.0])
        return super().training_step([batch[0] * next(self.more), batch[1]], batch_idx)


class GivesModule(Net):
    def on_train_start(self) -> None:
        self.blocks[0].inner = nn.Identity()


class TakesMadeItems(TakesItems):
    def __init__(self) -> None:
        super().__init__()
        self.more = itertools.cycle([1.0, 2.0, 3.0])


class SetsLate(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.blocks[0].scale = 0.5
        return loss


class Waves(Regress):
    """Learn a filter in the frequency domain, or have a fixed one."""

    def __init__(self, is_learnt: bool = True) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        values = torch.randn(8, dtype=torch.complex64)
        self.filter: Tensor = nn.Parameter(values) if is_learnt else nn.Buffer(values)

    def loss(self, batch: Any) -> Tensor:
        hidden = torch.fft.fft(self.net[0](batch[0])) * self.filter
        return F.mse_loss(self.net[1](torch.fft.ifft(hidden).real), batch[1])


def drop_half(x: Tensor) -> Tensor:
    return F.dropout(torch.ones_like(x), 0.5)


class RandomNet(nn.Module):
    """Draw random numbers in many ways, before and after the row layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(0.5)
        self.chain = nn.Sequential(
            nn.Linear(8, 12), nn.Dropout(0.5), nn.Linear(12, 8), nn.Dropout(0.5)
        )
        self.on_parts: dict[str, Tensor] = {}
        self.on_all: dict[str, Tensor] = {}
        self.repeated: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        heads = hidden.unflatten(-1, (-1, 3)).transpose(1, 2)
        self.on_parts = {
            "module": self.drop(torch.ones_like(hidden)),
            "function": drop_half(hidden),
            "attention": F.scaled_dot_product_attention(
                heads * 0, heads * 0, torch.ones_like(heads), dropout_p=0.5
            ),
            "shape": torch.rand(hidden.shape, dtype=x.dtype),
            "in place": torch.empty_like(hidden).bernoulli_(0.5),
            "one draw for a head": torch.rand(heads.shape[:2], dtype=x.dtype),
        }
        mask = sum(self.on_parts[name] for name in ("module", "function", "shape", "in place"))
        hidden = checkpoint(self.dropped_again, hidden * mask, use_reentrant=False)
        y = self.down(hidden)
        self.on_all = {
            "the same module": self.drop(torch.ones_like(y)),
            "the same function": drop_half(y),
            "path": torch.rand(len(y), 1, 1, dtype=x.dtype),
            "chain": self.chain(x.new_ones(x.shape)),
        }
        return y * self.on_all["path"] + self.on_all["chain"]

    def dropped_again(self, hidden: Tensor) -> Tensor:
        mask = F.dropout(torch.ones_like(hidden), 0.5)
        self.repeated.append(mask)
        return hidden * mask


class Draws(Regress):
    """Keep what each step has drawn."""

    def __init__(self) -> None:
        super().__init__(RandomNet)
        self.outcomes["draws"] = []

    def on_train_batch_end(self, *args: Any) -> None:
        net = self.net
        assert torch.equal(net.repeated[-1], net.repeated[-2]), "recomputation draws the same"
        self.outcomes["draws"].append(
            ({**net.on_parts, "recomputed": net.repeated[-1]}, net.on_all)
        )


class Normalized(Regress):
    """Have a batch norm, and buffers that are written in place, replaced, and never changed."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)))
        self.register_buffer("level", torch.zeros(1))
        self.register_buffer("late", torch.zeros(2), persistent=False)
        self.register_buffer("table", torch.arange(4.0))
        self.kept: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.level.mul_(0.9).add_(batch[0].mean().detach(), alpha=0.1)
        if self.global_step >= 2:
            self.late = self.late + batch[0].detach().amax()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) + self.level.sum() + self.late.sum())

    def keep(self, *_: Any) -> None:
        self.kept.append({name: buffer.clone() for name, buffer in self.named_buffers()})

    on_train_batch_end: Any = keep
    on_validation_epoch_end: Any = keep

    def on_fit_end(self) -> None:
        self.keep()
        self.outcomes = {"kept": self.kept, "after": self.kept.pop()}


class Contrast(Net):
    """Contrast each sample with all samples of the batch, including those of other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, list[Any]] = defaultdict(list)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        strategy = self.trainer.strategy
        strategy.barrier("before the model")
        early = self.all_gather(batch[0][:, 0])
        features, views = F.normalize(self(torch.stack(batch, 1)), dim=-1).unbind(1)
        gathered = self.all_gather({"features": [features, views], "also": 2}, sync_grads=True)
        strategy.barrier("after the model")
        all_features, all_views = (part.flatten(0, -2) for part in gathered["features"])
        loss = F.cross_entropy(all_features @ all_views.t() / 0.3, torch.arange(len(all_views)))
        self.outcomes["early"].append(sorted(early.flatten().tolist()))
        total = strategy.reduce(features.detach().sum(), reduce_op="sum")
        self.outcomes["total"].append(float(total))
        first = float(batch[0][0, 0])
        self.outcomes["received"].append(strategy.broadcast({"from": first})["from"])
        agreed = strategy.reduce_boolean_decision(first > 0.2, all=False)
        self.outcomes["per rank"].append((gathered["also"].flatten().tolist(), agreed))
        self.log("loss", loss, sync_dist=True)
        return loss


class KeepsState(Language):
    """Keep values in the usual ways in every kind of step, and log them when the epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.array, self.counter = np.zeros(VOCABULARY), Counter[str]()
        accuracy = {"acc": MulticlassAccuracy(VOCABULARY, average="micro")}
        self.metrics = nn.ModuleDict({f"of_{s}": MetricCollection(accuracy) for s in STAGES})
        self.losses: dict[str, list[Tensor]] = {stage: [] for stage in STAGES}
        # In training, buffers are those of the first data rank, as under ddp.
        self.register_buffer("val_histogram", torch.zeros(VOCABULARY))
        self.train_histogram = torch.zeros(VOCABULARY)
        self.train_meter, self.val_meter = (SimpleNamespace(sum=0.0) for _ in STAGES)
        self.train_total, self.val_total = 0.0, 0.0
        self.samples = nn.ModuleDict({f"of_{s}": SumMetric() for s in STAGES})
        self.train_begun, self.val_begun = (
            SimpleNamespace(number=0, rows=[[0]], counts=Counter[str](), tensor=torch.zeros(1))
            for _ in STAGES
        )
        self.outcomes["within"] = []

    def step(self, batch: dict[str, Tensor], stage: str) -> dict[str, Tensor]:
        assert self.model is not None, "configure_model ran"
        begun, size = getattr(self, f"{stage}_begun"), len(batch["tokens"])
        begun.number += size
        begun.rows[0][0] += size
        begun.counts[stage] += size
        begun.tensor.add_(size)
        self.samples[f"of_{stage}"].update(size)
        losses = self.model(batch["tokens"], batch["labels"])
        labels, loss = batch["labels"].reshape(-1), losses.mean()
        # A token with a small loss counts as a correct prediction.
        is_right = losses.detach().reshape(-1) < 5.1
        classes = torch.where(is_right, labels, (labels + 1) % VOCABULARY)
        self.metrics[f"of_{stage}"].update(classes, labels)
        self.losses[stage].append(losses.detach())
        self.counter[stage] += len(labels)
        total = float(loss.detach()) * len(labels)
        getattr(self, f"{stage}_meter").sum += total
        setattr(self, f"{stage}_total", getattr(self, f"{stage}_total") + total)
        histogram = getattr(self, f"{stage}_histogram")
        histogram.add_(torch.bincount(labels, minlength=VOCABULARY))
        self.array[labels.numpy()] = 1
        return {"loss": loss, "classes": classes.reshape(-1, losses.shape[-1])}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.step(batch, "train")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.step(batch, "val")

    def finish(self, stage: str) -> None:
        count, meter = self.counter.pop(stage), getattr(self, f"{stage}_meter")
        means = {
            "mean": torch.cat(self.losses[stage]).mean(),
            "meter": torch.tensor(meter.sum / count, dtype=torch.float64),
            "total": torch.tensor(getattr(self, f"{stage}_total") / count, dtype=torch.float64),
            **self.metrics[f"of_{stage}"].compute(),
            "samples": self.samples[f"of_{stage}"].compute(),
        }
        for name, value in means.items():
            self.log(f"{stage}_{name}", value.double(), sync_dist=True)
        histogram = getattr(self, f"{stage}_histogram")[: VOCABULARY // 2].sum() + 0.0
        begun = getattr(self, f"{stage}_begun")
        sums = {
            "histogram": histogram,
            "begun": float(begun.number),
            "begun_rows": float(begun.rows[0][0]),
            "begun_counts": float(begun.counts[stage]),
            "begun_tensor": begun.tensor.sum(),
        }
        for name, value in sums.items():
            self.log(f"{stage}_{name}", value, sync_dist=True, reduce_fx="sum")
        self.outcomes[stage] = (count, len(self.losses[stage]), self.array.tolist())
        self.metrics[f"of_{stage}"].reset()
        self.losses[stage].clear()
        setattr(self, f"{stage}_meter", SimpleNamespace(sum=0.0))
        setattr(self, f"{stage}_total", 0.0)
        begun.number, begun.rows[0][0] = 0, 0
        begun.counts.clear()
        begun.tensor.zero_()
        self.samples[f"of_{stage}"].reset()

    def on_train_epoch_end(self) -> None:
        self.finish("train")

    def on_validation_epoch_end(self) -> None:
        self.finish("val")

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.outcomes["within"].append((len(self.losses["val"]), outputs["classes"].tolist()))


def job(
    model: Any, strategy: Any, shape: tuple[int, ...] = (8,), epochs: int = 2, **options: Any
) -> Job:
    return Job(
        model, strategy, steps=-1, data=partial(Vectors, shape, 16),
        validation=partial(Vectors, shape, 16),
        trainer={"max_epochs": epochs, "gradient_clip_val": None, **options},
    )  # fmt: skip


#: Modules that train in stages or on data ranks as in one process.
EQUAL = {
    "keeps weights": job(KeepsWeights, PP),
    "sets attributes": job(SetsAttributes, PP),
    "changes the batch": job(ChangesBatch, PP),
    "groups blocks": job(GroupsBlocks, PP),
    "draws in validation": job(DrawsInValidation, {**PP, "job.check_microbatches": False}),
    "complex parameters": job(Waves, {}, gradient_clip_val=0.01),
    "complex buffers": job(partial(Waves, False), {}),
}
#: What the errors of modules name that cannot train in stages.
REFUSED: dict[type[Net], str] = {
    SumsBefore: r"allreduce at .*\('dist.all_reduce\(total\)'\). Only the last stage",
    SumsAfter: r"allreduce at .*\('dist.all_reduce\(loss.detach\(\).clone\(\)\)'",
    TakesMadeItems: r"takes an item of self.more at .*next\(self.more\), batch\[1\]\]",
    TakesItems: r"takes an item of self.more in the step",
    GivesModule: r"'blocks.0' gets a new module .* 'inner'.*self.blocks\[0\].inner = nn.Ident",
    SetsLate: r"'scale' after the block has run.*self.blocks\[0\].scale = 0.5",
}
CUT = {"net.up": "column", "net.down": "row", "net.chain.0": "column", "net.chain.2": "row"}
DRAWN = {**WHOLE_BATCH, "tp": 2, "tensor_parallel_plan": CUT, "job.check_microbatches": True}
#: Modules with buffers, and a draw on the parts of a divided module.
OTHERS = {
    "draws": job(Draws, DRAWN, (6, 8), epochs=1),
    **{
        (kind, batches): job(Normalized, strategy, accumulate_grad_batches=batches)
        for kind, strategy in (("ddp", "ddp"), ("dp2", WHOLE_BATCH))
        for batches in (1, 3)
    },
}
STATES = {
    "tp2 pp2": {"tp": 2, "pp": 2, "microbatch_size": 8},
    "pp2 zb-v dp2": {"pp": 2, "vpp": 2, "schedule": "zb-v", "microbatch_size": 1},
}
CONTRASTS = {
    "tp2 dp2": {**WHOLE_BATCH, "tp": 2, "tensor_parallel_plan": {"first": "column_gather"}},
    "pp2 dp2": {**WHOLE_BATCH, "pp": 2, "pipeline_plan": {"blocks": "blocks"}},
}


def stops() -> list[EarlyStopping]:
    return [EarlyStopping("val_mean", patience=0, min_delta=0.15)]


def state_job(strategy: Any) -> Job:
    return Job(
        KeepsState, strategy, steps=-1, data=partial(Tokens, 16), validation=partial(Tokens, 16), callbacks=stops,
        trainer={"max_epochs": 4, "gradient_clip_val": None},
    )  # fmt: skip


def two_ranks(rank: int, size: int) -> dict[Any, Report]:
    for kind, message in REFUSED.items():
        with pytest.raises(UnsupportedError, match=message):
            run_job(job(kind, PP), size)
    return run_jobs(rank, size, {**EQUAL, **OTHERS})


@pytest.fixture(scope="module")
def of_two() -> dict[Any, list[Report]]:
    """Run the jobs of two ranks; modules that cannot train in stages are refused on every rank."""
    ranks = run_world(two_ranks, 2)
    return {name: [reports[name] for reports in ranks] for name in ranks[0]}


@pytest.fixture(scope="module")
def of_four() -> dict[Any, list[Report]]:
    states = {name: state_job(layout) for name, layout in STATES.items()}
    contrasts = {("contrast", name): job(Contrast, layout) for name, layout in CONTRASTS.items()}
    return run_jobs_on(4, states | contrasts)


@pytest.mark.parametrize("name", EQUAL)
def test_modules_train_on_two_ranks_as_in_one_process(of_two, name):
    twin = run_job(EQUAL[name].twin())
    # A complex64 weight stays one in double precision.
    tolerance = 1e-7 if "complex" in name else 1e-10
    if name != "draws in validation":
        check_equal(of_two[name], twin, tolerance)
    for report in of_two[name]:
        assert report.losses == pytest.approx(twin.losses, abs=tolerance)
        assert report.metrics == pytest.approx(twin.metrics, rel=1e-6)
        assert report.outcomes == twin.outcomes


def test_complex_parameters_are_refused_in_mixed_precision() -> None:
    mixed = replace(job(Waves, {}), precision="bf16-mixed")
    with pytest.raises(UnsupportedError, match="'filter' is torch.complex64"):
        run_job(mixed)


def test_ranks_of_tp_draw_different_numbers_for_their_features_and_equal_numbers_otherwise(of_two):
    first, second = (report.outcomes["draws"] for report in of_two["draws"])
    for step, ((parts, of_all), (others, of_all_others)) in enumerate(
        zip(first, second, strict=True)
    ):
        for name, value in parts.items():
            assert not torch.equal(value, others[name]), f"step {step}: {name}"
        for name, value in of_all.items():
            assert torch.equal(value, of_all_others[name]), f"step {step}: {name}"
    for name, value in first[0][0].items():
        assert not torch.equal(value, first[1][0][name]), f"{name} repeats in the next step"


@pytest.mark.parametrize("batches", [1, 3])
def test_buffers_are_those_of_the_first_rank_when_they_are_under_ddp(of_two, batches):
    plain, ours = of_two["ddp", batches], of_two["dp2", batches]
    for expected, actual in zip(plain, ours, strict=True):
        torch.testing.assert_close(actual.outcomes["kept"], expected.outcomes["kept"])
        # Lightning keeps its sums over an epoch in float32.
        assert actual.metrics == pytest.approx(expected.metrics, rel=1e-6)
        torch.testing.assert_close(actual.outcomes["after"], plain[0].outcomes["after"])
    first, second = (report.outcomes["kept"][1]["level"] for report in plain)
    assert first != second, "without a broadcast the ranks' own buffers differ"
    for name, weight in joined(ours).items():
        torch.testing.assert_close(weight, joined(plain)[name])


def test_state_kept_by_steps_reaches_hooks_loggers_and_monitors_on_every_rank(of_four):
    twin = run_job(state_job(None))
    assert 0.01 < twin.metrics["val_acc"] < 0.99
    assert len(twin.losses) < 8, "early stopping looks at what steps have kept"
    for layout in STATES:
        within = [seen[0] for seen in of_four[layout][-1].outcomes["within"]]
        for report in of_four[layout]:
            ours, expected = dict(report.metrics), dict(twin.metrics)
            if "dp2" in layout:
                # Before a batch, a buffer becomes that of the first data rank, as under ddp.
                for name in ("train_histogram", "val_histogram"):
                    ours.pop(name)
                    expected.pop(name)
                assert [seen[0] for seen in report.outcomes["within"]] == within
            else:
                assert report.outcomes == twin.outcomes
            assert ours == pytest.approx(expected, rel=1e-9), layout
            assert report.losses == pytest.approx(twin.losses, abs=1e-10), layout


@pytest.mark.parametrize("layout", CONTRASTS)
def test_steps_gather_reduce_and_broadcast_over_the_data_ranks(of_four, layout):
    reports = of_four["contrast", layout]
    twin = run_job(job(Contrast, None))
    check_equal(reports, twin)
    kept = [report.outcomes for report in reports if report.outcomes]
    assert len(kept) >= 2
    first_two = [Vectors((8,))[index][0][0] > 0.2 for index in range(2)]
    for outcomes in kept:
        for name in ("early", "total", "received"):
            expected = twin.outcomes[name]
            assert outcomes[name] == [pytest.approx(value) for value in expected], name
        assert outcomes["per rank"] == [([2, 2], any(first_two))] * len(outcomes["early"])


def test_sync_batch_norm_is_refused_if_ranks_hold_copies_of_the_data() -> None:
    two, four = SimpleNamespace(size=2), SimpleNamespace(size=4)
    mesh: Any = SimpleNamespace(data=two, world=four, tp=two, pp=four)
    words = r"SyncBatchNorm over all 4 ranks needs .*'0' would count"
    with pytest.raises(UnsupportedError, match=words):
        check_synchronised_norms(nn.Sequential(nn.SyncBatchNorm(4)), mesh)
