"""Tests that BERT trains in every layout as transformers' model in a plain loop: same losses,
gradient norms and weights after several steps, with padding and uneven numbers of masks.
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_megatron import BERTPretraining, EncoderConfig, MegatronStrategy
from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.plan.layout import ParallelLayout
from tests.fit_report import Record, Report
from tests.models.test_bert import SIZES, VOCABULARY, renamed, theirs
from tests.world import run_world

STEPS, GLOBAL_BATCH, LENGTH = 5, 8, 16
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "sequence_parallel": False},
    "tp2 +sp": {"tp": 2, "sequence_parallel": True},
    "dp2": {},
    "pp2": {"pp": 2},
    "pp2 recomputed": {"pp": 2, "recompute": "full", "microbatch_size": 4},
}
ORDERS = ("pre", "post")


def config_of(order: str) -> EncoderConfig:
    return EncoderConfig.bert(**SIZES, ffn_hidden_size=96, norm_position=order)


class Pairs(Dataset):
    """Repeatable pairs of sentences of different lengths, some of them without masked tokens."""

    def __len__(self) -> int:
        return STEPS * GLOBAL_BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        true = torch.randint(VOCABULARY, (LENGTH,), generator=draw)
        sizes = torch.randint(3, LENGTH // 2, (2,), generator=draw)
        valid = torch.arange(LENGTH) < sizes.sum()
        rate = 0.0 if index % 5 == 0 else 0.3
        masked = (torch.rand(LENGTH, generator=draw) < rate) & valid
        return {
            "tokens": torch.where(masked, 3, true).masked_fill(~valid, 0),
            "labels": true.masked_fill(~masked, -100),
            "token_types": (torch.arange(LENGTH) >= sizes[0]).long() * valid,
            "valid": valid,
            "lengths": sizes.sum(),
            "order": torch.randint(2, (), generator=draw),
        }


def module_of(order: str) -> BERTPretraining:
    return BERTPretraining(
        config_of(order), learning_rate=0.01, warmup_steps=2, schedule="linear", min_lr_ratio=0.0,
        weight_decay=0.01, betas=(0.9, 0.999), max_steps=STEPS + 1,
    )  # fmt: skip


def strategy_of(layout: dict[str, Any]) -> MegatronStrategy:
    options = {name: value for name, value in layout.items() if name != "norms"}
    return MegatronStrategy(**{"microbatch_size": 2, **options})


def train(order: str, layout: dict[str, Any], size: int, checkpoint: str) -> Report:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    pl.seed_everything(1234, verbose=False)
    record = Record()
    trainer = pl.Trainer(
        accelerator="cpu", devices=size, strategy=strategy_of(layout),
        precision="64-true", max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        gradient_clip_val=1.0, num_sanity_val_steps=0, callbacks=[record],
    )  # fmt: skip
    grid = ParallelLayout(size, **{axis: layout.get(axis, 1) for axis in ("tp", "pp", "cp")})
    data_rank = grid.coordinates(trainer.global_rank)["dp"]
    sampler = DistributedSampler(Pairs(), shuffle=False, num_replicas=grid.dp, rank=data_rank)
    loader = DataLoader(Pairs(), batch_size=GLOBAL_BATCH // grid.dp, sampler=sampler)
    module = module_of(order)
    trainer.fit(module, loader)
    [metrics] = trainer.validate(module, loader, verbose=False)
    record.report.val_losses = [
        metrics[f"val_{name}"] for name in ("loss", "lm_loss", "order_loss")
    ]
    trainer.save_checkpoint(checkpoint)
    trainer.strategy.barrier()
    saved = OpenCheckpoint.open(checkpoint)
    names = [name for name in saved.tensors if name.startswith("state_dict.")]
    record.report.weights = {
        name.removeprefix("state_dict.model."): tensor
        for name, tensor in saved.read_full(names).items()
    }
    return record.report


def train_all(
    rank: int, size: int, folder: str, layouts: dict[str, dict[str, Any]]
) -> dict[str, Report]:
    return {
        f"{order}, {name}": train(order, layout, size, os.path.join(folder, f"{order} {name}"))
        for order in ORDERS
        for name, layout in layouts.items()
        if layout.get("norms", order) == order
    }


def losses_of(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean losses of masked tokens and of sentence order from transformers' logits."""
    result = model(
        input_ids=batch["tokens"], attention_mask=batch["valid"].long(),
        token_type_ids=batch["token_types"],
    )  # fmt: skip
    counts = (batch["labels"] != -100).sum(1)
    tokens = F.cross_entropy(result.prediction_logits.transpose(1, 2), batch["labels"])
    order = F.cross_entropy(result.seq_relationship_logits, batch["order"], reduction="none")
    return tokens, (order * counts).sum() / counts.sum()


