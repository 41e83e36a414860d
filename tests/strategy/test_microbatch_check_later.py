"""Later batches are examined: the first with uneven microbatches, and others at intervals."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import MegatronStrategy, UnsupportedError
from tests.world import run_world

SIZE, WORDS, LENGTH, BATCHES = 4, 9, 6, 30


class Texts(Dataset):
    """Samples whose padding begins at a later batch.

    Args:
        first: First batch with padding (batches).
        every: Interval of the batches with padding from then on (batches).
    """

    def __init__(self, first: int, every: int = 1) -> None:
        self.first = first
        self.every = every

    def __len__(self) -> int:
        return BATCHES * SIZE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, WORDS, (LENGTH,), generator=generator)
        mask, batch = torch.ones(LENGTH), index // SIZE
        if batch >= self.first and (batch - self.first) % self.every == 0:
            mask[2 + index % SIZE :] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        return {"tokens": tokens, "labels": labels, "mask": mask}


class Step(LightningModule):
    """A word model whose loss depends on ``case``."""

    def __init__(self, case: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.case = case
        self.words = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, WORDS)
        self.num_steps = 0

    def logits(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return self.head(hidden)

    def loss_of(self, batch: dict[str, Tensor]) -> Any:
        logits, labels = self.logits(batch["tokens"]).transpose(1, 2), batch["labels"]
        if self.case == "labels":
            return F.cross_entropy(logits, labels)
        if self.case == "counted":
            loss = F.cross_entropy(logits, labels)
            return {"loss": loss, "num_tokens": (labels != -100).sum()}
        is_mixed = {"mixed epoch": self.current_epoch > 0, "mixed step": self.global_step >= 7}
        if is_mixed.get(self.case, False):
            means = logits.mean(2)
            return F.cross_entropy(means @ means.T, torch.arange(len(means)))
        token_losses = F.cross_entropy(logits, batch["tokens"], reduction="none") * batch["mask"]
        if self.case == "mask":
            return token_losses.sum() / batch["mask"].sum()
        return (token_losses.sum(1) / batch["mask"].sum(1)).mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.loss_of(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        output = self.loss_of(batch)
        self.log("val_loss", output["loss"] if isinstance(output, dict) else output)

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_steps += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_of(strategy: Any, devices: int) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, precision="64-true", logger=False,
        use_distributed_sampler=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def steps_before_refusal(
    case: str, strategy: Any, first: int, every: int = 1, devices: int = 1
) -> int:
    """Return the number of steps before a mean over tokens is refused; other cases run all."""
    module = Step(case)
    loader = DataLoader(Texts(first, every), batch_size=SIZE)
    trainer = trainer_of(strategy, devices)
    if case in ("counted", "samples"):
        trainer.fit(module, loader)
    else:
        with pytest.raises(UnsupportedError, match="in separate calls.*Return num_tokens"):
            trainer.fit(module, loader)
    return module.num_steps


@pytest.mark.parametrize("first", [1, 13])
@pytest.mark.parametrize("case", ["labels", "mask"])
def test_a_mean_over_tokens_is_refused_at_the_first_uneven_batch(case: str, first: int) -> None:
    assert steps_before_refusal(case, MegatronStrategy(microbatch_size=1), first) == first


@pytest.mark.parametrize("case", ["counted", "samples"])
def test_steps_with_correct_weights_train_on_uneven_batches(case: str) -> None:
    strategy = MegatronStrategy(microbatch_size=2)
    assert steps_before_refusal(case, strategy, 3) == BATCHES
    module, plain = Step(case), Step(case)
    loader = DataLoader(Texts(3), batch_size=SIZE)
    trainer_of(MegatronStrategy(microbatch_size=1), 1).fit(module, loader)
    trainer_of("auto", 1).fit(plain, loader)
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)


def run_late_phases(rank: int = 0, size: int = 1) -> dict[str, int]:
    """Return the steps before losses are refused that mix samples from a later step on."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    stages = {"pp": 2, "pipeline_plan": {"blocks": "blocks"}} if size > 1 else {}
    steps = {}
    for case, interval in (("mixed epoch", 0), ("mixed step", 5)):
        module = Step(case)
        options: dict[str, Any] = {"replica_check_interval": interval, **stages}
        trainer = trainer_of(MegatronStrategy(microbatch_size=1, **options), size)
        trainer.fit_loop.max_epochs = 2
        with pytest.raises(
            UnsupportedError, match="the loss of two microbatches is .* in one call"
        ):
            trainer.fit(module, DataLoader(Texts(BATCHES), batch_size=SIZE))
        steps[case] = module.num_steps
    return steps


def test_a_loss_that_mixes_samples_from_a_later_step_on_is_refused_at_the_next_trial() -> None:
    expected = {"mixed epoch": BATCHES, "mixed step": 9}
    assert run_late_phases() == expected
    assert run_world(run_late_phases, 2) == [expected] * 2


def test_complete_batches_may_be_uneven() -> None:
    module = Step("labels")
    trainer_of(MegatronStrategy(), 1).fit(module, DataLoader(Texts(3), batch_size=SIZE))
    assert module.num_steps == BATCHES


def test_uneven_validation_batches_are_refused() -> None:
    trainer = trainer_of(MegatronStrategy(microbatch_size=2), 1)
    with pytest.raises(UnsupportedError, match="validation_step must give the same"):
        trainer.validate(Step("labels"), DataLoader(Texts(3), batch_size=SIZE))


def run_two_ranks(rank: int, size: int) -> dict[str, int]:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    stages = {"pp": 2, "pipeline_plan": {"blocks": "blocks"}, "microbatch_size": 1}
    cut = {"microbatch_size": 1}
    return {
        "pp2": steps_before_refusal("labels", MegatronStrategy(**stages), 12, devices=2),
        "pp2 counted": steps_before_refusal("samples", MegatronStrategy(**stages), 12, devices=2),
        "dp2 samples": steps_before_refusal("samples", MegatronStrategy(**cut), 12, devices=2),
        "dp2 early": steps_before_refusal("labels", MegatronStrategy(**cut), 3, 1, 2),
        "dp2 late": steps_before_refusal("labels", MegatronStrategy(**cut), 12, 1, 2),
        "dp2 seldom": steps_before_refusal("labels", MegatronStrategy(**cut), 9, 9, 2),
    }


def test_stages_and_data_ranks_refuse_uneven_batches_at_the_same_step() -> None:
    for num_steps in run_world(run_two_ranks, 2):
        assert num_steps == {
            "pp2": 12,
            "pp2 counted": BATCHES,
            "dp2 samples": BATCHES,
            "dp2 early": 3,
            # The ranks examine again 16 batches after the first one.
            "dp2 late": 16,
            # Batches 9, 18 and 27 are uneven; the examination finds batch 18.
            "dp2 seldom": 18,
        }
