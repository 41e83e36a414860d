"""The comparison of microbatches with their batch works over stages and data ranks, and in later
batches: the first with uneven microbatches, and others at intervals.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_megatron.errors import UnsupportedError
from tests.fits import Job, trainer_of
from tests.world import run_world

SIZE, WORDS, LENGTH, BATCHES = 4, 9, 6, 20
STAGES: dict[str, Any] = {"pp": 2, "pipeline_plan": {"blocks": "blocks"}}


class Texts(Dataset):
    """Samples of which every ``every``-th batch from batch ``first`` on has padding."""

    def __init__(self, first: int = BATCHES, every: int = 1, num_batches: int = BATCHES) -> None:
        self.first, self.every, self.num_batches = first, every, num_batches

    def __len__(self) -> int:
        return self.num_batches * SIZE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, WORDS, (LENGTH,), generator=generator)
        mask, batch = torch.ones(LENGTH), index // SIZE
        if batch >= self.first and (batch - self.first) % self.every == 0:
            mask[2 + index % SIZE :] = 0
        return {"tokens": tokens, "labels": tokens.masked_fill(mask == 0, -100), "mask": mask}


class Step(pl.LightningModule):
    """A word model, with dropout between attending blocks or without, whose loss depends on ``case``."""

    def __init__(self, case: str, drops: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.case, self.num_steps, self.calls = case, 0, 0
        self.words = nn.Embedding(WORDS, 8)
        make = (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)) if drops else (
            lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        )  # fmt: skip
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.head = nn.Linear(8, WORDS)

    def loss_of(self, batch: dict[str, Tensor]) -> Any:
        hidden, labels = self.words(batch["tokens"]), batch["labels"]
        for block in self.blocks:
            hidden = block(hidden)
        is_mixed = {
            "contrast": True,
            "mixed epoch": self.current_epoch > 0,
            "mixed step": self.global_step >= 7,
        }
        if is_mixed.get(self.case, False):
            means = hidden.mean(1)
            return F.cross_entropy(means @ means.T, torch.arange(len(means)))
        logits = self.head(hidden).transpose(1, 2)
        if self.case == "counts":
            self.calls += 1
        if self.case == "labels" or (self.case == "validation" and not self.training):
            return F.cross_entropy(logits, labels)
        if self.case == "counted":
            return {"loss": F.cross_entropy(logits, labels), "num_tokens": (labels != -100).sum()}
        losses = F.cross_entropy(logits, batch["tokens"], reduction="none") * batch["mask"]
        if self.case == "mask":
            return losses.sum() / batch["mask"].sum()
        return (losses.sum(1) / batch["mask"].sum(1)).mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.loss_of(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        output = self.loss_of(batch)
        self.log("val_loss", output["loss"] if isinstance(output, dict) else output)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.num_steps += 1
        self.log("loss", outputs["loss"], sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    case: str, strategy: Any, size: int = 1, data: Texts | None = None, validation: Any = None, drops: bool = False,
    epochs: int = 1,
) -> Step:  # fmt: skip
    """Fit, on the same batches on all ranks."""
    if strategy is not None:
        strategy = {"microbatch_size": None, "job.check_microbatches": True, **strategy}
    options = {"max_epochs": epochs, "gradient_clip_val": None}
    trainer, module = (
        trainer_of(Job(strategy=strategy, steps=-1, trainer=options), size),
        Step(case, drops),
    )
    loaders = [
        DataLoader(d, SIZE) if d is not None else None for d in (data or Texts(), validation)
    ]
    try:
        trainer.fit(module, *loaders)
    except UnsupportedError as error:
        error.num_steps = module.num_steps  # type: ignore[attr-defined]
        raise
    return module


def refused(words: str, *args: Any, **options: Any) -> int:
    """Return the number of steps before a fit is refused."""
    with pytest.raises(UnsupportedError, match=f"(?s){words}") as caught:
        fit(*args, **options)
    return caught.value.num_steps  # type: ignore[attr-defined]


TOKENS = "in separate calls.*Return num_tokens"
#: Cases that stages and data ranks refuse at their first batch, and what the errors say.
FIRST = {
    "contrast": "the loss of two microbatches is.*microbatch_size='batch'",
    "labels": "Return num_tokens beside the loss",
    "validation": "validation_step must give the same .* log 'val_loss' of (two|three) microbatches",
    "counts": "self.calls changes at every call",
}


def check_late_phases(size: int = 1) -> None:
    """Losses that mix samples from a later step on are refused at the next trial."""
    stages = STAGES if size > 1 else {}
    for case, interval, step in (("mixed epoch", 0, BATCHES), ("mixed step", 5, 9)):
        strategy = {"microbatch_size": 1, "job.replica_check_interval": interval, **stages}
        words = "the loss of two microbatches is .* in one call"
        assert refused(words, case, strategy, size, epochs=2) == step


def two_ranks(rank: int, size: int) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    cut: dict[str, Any] = {"microbatch_size": 1}
    staged, uneven = {**cut, **STAGES}, Texts(0, num_batches=2)
    for layout in (STAGES, {"microbatch_size": 2}):
        for case, words in FIRST.items():
            validation = uneven if case == "validation" else None
            refused(words, case, layout, size, uneven, validation=validation, drops=True)
        # Losses with dropout are accepted, and unchanged by the trial.
        metrics = []
        for check in (True, False):
            options = {**layout, "job.check_microbatches": check}
            data = Texts(num_batches=2)
            module = fit("samples", options, size, data, validation=uneven, drops=True)
            metrics.append({k: float(v) for k, v in module.trainer.callback_metrics.items()})
        assert metrics[0] == metrics[1]
        assert 0 < metrics[0]["loss"] < 5
    whole = fit("contrast", {**STAGES, "microbatch_size": "batch"}, size, uneven, drops=True)
    assert float(whole.trainer.callback_metrics["loss"]) > 0.5
    check_late_phases(size)
    assert refused(TOKENS, "labels", staged, size, Texts(12)) == 12
    assert fit("counted", staged, size, Texts(12)).num_steps == BATCHES
    assert fit("samples", cut, size, Texts(12)).num_steps == BATCHES
    assert refused(TOKENS, "labels", cut, size, Texts(3)) == 3
    # The ranks examine again 16 batches after the first one.
    assert refused(TOKENS, "labels", cut, size, Texts(12)) == 16
    # Batches 9 and 18 are uneven; the examination finds batch 18.
    assert refused(TOKENS, "labels", cut, size, Texts(9, 9)) == 18


def test_stages_and_data_ranks_refuse_wrong_losses_at_the_same_step() -> None:
    run_world(two_ranks, 2)


def test_one_process_refuses_a_mean_over_tokens_and_mixed_samples_at_the_first_such_batch() -> None:
    for case, first in (("labels", 13), ("mask", 1)):
        assert refused(TOKENS, case, {"microbatch_size": 1}, data=Texts(first)) == first
    words = "validation_step must give the same"
    refused(words, "validation", {"microbatch_size": 2}, validation=Texts(0, num_batches=2))
    check_late_phases()


def test_steps_with_correct_weights_and_complete_batches_train_on_uneven_batches() -> None:
    for case, strategy in (
        ("counted", {"microbatch_size": 1}),
        ("samples", {"microbatch_size": 1}),
        ("labels", {}),
    ):
        module, plain = (fit(case, options, data=Texts(3)) for options in (strategy, None))
        assert module.num_steps == BATCHES
        torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)
