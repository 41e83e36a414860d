"""Pairs, models and expected values for the tests of preferences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.tasks.preferences.dpo import DPO
from lightning_megatron.tasks.preferences.reference import ReferenceLogProbs
from tests.tasks.chat.chat_folder import turn


def as_messages(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of ``preferences`` whose prompt and answers are lists of messages."""
    if "prompt" not in row:
        return {
            "prompt": row["chosen"][:-1],
            **{side: row[side][-1:] for side in ("chosen", "rejected")},
        }
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return {
        name: [turn(role, row[name])] if isinstance(row[name], str) else row[name]
        for name, role in roles.items()
    }


def perturbed(model: nn.Module) -> Any:
    """Return a model with slightly changed weights."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.02 * noise.to(parameter.dtype))
    return model


def loss_and_rewards(
    module: DPO, model: nn.Module, reference: nn.Module, batch: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and rewards of a batch, given the model and the model before training."""
    module.model = reference
    with torch.no_grad():
        values = module.log_probs(batch)
    module.reference = ReferenceLogProbs()
    pairs = torch.arange(len(values))
    module.reference.load_state({"train": {"key": "", "pairs": pairs, "values": values}})
    module.model = model
    rewards = module._means(batch, module._count(batch), "train")
    return rewards.pop("loss"), rewards
