"""Tests that steps that count tokens take the mean over the tokens of all ranks in every layout.

Each step ignores different labels: those of complete ranks, of complete microbatches and once all
labels. The twin is a plain loop in one process without Lightning.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_megatron import GPT, CausalLM, GPTConfig, MegatronStrategy
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.plan.layout import ParallelLayout
from tests.sweeps import chosen
from tests.world import run_world

STEPS, GLOBAL_BATCH, SEQUENCE, VOCABULARY = 5, 8, 12, 60
CONFIG = GPTConfig.llama(
    vocab_size=VOCABULARY,
    max_seq_length=SEQUENCE,
    num_layers=4,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=24,
    tie_embeddings=True,
)
#: Samples of each step that have no label. A rank of dp=4 has samples r and r + 4; microbatches
#: hold two samples.
EMPTY = (
    {1, 5},  # one rank of four
    {4, 6, 7},  # the last microbatch of one rank alone, and of one rank of two
    set(range(8)),  # all
    set(range(1, 8)),  # all but one sample
    {2, 3, 6},  # a microbatch in the middle, one rank of four
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4": {},
    "tp2 pp2": {"tp": 2, "pp": 2, "sequence_parallel": False},
    "tp2 dp2 +sp": {"tp": 2, "sequence_parallel": True},
    "pp2 dp2": {"pp": 2},
    "pp2 vpp2 dp2": {"pp": 2, "vpp": 2},
    "pp2 zb-v dp2": {"pp": 2, "vpp": 2, "schedule": "zb-v"},
    # Ranks that share rows count each token once, also if a rank has no label: Megatron-LM
    # scaled losses and gradients by cp (issues 673 and 906), or took the mean of nothing (1764).
    "cp2 dp2": {"cp": 2},
    "cp2 tp2+sp ring": {"cp": 2, "tp": 2, "cp_transport": "ring"},
    "cp2 pp2 all_gather": {"cp": 2, "pp": 2, "cp_transport": "all_gather"},
}


@dataclass(frozen=True)
class Job:
    """Training run: arguments of the strategy, number of accumulated batches, and the module."""

    layout: dict[str, Any]
    accumulate: int = 1
    is_causal_lm: bool = False


JOBS = chosen(
    {
        **{name: Job(layout) for name, layout in LAYOUTS.items()},
        **{
            f"{name}, accumulated": Job(LAYOUTS[name], accumulate=2)
            for name in ("pp2 dp2", "tp2 pp2")
        },
        **{
            f"dp4, zero {zero}, accumulated": Job(
                {"zero": zero, "microbatch_size": 1}, accumulate=2
            )
            for zero in (0, 1)
        },
        **{f"{name}, zero 0": Job(LAYOUTS[name] | {"zero": 0}) for name in ("dp4", "pp2 dp2")},
        **{
            f"{name}, CausalLM": Job(LAYOUTS[name], is_causal_lm=True)
            for name in ("dp4", "pp2 dp2", "cp2 dp2")
        },
    },
    "tp2 dp2 +sp",
    "pp2 zb-v dp2",
    "cp2 tp2+sp ring",
    "tp2 pp2, accumulated",
    "dp4, zero 0, accumulated",
    "cp2 dp2, CausalLM",
)


@dataclass
class Report:
    """Results of a run: losses by batch, gradient norms by step, and weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    epoch_loss: float = 0.0
    val_loss: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)
    pieces: dict[str, tuple[tuple[int, ...], list[Any]]] = field(default_factory=dict)


def join_weights(ranks: list[Report]) -> dict[str, Tensor]:
    """Put the weights of all ranks together; copies must be equal."""
    weights: dict[str, Tensor] = {}
    for report in ranks:
        for name, (shape, pieces) in report.pieces.items():
            full = weights.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
            for offsets, piece in pieces:
                part = full[
                    tuple(
                        slice(start, start + size)
                        for start, size in zip(offsets, piece.shape, strict=True)
                    )
                ]
                assert part.isnan().all() or torch.equal(part, piece), name
                part.copy_(piece)
    return weights


