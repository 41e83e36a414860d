"""Models and layouts that several benchmarks measure, and their training on random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.routing import set_routing
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT

SHAPES: dict[str, GPTConfig] = {
    "llama8b_half": GPTConfig.llama(
        vocab_size=131072,
        max_seq_length=4096,
        num_layers=16,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=14336,
    ),
    "gpt2_1_2b": GPTConfig.gpt2(
        vocab_size=51200, max_seq_length=1024, num_layers=40, hidden_size=1536, num_heads=16
    ),
    "gpt2_2_5b": GPTConfig.gpt2(
        vocab_size=51200, max_seq_length=1024, num_layers=54, hidden_size=1920, num_heads=20
    ),
    "gpt2_4_2b": GPTConfig.gpt2(
        vocab_size=51200, max_seq_length=1024, num_layers=64, hidden_size=2304, num_heads=24
    ),
    "mixtral_s": GPTConfig.llama(
        vocab_size=32768,
        max_seq_length=4096,
        num_layers=4,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=14336,
        experts={"num_experts": 8, "top_k": 2, "ffn_hidden_size": 14336, "aux_loss": 0.01},
    ),
    "qwen3_30b_s": GPTConfig.llama(
        vocab_size=151552,
        max_seq_length=4096,
        num_layers=12,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        ffn_hidden_size=6144,
        experts={"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768, "aux_loss": 0.01},
    ),
    "qwen3_12": GPTConfig.llama(
        vocab_size=151552,
        max_seq_length=4096,
        num_layers=12,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        ffn_hidden_size=6144,
        experts={"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768, "aux_loss": 0.01},
    ),
    "qwen3_48": GPTConfig.llama(
        vocab_size=151552,
        max_seq_length=4096,
        num_layers=48,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        ffn_hidden_size=6144,
        experts={"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768, "aux_loss": 0.01},
    ),
    "tiny": GPTConfig.llama(
        vocab_size=51200,
        max_seq_length=1024,
        num_layers=12,
        hidden_size=768,
        num_heads=12,
        ffn_hidden_size=3072,
    ),
    "tiny_moe": GPTConfig.llama(
        vocab_size=51200,
        max_seq_length=1024,
        num_layers=12,
        hidden_size=1024,
        num_heads=16,
        ffn_hidden_size=2816,
        experts={"num_experts": 32, "top_k": 4, "ffn_hidden_size": 704, "aux_loss": 0.01},
    ),
    "tiny_llama": GPTConfig.llama(
        vocab_size=512,
        max_seq_length=64,
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=96,
    ),
    "tiny_mixtral": GPTConfig.llama(
        vocab_size=512,
        max_seq_length=64,
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=96,
        experts={"num_experts": 4, "top_k": 2, "ffn_hidden_size": 64, "aux_loss": 0.01},
    ),
    "tiny_gpt2": GPTConfig.gpt2(
        vocab_size=512, max_seq_length=64, num_layers=2, hidden_size=64, num_heads=4
    ),
}


@dataclass(frozen=True)
class Layout:
    """Sizes of a layout, and samples per data-parallel rank and step for each family of models.

    With pipeline stages a microbatch has one sample.
    """

    devices: int
    tp: int
    llama_batch: int
    gpt2_batch: int = 8
    ep: int = 1
    pp: int = 1

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.devices // (self.tp * self.pp)

    def batch(self, model: str) -> int:
        """Return the samples per data-parallel rank and step."""
        return self.gpt2_batch if "gpt2" in model else self.llama_batch


LAYOUTS = {
    "single": Layout(1, 1, 1),
    "dp2": Layout(2, 1, 1),
    "dp4": Layout(4, 1, 1),
    "tp2": Layout(2, 2, 2),
    "tp4": Layout(4, 4, 4),
    "ep2": Layout(2, 1, 1, ep=2),
    "ep4": Layout(4, 1, 1, ep=4),
    "ep8": Layout(8, 1, 1, ep=8),
    "pp2": Layout(2, 1, 8, pp=2),
    "pp4": Layout(4, 1, 16, pp=4),
    "tp2_pp2": Layout(4, 2, 8, pp=2),
    "pp2_ep2": Layout(4, 1, 8, ep=2, pp=2),
}


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
