"""What the models that take the place of Hugging Face's have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.gpt import GPT
from lightning_megatron.swap.families import Family
from lightning_megatron.swap.low_rank import Adapter

#: What Hugging Face's models ignore as a label.
IGNORED = -100


class ReplacedModel(nn.Module):
    """Stand behind Hugging Face's call of a model, with layers that are cut over ranks.

    Args:
        config: Hugging Face's configuration, for whoever reads it.
        family: How configuration and tensors of the two correspond.
    """

    main_input_name = "input_ids"

    def __init__(self, config: Any, family: Family) -> None:
        super().__init__()
        self.config, self.family = config, family
        #: What peft had put into the model.
        self.adapter: Adapter | None = None

    @property
    def body(self) -> GPT | Encoder:
        """Return the layers."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Return where the weights are."""
        return self.body.mesh.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the weights."""
        return next(self.body.parameters()).dtype

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Compute blocks again in the backward pass instead of keeping their activations."""
        self.body.recompute = "full"

    def gradient_checkpointing_disable(self) -> None:
        """Keep the activations of blocks."""
        self.body.recompute = "none"


def lengthened(ids: Tensor | None, extra: int, value: int, num_rows: int = 0) -> Tensor | None:
    """Append places to rows, and rows, if there are any.

    Shapes: ids ``(B, S)``; result ``(B + num_rows, S + extra)``.
    """
    return None if ids is None else F.pad(ids, (0, extra, 0, num_rows), value=value)
