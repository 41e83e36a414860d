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
    """Settings of low-rank adapters, which are trained in place of the model's own weights.

    Args:
        r: Rank of each update.
        alpha: An update is multiplied by ``alpha / r``.
        dropout: Probability of dropping an element of an adapter's input.
        target_modules: Names of the linear layers that are adapted, such as ``[q_proj, v_proj]``.
            ``all-linear`` means all of them but the head; models with experts need names.

    Raises:
        ParallelPlanError: If a value has another type or is out of its range.
    """

    r: Count = 8
    alpha: Count = 16
    dropout: Probability = 0.0
    target_modules: Literal["all-linear"] | list[str] = "all-linear"

    def __post_init__(self) -> None:
        coerce_fields(self, "lora.")

    def adapted(self, model: nn.Module) -> nn.Module:
        """Return peft's wrapper of a model, in which only the new adapters are trained.

        Args:
            model: Causal language model of Hugging Face.

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
    """Return the model that a wrapper of peft adapts; any other model itself.

    Args:
        model: Model, wrapped or not.
    """
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model
