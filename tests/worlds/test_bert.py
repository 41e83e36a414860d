"""BERT trains in every layout as transformers' model in a plain loop, with padding and uneven numbers
of masks: same losses, gradient norms, validation losses and weights; and on BERTDataModule.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import BERTDataModule, BERTPretraining, EncoderConfig
from lightning_megatron.models.encoder import Encoder
from tests import bert_corpus
from tests.fits import BATCH, Job, Record, Report, joined, run_job, trainer_of
from tests.models.test_bert import SIZES, VOCABULARY, renamed, theirs
from tests.oracles import assert_equal
from tests.sweeps import chosen
from tests.world import run_world

STEPS, LENGTH = 3, 16
RING, GATHER = {"cp_transport": "ring"}, {"cp_transport": "all_gather"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp4": {"tp": 4, "sequence_parallel": False},
    "tp2+sp dp2": {"tp": 2},
    "dp4": {},
    "pp2 dp2": {"pp": 2},
    "pp2 tp2 recomputed": {"pp": 2, "tp": 2, "recompute": "full", "microbatch_size": 4},
    "cp4": {"cp": 4, "zero": 0},
    "cp4 ring": {"cp": 4, **RING},
    "cp4 hierarchical": {"cp": 4, "cp_transport": "hierarchical", "recompute": "selective"},
    "cp2 dp2 ring recomputed": {"cp": 2, **RING, "recompute": "full"},
    "cp2 tp2+sp all_gather": {"cp": 2, "tp": 2, **GATHER},
    "cp2 tp2 ring": {"cp": 2, "tp": 2, **RING, "sequence_parallel": False},
    "cp2 pp2 ring": {"cp": 2, "pp": 2, **RING},
    "cp2 pp2 recomputed": {"cp": 2, "pp": 2, "recompute": "full"},
}
#: Order of norms in the layers, and layout.
CASES = chosen(
    [(order, name) for order in ("pre", "post") for name in LAYOUTS],
    ("post", "tp4"),
    ("pre", "tp2+sp dp2"),
    ("post", "pp2 dp2"),
    ("post", "cp4"),
    ("pre", "cp4 hierarchical"),
    ("post", "cp2 dp2 ring recomputed"),
    ("pre", "cp2 tp2+sp all_gather"),
)
#: Layouts that train on a token file, and the workers of their loaders.
ON_FILE: dict[str, tuple[dict[str, Any], int]] = {
    "tp2+sp dp2": ({"tp": 2, "microbatch_size": 4}, 2),
    "pp2 dp2": ({"pp": 2}, 0),
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


def module_of(config: EncoderConfig) -> BERTPretraining:
    return BERTPretraining(
        config, learning_rate=0.01, warmup_steps=2, schedule="linear", min_lr_ratio=0.0,
        weight_decay=0.01, betas=(0.9, 0.999), max_steps=STEPS + 1,
    )  # fmt: skip


def module_with(order: str) -> BERTPretraining:
    return module_of(config_of(order))


def train_on_file(folder: Path, layout: dict[str, Any], size: int, workers: int) -> Report:
    config = EncoderConfig.bert(
        vocab_size=bert_corpus.VOCABULARY, num_positions=32, num_layers=2, hidden_size=24,
        num_heads=4, hidden_dropout=0.0, attention_dropout=0.0, init_std=0.2,
    )  # fmt: skip
    corpus = f"{folder}/corpus"
    data = BERTDataModule(
        corpus, corpus, tokenizer=f"{folder}/vocab.txt", seq_length=32, global_batch_size=8,
        num_workers=workers,
    )  # fmt: skip
    record, module = Record(), module_of(config)
    limits = {"limit_val_batches": 0}
    trainer = trainer_of(Job(strategy=layout, steps=STEPS, trainer=limits), size, record)
    trainer.fit(module, data)
    trainer.limit_val_batches = 1.0
    [record.report.metrics] = trainer.validate(module, data, verbose=False)  # type: ignore[list-item]
    return record.report


def run_all(rank: int, size: int, folder: Path) -> dict[Any, Report]:
    limits = {"num_sanity_val_steps": 0}
    found: dict[Any, Report] = {}
    for order, name in CASES:
        model, layout = partial(module_with, order), LAYOUTS[name]
        job = Job(model, layout, steps=STEPS, data=Pairs, validation=Pairs, trainer=limits)
        found[order, name] = run_job(job, size)
    for name, (layout, workers) in ON_FILE.items():
        found[name] = train_on_file(folder, layout, size, workers)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    vocabulary = bert_corpus.write_vocabulary(path / "vocab.txt")
    bert_corpus.write_sentences(path / "corpus", vocabulary)
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[Any, Report]]:
    return run_world(run_all, 4, folder)


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


@pytest.mark.parametrize(("order", "name"), CASES)
def test_every_layout_trains_as_transformers_in_a_plain_loop(
    order: str, name: str, ranks: Any
) -> None:
    expected = plain_loop(order)
    for rank in ranks:
        report = rank[order, name]
        assert report.losses == pytest.approx(expected.losses, rel=0, abs=1e-10)
        assert report.norms == pytest.approx(expected.norms, rel=0, abs=1e-10)
        for metric, value in expected.metrics.items():
            assert report.metrics[metric] == pytest.approx(value, rel=0, abs=1e-10), metric
    weights = joined([rank[order, name] for rank in ranks])
    for key, value in expected.outcomes.items():
        assert_equal(weights.pop(f"model.{key}"), value, key)
    assert not weights


@pytest.mark.parametrize("name", ON_FILE)
def test_every_layout_trains_on_a_token_file_as_one_process(
    name: str, folder: Path, ranks: Any
) -> None:
    expected = train_on_file(folder, {"microbatch_size": 8}, 1, 0)
    assert len(set(expected.losses)) == STEPS
    for rank in ranks:
        for results in ("losses", "norms", "metrics"):
            close = pytest.approx(getattr(expected, results), rel=0, abs=1e-10)
            assert getattr(rank[name], results) == close