class Texts(Dataset):
    """Padded sequences of different lengths; some labels inside are ignored as well, and some
    samples have no label.
    """

    def __len__(self) -> int:
        return STEPS * GLOBAL_BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, VOCABULARY, (SEQUENCE + 1,), generator=generator)
        length = int(torch.randint(2, SEQUENCE + 1, (), generator=generator))
        labels = tokens[1:].masked_fill(torch.rand(SEQUENCE, generator=generator) < 0.3, -100)
        step, sample = divmod(index, GLOBAL_BATCH)
        labels[0 if sample in EMPTY[step] else length :] = -100
        inputs = tokens[:-1].clone()
        inputs[length:] = 0
        return {"tokens": inputs, "labels": labels}


def optimizer_of(parameters: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Return AdamW and its schedule; a large eps keeps gradients that are zero except for
    rounding from becoming full steps.
    """
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


class Counting(pl.LightningModule):
    """Return means over tokens, which are NaN for microbatches without labels."""

    def __init__(self) -> None:
        super().__init__()
        self.model: GPT | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPT(CONFIG, mesh=self.device_mesh, seed=1234)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        assert self.model is not None, "configure_model ran"
        num_tokens = (batch["labels"] != -100).sum()
        loss = self.model(batch["tokens"], batch["labels"]).sum() / num_tokens
        self.log("train_loss", loss, sync_dist=True)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss, "num_tokens": num_tokens}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        assert self.model is not None, "configure_model ran"
        num_tokens = (batch["labels"] != -100).sum()
        self.log(
            "val_loss",
            self.model(batch["tokens"], batch["labels"]).sum() / num_tokens,
            sync_dist=True,
        )
        return {"num_tokens": num_tokens}

    def configure_optimizers(self) -> Any:
        optimizer, schedule = optimizer_of(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SeededCausalLM(CausalLM):
    """The package's own module with the same optimizer and initial weights."""

    def __init__(self) -> None:
        super().__init__(CONFIG)

    configure_optimizers = Counting.configure_optimizers

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPT(CONFIG, mesh=self.device_mesh, seed=1234)


class Record(pl.Callback):
    """Record losses and norms."""

    def __init__(self) -> None:
        self.report = Report()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        metrics = trainer.callback_metrics
        self.report.losses.append(float(metrics["train_loss"]))
        both = float(metrics.get("both_step", metrics["train_loss"]))
        assert both == pytest.approx(self.report.losses[-1], abs=1e-12)
        if trainer.strategy.layout.dp == 1:
            # The returned loss is that of this data-parallel rank.
            assert float(outputs["loss"]) == pytest.approx(self.report.losses[-1], abs=1e-12)
        if trainer.global_step > len(self.report.norms):
            self.report.norms.append(float(trainer.precision_plugin.last_grad_norm))


def train(job: Job, size: int) -> Report:
    """Run a job in this process."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    record = Record()
    options: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=MegatronStrategy(**{"microbatch_size": 2} | job.layout),
        precision="64-true",
        max_epochs=1,
        enable_model_summary=False,
        use_distributed_sampler=False,
        gradient_clip_val=1.0,
        accumulate_grad_batches=job.accumulate,
        callbacks=[record],
        **options,
    )
    sizes = {name: job.layout.get(name, 1) for name in ("tp", "pp", "cp", "vpp")}
    grid = ParallelLayout(size, **sizes)
    sampler = DistributedSampler(
        Texts(),
        shuffle=False,
        num_replicas=grid.dp,
        rank=grid.coordinates(trainer.global_rank)["dp"],
    )
    loader = DataLoader(
        Texts(), batch_size=GLOBAL_BATCH // grid.dp // job.accumulate, sampler=sampler
    )
    module = SeededCausalLM() if job.is_causal_lm else Counting()
    trainer.fit(module, loader)
    metrics = trainer.callback_metrics
    if not job.is_causal_lm:
        assert float(metrics["both_epoch"]) == pytest.approx(
            float(metrics["epoch_loss"]), abs=1e-12
        )
        record.report.epoch_loss = float(metrics["epoch_loss"])
    (validated,) = trainer.validate(module, loader, verbose=False)
    record.report.val_loss = validated["val_loss"]
    assert module.model is not None, "the model has been trained"
    for name, parameter in module.model.named_parameters():
        spec = shard_spec_of(parameter)
        pieces = [(box.offsets, view.clone()) for box, view in spec.local_views(parameter.detach())]
        record.report.pieces[spec.tied_to or name] = (spec.full_shape, pieces)
    return record.report


def train_in_plain_loop(parts: int) -> Report:
    """Train in a plain loop; report the losses of each of the ``parts`` of a global batch."""
    report, model = Report(), GPT(CONFIG, seed=1234).double()
    optimizer, schedule = optimizer_of(model.parameters())
    texts = Texts()
    total, count = 0.0, 0
    for step in range(STEPS):
        rows = [texts[step * GLOBAL_BATCH + sample] for sample in range(GLOBAL_BATCH)]
        tokens, labels = (torch.stack([row[key] for row in rows]) for key in ("tokens", "labels"))
        losses = token_losses(model, tokens, labels)
        valid = labels != -100
        for part, mask in zip(losses.detach().chunk(parts), valid.chunk(parts), strict=True):
            report.losses.append(float(part.sum() / mask.sum()) if mask.any() else 0.0)
        total, count = total + float(losses.detach().sum()), count + int(valid.sum())
        optimizer.zero_grad()
        (losses.sum() / max(int(valid.sum()), 1)).backward()
        report.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        schedule.step()
    report.epoch_loss = total / count
    report.weights = dict(model.state_dict())
    rows = [texts[index] for index in range(len(texts))]
    tokens, labels = (torch.stack([row[key] for row in rows]) for key in ("tokens", "labels"))
    with torch.no_grad():
        report.val_loss = float(token_losses(model, tokens, labels).sum() / (labels != -100).sum())
    return report


def token_losses(model: GPT, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of every token from the logits."""
    logits = model(tokens)
    flat = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    )
    return flat.view_as(labels)


