"""Tests of rows of documents under context parallelism: validation, checkpoints, generation and
balanced assignment match one process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import CausalLM, GPTConfig, MegatronStrategy, TokenDataModule
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from tests.sweeps import chosen
from tests.world import run_world

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

STEPS, SAVED_AFTER, GLOBAL_BATCH, VOCABULARY = 4, 1, 8, 61
CLOSE = {"rtol": 0.0, "atol": 1e-10}
LAYOUTS: dict[str, dict[str, Any]] = {
    "cp1": {},
    "cp2 ring": {"cp": 2, "cp_transport": "ring"},
    "cp2 all_to_all, pp2": {"cp": 2, "cp_transport": "all_to_all", "pp": 2},
    "cp2 all_gather, tp2": {"cp": 2, "cp_transport": "all_gather", "tp": 2},
    "cp4 ring": {"cp": 4, "cp_transport": "ring"},
    "cp4 all_to_all": {"cp": 4, "cp_transport": "all_to_all"},
    "cp4 all_gather": {"cp": 4, "cp_transport": "all_gather"},
}
#: Layout that saves, and layouts that continue from its checkpoint.
WAYS = chosen(
    {
        "cp2 ring": ("cp1", "cp2 all_to_all, pp2", "cp2 all_gather, tp2", "cp4 ring"),
        "cp4 all_gather": ("cp4 all_to_all", "cp2 ring"),
    },
    "cp2 ring",
)
GENERATING = chosen(
    ("cp2 ring", "cp4 ring", "cp4 all_to_all", "cp4 all_gather"), "cp4 ring", "cp4 all_gather"
)


@dataclass
class Report:
    """Losses of steps, validation losses after them, and the rows of the steps of a run."""

    losses: list[float] = field(default_factory=list)
    validated: list[float] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)


class Watch(Callback):
    """Record losses and rows."""

    def __init__(self) -> None:
        self.report = Report()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.report.rows.append(batch["tokens"].sum(1).tolist())
        self.report.losses.append(float(trainer.callback_metrics["train_loss"]))

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.report.validated.append(float(trainer.callback_metrics["val_loss"]))


def write_documents(folder: Path) -> str:
    """Write documents of 1 to 40 tokens."""
    generator = torch.Generator().manual_seed(1)
    with TokenFileWriter(folder / "documents", vocab_size=VOCABULARY) as writer:
        for size in [30, 1, 2, 3, 20, 1, 7, 2, 5, 25, 3, 2, 1, 4, 18, 2, 2, 9, 3, 40] * 4:
            writer.add_document(torch.randint(VOCABULARY, (size,), generator=generator).numpy())
    return str(folder / "documents")


def train(
    corpus: str,
    layout: dict[str, Any],
    devices: int,
    *,
    steps: int = STEPS,
    saved: str | None = None,
    resume_from: str | None = None,
    **data: Any,
) -> Report:
    """Train on rows of documents whose length is no multiple of 2 cp, and validate in every step."""
    seed_everything(3, verbose=False)
    watch = Watch()
    trainer = Trainer(
        accelerator="cpu", devices=devices, precision="64-true", max_steps=steps, max_epochs=-1,
        strategy=MegatronStrategy(**{"microbatch_size": 2, "check_microbatches": False, **layout}),
        callbacks=[watch], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, val_check_interval=1,
        check_val_every_n_epoch=None, limit_val_batches=1,
    )  # fmt: skip
    replicas = trainer.strategy.distributed_sampler_kwargs["num_replicas"]
    config = GPTConfig.llama(
        vocab_size=VOCABULARY, max_seq_length=32, num_layers=2, hidden_size=16, num_heads=4,
        num_kv_heads=2, ffn_hidden_size=24, vocab_multiple=1,
    )  # fmt: skip
    module = CausalLM(config, learning_rate=0.01, schedule="constant")
    rows = TokenDataModule(
        corpus, corpus, seq_length=21, batch_size=GLOBAL_BATCH // replicas, documents="separate",
        cache_dir=str(Path(corpus).parent / "cache"), **data,
    )  # fmt: skip
    trainer.fit(module, datamodule=rows, ckpt_path=resume_from)
    if saved is not None:
        trainer.save_checkpoint(saved)
    return watch.report


class Generating(LightningModule):
    """Validate a Hugging Face model on packed rows, and continue prompts of several lengths."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype="float64")

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.log("val_loss", self.model(**batch, use_cache=False).loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        prompts = torch.arange(2, 16).view(2, 7)
        mask = (torch.arange(7) >= torch.tensor([[0], [3]])).long()
        self.continued = self.model.generate(
            prompts * mask + (1 - mask), attention_mask=mask, max_new_tokens=6, do_sample=False,
            pad_token_id=1,
        ).tolist()  # fmt: skip


def generate(folder: str, strategy: Any, devices: int) -> tuple[float, list[list[int]], bool]:
    """Return the validation loss and the continued prompts."""
    lengths = [[5, 1, 7], [3, 10], [13], [4, 4, 5]] * 2
    generator = torch.Generator().manual_seed(2)
    rows = []
    for documents in lengths:
        positions = torch.cat([torch.arange(size) for size in documents])
        tokens = torch.randint(2, VOCABULARY, (13,), generator=generator)
        labels = tokens.masked_fill(positions == 0, -100)
        rows.append({"input_ids": tokens, "position_ids": positions, "labels": labels})
    trainer = Trainer(
        accelerator="cpu", devices=devices, precision="64-true", strategy=strategy, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Generating(folder)
    [metrics] = trainer.validate(module, DataLoader(rows, batch_size=1), verbose=False)
    return metrics["val_loss"], module.continued, isinstance(module.model, ReplacedModel)


@dataclass(frozen=True)
class RankReport:
    """Report of one rank of four, by name."""

    begun: dict[str, Report]
    continued: dict[str, Report]
    balanced: dict[bool, Report]
    generated: dict[str, tuple[float, list[list[int]], bool]]


def run_all(rank: int, size: int, corpus: str, model: str, folder: Path) -> RankReport:
    """Run all trainings and generations on four processes."""
    begun, continued = {}, {}
    for before, afters in WAYS.items():
        saved = os.path.join(folder, before)
        begun[before] = train(corpus, LAYOUTS[before], size, steps=SAVED_AFTER, saved=saved)
        for after in afters:
            way = f"{before} to {after}"
            continued[way] = train(corpus, LAYOUTS[after], size, resume_from=saved)
    balanced = {
        is_on: train(corpus, {"microbatch_size": 1}, size, balance_attention=is_on)
        for is_on in (False, True)
    }
    generated = {
        name: generate(model, MegatronStrategy(**LAYOUTS[name]), size) for name in GENERATING
    }
    return RankReport(begun, continued, balanced, generated)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """Write the corpus and a small Llama."""
    folder = tmp_path_factory.mktemp("packed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "llama")
    return write_documents(folder), str(folder / "llama"), folder


@pytest.fixture(scope="module")
def uninterrupted(paths: tuple[str, str, Path]) -> Report:
    """Train in this process, without interruption."""
    return train(paths[0], {}, 1)


@pytest.fixture(scope="module")
def ranks(paths: tuple[str, str, Path], uninterrupted: Report) -> list[RankReport]:
    """Run four processes once for all tests."""
    return run_world(run_all, 4, *paths)


def check(report: Report, uninterrupted: Report, steps: slice) -> None:
    for actual, expected in (
        (report.losses, uninterrupted.losses),
        (report.validated, uninterrupted.validated),
    ):
        assert len(actual) == len(expected[steps])
        torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected[steps]), **CLOSE)


@pytest.mark.parametrize("name", list(WAYS))
def test_validation_under_context_parallelism_matches_one_process(name, ranks, uninterrupted):
    assert len(set(uninterrupted.losses)) == len(set(uninterrupted.validated)) == STEPS
    for rank in ranks:
        check(rank.begun[name], uninterrupted, slice(SAVED_AFTER))


@pytest.mark.parametrize(
    "way", [f"{before} to {after}" for before, afters in WAYS.items() for after in afters]
)
def test_checkpoints_continue_under_other_context_parallelism(way, ranks, uninterrupted):
    for rank in ranks:
        check(rank.continued[way], uninterrupted, slice(SAVED_AFTER, None))


@pytest.mark.parametrize("saved", list(WAYS))
def test_checkpoints_continue_in_one_process(saved, ranks, uninterrupted, paths):
    report = train(paths[0], {}, 1, resume_from=str(paths[2] / saved))
    check(report, uninterrupted, slice(SAVED_AFTER, None))


def test_balanced_rows_train_as_rows_in_order(ranks):
    in_order, balanced = ([rank.balanced[on].rows for rank in ranks] for on in (False, True))
    assert balanced != in_order
    for rows, rows_in_order in zip(
        zip(*balanced, strict=True), zip(*in_order, strict=True), strict=True
    ):
        assert sorted(sum(rows, [])) == sorted(sum(rows_in_order, []))
    for rank in ranks:
        close = {"rtol": 0.0, "atol": 1e-12}
        for name in ("losses", "validated"):
            actual, expected = (
                torch.tensor(getattr(rank.balanced[on], name)) for on in (True, False)
            )
            torch.testing.assert_close(actual, expected, **close)


@pytest.mark.parametrize("name", GENERATING)
def test_generation_under_context_parallelism_matches_one_process(name, ranks, paths):
    single = generate(paths[1], MegatronStrategy(), 1)
    loss, continued, is_replaced = generate(paths[1], "auto", 1)
    # Hugging Face's model computes losses in float32.
    assert (single[0], is_replaced) == (pytest.approx(loss, rel=0, abs=1e-5), False)
    for rank in ranks:
        generated = rank.generated[name]
        assert generated[0] == pytest.approx(single[0], rel=0, abs=1e-10)
        assert generated[1:] == (continued, True)
