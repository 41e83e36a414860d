"""Fits on two pipeline stages match one process, also if a stage trains nothing, embeddings are
tied, or parameter groups differ between stages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy, UnsupportedError
from tests.oracles import assert_equal
from tests.swap.encoders import encoder_of
from tests.swap.families import V
from tests.swap.test_language_models import exact_twin
from tests.world import run_world

pytest.importorskip("transformers")

TOKENS = torch.randint(4, V, (8, 8), generator=torch.Generator().manual_seed(0))
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings")
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: exact_twin("llama"),
    "gpt2": lambda: exact_twin("gpt2"),
    "tied llama": lambda: exact_twin("llama tied with biases"),
    "bert": lambda: encoder_of("bert masked", torch.float64).eval(),
}


class Tuned(L.LightningModule):
    """Train a model to predict its tokens; subclasses choose the optimizer."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.kind, self.losses = model, []

    def configure_model(self) -> None:
        torch.manual_seed(1)
        self.model = MODELS[self.kind]()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self.model(input_ids=batch).logits
        # Hugging Face computes the loss in float32.
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
        )
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def embeddings(self) -> list[nn.Parameter]:
        return [
            parameter
            for name, parameter in self.named_parameters()
            if any(part in name for part in EMBEDDINGS)
        ]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            [parameter for parameter in self.parameters() if parameter.requires_grad], lr=1e-2
        )


class HeadOnly(Tuned):
    """Train a part of a model; the optimizer has only the parameters that require gradients."""

    trains = "lm_head"

    def configure_model(self) -> None:
        super().configure_model()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self.trains in name)


class FirstBlock(HeadOnly):
    trains = "layers.0"


class Nothing(HeadOnly):
    trains = "nothing"


class ByNames(Tuned):
    """Give embeddings a group with a separate learning rate and schedule."""

    def configure_optimizers(self) -> Any:
        embeddings = self.embeddings()
        embedding_ids = set(map(id, embeddings))
        groups = [
            {
                "params": [
                    parameter
                    for parameter in self.parameters()
                    if id(parameter) not in embedding_ids
                ],
                "weight_decay": 0.3,
            },
            {"params": embeddings, "weight_decay": 0.0, "lr": 2e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        rates = [lambda step: 1.0, lambda step: 0.5**step]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByLayers(Tuned):
    """Give every parameter a group, with a learning rate that grows with its layer."""

    def configure_optimizers(self) -> Any:
        groups = []
        for name, parameter in self.model.named_parameters():
            numbers = [int(part) + 1 for part in name.split(".") if part.isdecimal()]
            depth = (
                numbers[0] if numbers else (0 if any(part in name for part in EMBEDDINGS) else 4)
            )
            groups.append({"params": [parameter], "lr": 1e-2 * 0.6 ** (4 - depth)})
        optimizer = torch.optim.AdamW(groups)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7), "interval": "step"}
        ]


class Without(Tuned):
    """Leave embeddings out of the optimizer."""

    def configure_optimizers(self) -> Any:
        embedding_ids = set(map(id, self.embeddings()))
        return torch.optim.SGD(
            [parameter for parameter in self.parameters() if id(parameter) not in embedding_ids],
            lr=0.3,
        )


class Thaws(Tuned):
    """Freeze embeddings, and train them from the second epoch on."""

    def configure_model(self) -> None:
        super().configure_model()
        for parameter in self.embeddings():
            parameter.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        for parameter in self.embeddings():
            parameter.requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Freezes(Thaws):
    """Train embeddings only in the first epoch."""

    def configure_model(self) -> None:
        Tuned.configure_model(self)

    def on_train_epoch_start(self) -> None:
        for parameter in self.embeddings():
            parameter.requires_grad_(self.current_epoch == 0)


class Adds(Thaws):
    """Freeze embeddings, and add them to the optimizer in the second epoch, as Lightning's callback
    does.
    """

    def on_train_epoch_start(self) -> None:
        """Leave it to the callback."""

    def configure_optimizers(self) -> Any:
        return Tuned.configure_optimizers(self)

    def configure_callbacks(self) -> Any:
        return Finetuning()


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        """Do nothing: the module has frozen the embeddings."""

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            parts = [part for name, part in pl_module.named_modules() if name.endswith(EMBEDDINGS)]
            self.unfreeze_and_add_param_group(parts, optimizer, lr=4e-3)


class Vectors(Tuned):
    """Give the model vectors in place of tokens; every stage can compute them."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        vectors = torch.nn.functional.one_hot(batch % 48, 48).double()
        logits = self.model(inputs_embeds=vectors).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss


class LooksUp(Tuned):
    """Give the model vectors that only the first stage can look up."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        vectors = self.model.get_input_embeddings()(batch)
        return self.model(inputs_embeds=vectors).logits.square().mean()


