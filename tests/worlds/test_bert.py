"""BERT trains in every layout as transformers' model in a plain loop, with padding and uneven numbers
of masks: same losses, gradient norms, validation losses and weights.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import BERTPretraining, EncoderConfig
from lightning_megatron.models.encoder import Encoder
from tests.fits import BATCH, Job, Report, joined, run_jobs_on
from tests.models.test_bert import SIZES, VOCABULARY, renamed, theirs
from tests.oracles import assert_equal

STEPS, LENGTH = 3, 16
#: Order of norms in the layers, and layout.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp4": ("post", {"tp": 4, "sequence_parallel": False}),
    "tp2+sp dp2": ("pre", {"tp": 2}),
    "pp2 dp2": ("post", {"pp": 2}),
    "cp4": ("post", {"cp": 4, "optimizer.zero": 0}),
    "cp4 ring": ("pre", {"cp": 4, "context.transport": "ring", "recompute": "selective"}),
    "cp2 dp2 ring": ("post", {"cp": 2, "context.transport": "ring", "recompute": "full"}),
    "cp2 tp2+sp": ("pre", {"cp": 2, "tp": 2, "context.transport": "all_gather"}),
}


class Pairs(Dataset):
    """Repeatable pairs of sentences of different lengths, some of them without masked tokens."""

    def __len__(self) -> int:
        return STEPS * BATCH

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


def config_of(order: str) -> EncoderConfig:
    return EncoderConfig.bert(**SIZES, ffn_hidden_size=96, norm_position=order)


def module_of(order: str) -> BERTPretraining:
    return BERTPretraining(
        config_of(order), learning_rate=0.01, warmup_steps=2, schedule="linear", min_lr_ratio=0.0,
        weight_decay=0.01, betas=(0.9, 0.999), max_steps=STEPS + 1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Report]]:
    options: dict[str, Any] = {"steps": STEPS, "data": Pairs, "validation": Pairs}
    options["trainer"] = {"num_sanity_val_steps": 0}
    jobs = {
        name: Job(partial(module_of, order), layout, **options)
        for name, (order, layout) in CASES.items()
    }
    return run_jobs_on(4, jobs)


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


@cache
def plain_loop(order: str) -> Report:
    """Train transformers' model in a plain loop, from the same weights."""
    ours, model = Encoder(config_of(order), seed=1234).double(), theirs(order)
    with torch.no_grad():
        start = renamed(dict(model.named_parameters()), order)
        for name, value in ours.named_parameters():
            if ".qkv." not in name:
                start[name].copy_(value[: len(start[name])])
                continue
            *_, kind = name.split(".")
            layer = model.get_submodule(f"bert.encoder.layer.{name.split('.')[1]}.attention.self")
            for piece, part in zip(value.chunk(3), ("query", "key", "value"), strict=True):
                getattr(getattr(layer, part), kind).copy_(piece)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.999),
    )
    report = Report()
    for step, batch in enumerate(DataLoader(Pairs(), batch_size=BATCH)):
        rate = 0.01 * ((step + 1) / 3 if step < 2 else (STEPS + 1 - step) / (STEPS + 1 - 2))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = torch.stack(losses_of(model, batch)).sum()
        model.zero_grad()
        loss.backward()
        report.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        report.losses.append(float(loss.detach()))
    with torch.no_grad():
        tokens, of_order = losses_of(
            model, next(iter(DataLoader(Pairs(), batch_size=len(Pairs()))))
        )
    report.metrics = {
        "val_loss": float(tokens + of_order),
        "val_lm_loss": float(tokens),
        "val_order_loss": float(of_order),
    }
    report.outcomes = renamed({n: p.detach() for n, p in model.named_parameters()}, order)
    return report


@pytest.mark.parametrize("name", CASES)
def test_every_layout_trains_as_transformers_in_a_plain_loop(name: str, reports: Any) -> None:
    expected = plain_loop(CASES[name][0])
    for report in reports[name]:
        assert report.losses == pytest.approx(expected.losses, rel=0, abs=1e-10)
        assert report.norms == pytest.approx(expected.norms, rel=0, abs=1e-10)
        for metric, value in expected.metrics.items():
            assert report.metrics[metric] == pytest.approx(value, rel=0, abs=1e-10), metric
    weights = joined(reports[name])
    for key, value in expected.outcomes.items():
        assert_equal(weights.pop(f"model.{key}"), value, key)
    assert not weights
