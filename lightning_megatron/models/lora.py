"""Low-rank adapters of peft for a Hugging Face model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from lightning_megatron.extras import import_extra
from lightning_megatron.plan.settings import Count, Probability, coerce_fields

PEFT = "peft"


@dataclass(frozen=True)
class LoraSettings:
    """Settings of low-rank adapters (LoRA), which are trained instead of the model's weights.

    Args:
        r: Rank of the low-rank matrices.
        alpha: Numerator of the factor ``alpha / r`` of each update.
        dropout: Dropout probability of the input of an adapter.
        target_modules: Names of the linear layers to adapt, such as ``[q_proj, v_proj]``.
            ``all-linear`` means all linear layers except the head; models with experts need names.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
    """

    r: Count = 8
    alpha: Count = 16
    dropout: Probability = 0.0
    target_modules: Literal["all-linear"] | list[str] = "all-linear"

    def __post_init__(self) -> None:
        coerce_fields(self, "lora.")

    def adapted(self, model: nn.Module) -> nn.Module:
        """Add adapters to a model, and return the peft model, in which only adapters are trained.

        Args:
            model: Hugging Face causal language model.

        Raises:
            MissingExtraError: If peft is not installed.
        """
        peft = import_extra(PEFT, "lora")
        config = peft.LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.target_modules,
            task_type="CAUSAL_LM",
        )
        wrapped: nn.Module = peft.get_peft_model(model, config)
        return wrapped


def bare_model(model: nn.Module) -> nn.Module:
    """Return the base model of a peft model, or the model itself if it has no adapters."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model