def train_in_plain_loop(order: str) -> Report:
    """Train transformers' model in a plain loop, from the same weights."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        ours = Encoder(config_of(order), seed=1234)
    finally:
        torch.set_default_dtype(default_dtype)
    model = theirs(order)
    with torch.no_grad():
        start = renamed(dict(model.named_parameters()), order)
        for name, value in ours.named_parameters():
            target = start[name]
            if ".qkv." in name:
                layer = name.split(".")[1]
                kind = name.split(".")[-1]
                part = model.get_submodule(f"bert.encoder.layer.{layer}.attention.self")
                for piece, projection in zip(
                    value.chunk(3), ("query", "key", "value"), strict=True
                ):
                    getattr(getattr(part, projection), kind).copy_(piece)
            else:
                target.copy_(value[: len(target)])
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    undecayed = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": undecayed, "weight_decay": 0.0}],
        lr=0.01, betas=(0.9, 0.999),
    )  # fmt: skip
    report = Report()
    for step, batch in enumerate(DataLoader(Pairs(), batch_size=GLOBAL_BATCH)):
        rate = 0.01 * ((step + 1) / 3 if step < 2 else (STEPS + 1 - step) / (STEPS + 1 - 2))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = sum(losses_of(model, batch))
        model.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report.losses.append(float(loss.detach()))
        report.norms.append(float(norm.detach()))
    with torch.no_grad():
        full_batch = next(iter(DataLoader(Pairs(), batch_size=len(Pairs()))))
        tokens, of_order = losses_of(model, full_batch)
    report.val_losses = [float(tokens + of_order), float(tokens), float(of_order)]
    report.weights = renamed({n: p.detach() for n, p in model.named_parameters()}, order)
    return report


def check_reports(rank_reports: dict[str, Report], expected: Report, order: str) -> None:
    """Compare one rank's reports of every layout of an order with the report of a plain loop."""
    assert len(expected.losses) == STEPS
    selected = {
        name: report for name, report in rank_reports.items() if name.startswith(f"{order}, ")
    }
    assert selected
    for name, report in selected.items():
        close = {"rel": 0, "abs": 1e-10}
        assert report.losses == pytest.approx(expected.losses, **close), name
        assert report.norms == pytest.approx(expected.norms, **close), name
        assert report.val_losses == pytest.approx(expected.val_losses, **close), name
        weights = {key: tensor for key, tensor in report.weights.items() if key != "head.weight"}
        assert weights.keys() == expected.weights.keys(), name
        for key, value in expected.weights.items():
            torch.testing.assert_close(
                weights[key], value, rtol=0, atol=1e-10, msg=f"{name}: {key}"
            )


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Report]]:
    return run_world(train_all, 2, str(tmp_path_factory.mktemp("bert")), LAYOUTS)


@pytest.mark.parametrize("order", ORDERS)
def test_every_layout_trains_as_transformers_in_a_plain_loop(
    reports: list[dict[str, Report]], order: str
) -> None:
    expected = train_in_plain_loop(order)
    for rank_reports in reports:
        check_reports(rank_reports, expected, order)
