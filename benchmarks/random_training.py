"""Training of a GPT on random tokens."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.routing import set_routing
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT


class Tokens(Dataset):
    """Dataset of reproducible random tokens."""

    def __init__(self, config: GPTConfig, num_samples: int) -> None:
        self.config = config
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(
            0, self.config.vocab_size, (self.config.max_seq_length + 1,), generator=generator
        )
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


class Trained(LightningModule):
    """GPT that trains on its mean loss and logs nothing.

    Args:
        config: Configuration of the model.
        forced_balance: Whether tokens are routed to experts in turn, independent of the router.
        routing: Name of the routing without ``forced_balance``; see ``benchmarks/routing.py``.
        num_tokens: Number of tokens per microbatch, for routings that draw experts (tokens).
    """

    def __init__(
        self,
        config: GPTConfig,
        forced_balance: bool = False,
        routing: str = "natural",
        num_tokens: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.routing = "balanced" if forced_balance else routing
        self.num_tokens = num_tokens
        self.model: GPT | None = None

    def configure_model(self) -> None:
        """Build this rank's part of the model."""
        if self.model is None:
            mesh: Any = self.device_mesh
            self.model = GPT(self.config, mesh=mesh, seed=1234)
            set_routing(self.model, self.routing, self.num_tokens, mesh.data.rank)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss."""
        assert self.model is not None, "configure_model runs before the first step"
        return self.model(batch["tokens"], batch["labels"]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
