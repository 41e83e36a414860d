"""Tests that calls of Hugging Face models train under tp and in stages as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from tests.proof.fine_tuning import trainer_of
from tests.proof.test_calls import LENGTH, SIZES, Answers, Texts, Train
from tests.world import run_world

transformers = pytest.importorskip("transformers")


class Positions(Train):
    """Give positions, which cut rows only in calls without a cache."""

    caches: tuple[bool | None, ...] = (None, True, False)

    def loss_of(self, tokens: Tensor) -> Tensor:
        gaps = (2 * torch.arange(LENGTH)).expand_as(tokens)
        restarting = torch.arange(LENGTH).remainder(4).expand_as(tokens)
        loss = torch.zeros(())
        for number, positions in enumerate((gaps, restarting)):
            for cache in self.caches:
                call = {"input_ids": tokens, "position_ids": positions, "use_cache": cache}
                loss = loss + (1 + number) * self.model(**call, labels=tokens).loss
        return loss


class Checkpointed(Positions):
    """Recompute blocks, so that Hugging Face's models fill no cache."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.gradient_checkpointing_enable()
        self.model.train()


class OwnPositions(Positions):
    """Give positions to a model with Hugging Face's code, which fills no cache in stages."""

    model_class, extra = Answers.model_class, Answers.extra
    caches = (None, False)


class Pictures(Train):
    """Train a model of pictures and text, whose own code reads hidden states through hooks."""

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        sizes: dict[str, Any] = {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_attention_heads": 2,
        }
        pictures: dict[str, Any] = {
            "image_size": 8,
            "patch_size": 4,
            "projection_dim": 16,
            "num_hidden_layers": 2,
        }
        config = transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**sizes, **pictures),
            text_config=transformers.LlamaConfig(**SIZES, intermediate_size=24),
            image_token_id=1,
            image_seq_length=4,
        )
        torch.manual_seed(3)
        self.model = transformers.LlavaForConditionalGeneration(config).double()

    def loss_of(self, tokens: Tensor) -> Tensor:
        pixels = tokens.double().sin()[:, :3, None, None] * torch.linspace(0, 1, 64).view(8, 8)
        text = torch.cat((torch.ones_like(tokens[:, :4]), tokens), 1)
        return self.model(input_ids=text, labels=text, pixel_values=pixels.double()).loss


KINDS = (Positions, Checkpointed, OwnPositions, Pictures)
LAYOUTS: dict[str, dict[str, int]] = {"tp2": {"tp": 2}, "pp2": {"pp": 2}}


def fit(kind: type[Train], layout: dict[str, Any] | None, devices: int) -> list[float]:
    seed_everything(1, verbose=False)
    module = kind()
    trainer_of(layout, devices, 2, max_epochs=2).fit(module, DataLoader(Texts(), batch_size=4))
    return module.losses


def fit_all(rank: int, size: int) -> dict[tuple[str, str], list[float]]:
    return {
        (kind.__name__, name): fit(kind, layout, size)
        for kind in KINDS
        for name, layout in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def reports() -> list[dict[tuple[str, str], list[float]]]:
    return run_world(fit_all, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_train_under_tp_and_in_stages_as_on_one_process(
    kind: type[Train], reports: list[Any]
) -> None:
    losses = fit(kind, None, 1)
    assert losses[-1] < losses[0]
    for report in reports:
        for layout in LAYOUTS:
            # Hugging Face's code computes norms and losses in float32.
            assert report[kind.__name__, layout] == pytest.approx(losses, rel=1e-6), layout