def _train_all(rank: int, size: int) -> dict[str, Report]:
    return {name: train(job, size) for name, job in JOBS.items()}


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Report]]:
    """Train every job on four processes."""
    return run_world(_train_all, 4)


@pytest.fixture(scope="module")
def twins() -> dict[int, Report]:
    """Train in one process."""
    return {parts: train_in_plain_loop(parts) for parts in (1, 2)}


@pytest.mark.parametrize("name", list(JOBS))
def test_every_layout_takes_the_mean_over_all_tokens(name, reports, twins):
    job, close = JOBS[name], {"rtol": 0.0, "atol": 1e-10}
    expected = twins[job.accumulate]
    assert expected.norms[2] == 0.0
    for ranks in reports:
        report = ranks[name]
        torch.testing.assert_close(
            torch.tensor(report.losses), torch.tensor(expected.losses), **close
        )
        torch.testing.assert_close(
            torch.tensor(report.norms), torch.tensor(expected.norms), **close
        )
        assert report.val_loss == pytest.approx(expected.val_loss, abs=1e-10)
        if not job.is_causal_lm:
            assert report.epoch_loss == pytest.approx(expected.epoch_loss, abs=1e-10)
    weights = join_weights([ranks[name] for ranks in reports])
    assert set(weights) == set(expected.weights)
    for key, weight in weights.items():
        # The vocabulary's padding belongs to no full tensor.
        expected_weight = expected.weights[key].narrow(0, 0, weight.shape[0])
        torch.testing.assert_close(
            weight, expected_weight, **close, msg=f"{key}: {(weight - expected_weight).abs().max()}"
        )