class Saves(ByLayers):
    """Have a number of groups that depends on the stage, and save checkpoints."""


CASES = [
    *[
        (HeadOnly, "llama"),
        (FirstBlock, "llama"),
        (ByNames, "gpt2"),
        (ByNames, "bert"),
        (ByLayers, "tied llama"),
    ],
    *[
        (Vectors, "gpt2"),
        (ByLayers, "gpt2"),
        (Without, "gpt2"),
        (Thaws, "gpt2"),
        (Freezes, "tied llama"),
        (Adds, "gpt2"),
    ],
]
REFUSED = {
    (
        LooksUp,
        "gpt2",
    ): "cannot be called with pp above 1.*Only the first stage has the embedding",
    (
        Saves,
        "gpt2",
    ): "the optimizers of all pipeline stages must have equally many parameter groups",
}


def trainer_of(
    strategy: Any, kind: type[Tuned], epochs: int, folder: str, devices: int = 2
) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=devices if isinstance(strategy, MegatronStrategy) else 1,
        log_every_n_steps=1,
        strategy=strategy,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=kind is Saves,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def fit(strategy: Callable[[], Any], kind: type[Tuned], model: str, folder: str) -> list[float]:
    """Return the losses of two epochs; if a callback adds parameters to the optimizer, also those of
    a third epoch that resumes from a checkpoint.
    """
    data, module = DataLoader(TOKENS, batch_size=4), kind(model)
    trainer = trainer_of(strategy(), kind, 2, folder)
    trainer.fit(module, data)
    if kind is not Adds:
        return module.losses
    path, resumed = f"{folder}/two.ckpt", kind(model)
    trainer.save_checkpoint(path)
    trainer_of(strategy(), kind, 3, folder).fit(resumed, data, ckpt_path=path)
    return module.losses + resumed.losses


def two_stages() -> MegatronStrategy:
    return MegatronStrategy(pp=2, microbatch_size=4)


def train(rank: int, size: int, folder: str) -> tuple[list[list[float]], list[str]]:
    losses = [fit(two_stages, kind, model, folder) for kind, model in CASES]
    with pytest.raises(
        ValueError, match=r"an optimizer must have parameters on some pipeline stage"
    ):
        fit(two_stages, Nothing, "llama", folder)
    refusals = []
    for kind, model in REFUSED:
        with pytest.raises(UnsupportedError) as raised:
            fit(two_stages, kind, model, folder)
        refusals.append(str(raised.value))
    return losses, refusals


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_world(train, 2, str(tmp_path_factory.mktemp("cut")))


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=[f"{kind.__name__} {model}" for kind, model in CASES]
)
def test_losses_of_two_pipeline_stages_match_one_process(
    ranks: list[Any], number: int, tmp_path: Path
) -> None:
    expected = fit(lambda: "auto", *CASES[number], str(tmp_path))
    assert len(set(expected)) == len(expected)
    for rank, (losses, _) in enumerate(ranks):
        for step, (actual_loss, expected_loss) in enumerate(
            zip(losses[number], expected, strict=True)
        ):
            assert_equal(
                torch.tensor(actual_loss),
                torch.tensor(expected_loss),
                f"rank {rank}, step {step}",
                1e-6,
            )


@pytest.mark.parametrize(
    "number", range(len(REFUSED)), ids=[f"{kind.__name__} {model}" for kind, model in REFUSED]
)
def test_steps_and_optimizers_that_need_the_state_of_one_stage_are_refused(
    ranks: list[Any], number: int
) -> None:
    for _, refusals in ranks:
        assert re.search(list(REFUSED.values())[number], refusals[number])


def train_with_copies(rank: int, size: int, folder: str) -> list[float]:
    module = HeadOnly("llama")
    strategy = MegatronStrategy(tp=2, pp=2, microbatch_size=4)
    trainer_of(strategy, HeadOnly, 2, folder, size).fit(module, DataLoader(TOKENS, batch_size=4))
    return module.losses


def test_a_stage_without_trained_parameters_matches_one_process_with_tp2_pp2(
    tmp_path: Path,
) -> None:
    expected = torch.tensor(fit(lambda: "auto", HeadOnly, "llama", str(tmp_path)))
    for rank, losses in enumerate(run_world(train_with_copies, 4, str(tmp_path / "cut"))):
        assert_equal(torch.tensor(losses), expected, f"rank {rank}", 1e-6)
