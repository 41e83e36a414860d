"""Models, layouts and rows that several benchmarks measure, and their training on random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.routing import ForcedRouting, workload_of
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT

#: Sizes of Llamas: vocabulary, length, layers, hidden size, heads, key/value heads and FFN size.
_LLAMAS = {
    "llama8b_half": (131072, 4096, 16, 4096, 32, 8, 14336),
    "mixtral_s": (32768, 4096, 4, 4096, 32, 8, 14336),
    "qwen3_30b_s": (151552, 4096, 12, 2048, 32, 4, 6144),
    "qwen3_12": (151552, 4096, 12, 2048, 32, 4, 6144),
    "qwen3_48": (151552, 4096, 48, 2048, 32, 4, 6144),
    "tiny": (51200, 1024, 12, 768, 12, None, 3072),
    "tiny_moe": (51200, 1024, 12, 1024, 16, None, 2816),
    "tiny_llama": (512, 64, 2, 64, 4, 2, 96),
    "tiny_mixtral": (512, 64, 2, 64, 4, 2, 96),
}
#: Number of experts, experts of a token, and FFN size of an expert.
_EXPERTS = {
    "mixtral_s": (8, 2, 14336),
    "qwen3_30b_s": (128, 8, 768),
    "qwen3_12": (128, 8, 768),
    "qwen3_48": (128, 8, 768),
    "tiny_moe": (32, 4, 704),
    "tiny_mixtral": (4, 2, 64),
}
#: Sizes of GPT-2: vocabulary, length, layers, hidden size and heads.
_GPT2S = {
    "gpt2_1_2b": (51200, 1024, 40, 1536, 16),
    "gpt2_2_5b": (51200, 1024, 54, 1920, 20),
    "gpt2_4_2b": (51200, 1024, 64, 2304, 24),
    "tiny_gpt2": (512, 64, 2, 64, 4),
}
_FIELDS = ("vocab_size", "max_seq_length", "num_layers", "hidden_size", "num_heads")
_LLAMA_FIELDS = (*_FIELDS, "num_kv_heads", "ffn_hidden_size")
_EXPERT_FIELDS = ("num_experts", "top_k", "ffn_hidden_size")


def _llama(name: str) -> GPTConfig:
    fields: dict[str, Any] = dict(zip(_LLAMA_FIELDS, _LLAMAS[name], strict=True))
    if name in _EXPERTS:
        experts = dict(zip(_EXPERT_FIELDS, _EXPERTS[name], strict=True))
        fields["experts"] = {**experts, "aux_loss": 0.01}
    if name in ("qwen3_12", "qwen3_48"):
        fields["head_dim"] = 128
    return GPTConfig.llama(**fields)


def _gpt2(name: str) -> GPTConfig:
    fields: dict[str, Any] = dict(zip(_FIELDS, _GPT2S[name], strict=True))
    return GPTConfig.gpt2(**fields)


SHAPES = {name: _llama(name) for name in _LLAMAS}
SHAPES |= {name: _gpt2(name) for name in _GPT2S}


def changed(model: str, *, layers: int = 0, length: int = 0, vocabulary: int = 0) -> GPTConfig:
    """Return a shape with other sizes; 0 keeps that of the shape."""
    shape = SHAPES[model]
    sizes = {
        "num_layers": layers or shape.num_layers,
        "max_seq_length": length or shape.max_seq_length,
        "vocab_size": vocabulary or shape.vocab_size,
    }
    return GPTConfig(**{**vars(shape), **sizes})


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
    cp: int = 1

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.devices // (self.tp * self.pp * self.cp)

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
    "cp1": Layout(1, 1, 1, gpt2_batch=1),
    "cp2": Layout(2, 1, 1, gpt2_batch=1, cp=2),
    "cp4": Layout(4, 1, 1, gpt2_batch=1, cp=4),
    "cp8": Layout(8, 1, 1, gpt2_batch=1, cp=8),
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
        routing: Name of the routing; see ``benchmarks/routing.py``. Several names of workloads,
            separated by commas, follow each other.
        num_tokens: Number of tokens per microbatch, for routings other than ``natural`` (tokens).
        steps_each: Steps of each of several workloads, which begins with its step 0 (steps).
    """

    def __init__(
        self,
        config: GPTConfig,
        routing: str = "natural",
        num_tokens: int = 0,
        steps_each: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.workloads = [workload_of(name) for name in routing.split(",")]
        self.num_tokens = num_tokens
        self.steps_each = steps_each
        self.model: GPT | None = None
        self._forced: ForcedRouting | None = None
        self._phase: tuple[int, int] | None = None

    def configure_model(self) -> None:
        """Build this rank's part of the model."""
        if self.model is None:
            mesh: Any = self.device_mesh
            self.model = GPT(self.config, mesh=mesh, seed=1234)
            if self.workloads[0] is not None:
                data = mesh.data
                self._forced = ForcedRouting.of(self.model, self.num_tokens, data.rank, data.size)

    def on_train_batch_start(self, *_: Any) -> None:
        """Force the experts of this step."""
        step = self.trainer.global_step
        number, step = divmod(step, self.steps_each) if self.steps_each else (0, step)
        workload = self.workloads[number]
        if workload is None or self._forced is None:
            return
        # Later steps with the same experts cost nothing.
        phase = number, workload.phase(step)
        if phase != self._phase:
            self._forced.set(workload, step)
        self._phase = phase

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss."""
        assert self.model is not None, "configure_model runs before the first step"
        return self.model(batch["tokens"], batch["labels"]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.01, fused=True)


#: Kinds of rows: one document each, packed documents by their lengths, the same by a dense mask.
ROWS = ("whole", "packed", "mask")
#: Length of the shortest random document (tokens).
_SHORTEST = 64


def document_lengths(length: int) -> list[int]:
    """Return random log-uniform document lengths up to half of the row, which fill it (tokens)."""
    generator = torch.Generator().manual_seed(length)
    lengths: list[int] = []
    remaining = length
    while remaining > 0:
        fraction = float(torch.rand((), generator=generator))
        drawn_length = int(_SHORTEST * (max(2 * _SHORTEST, length // 2) / _SHORTEST) ** fraction)
        lengths.append(min(drawn_length, remaining))
        remaining -= lengths[-1]
    return lengths


def seen_length(lengths: list[int]) -> int:
    """Return the length of a single document with equally many attention pairs per token."""
    return round(sum(length * length for length in lengths) / sum(lengths))


class PackedTokens(Tokens):
    """Dataset of random token rows, with the lengths of the documents in each row."""

    def __init__(self, config: GPTConfig, num_samples: int, lengths: list[int]) -> None:
        super().__init__(config, num_samples)
        self.lengths = lengths

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "lengths": torch.tensor(self.lengths)}


class TrainedOnDocuments(Trained):
    """GPT that trains on packed rows; lengths or a dense mask describe the documents."""

    def __init__(self, config: GPTConfig, lengths: list[int], has_mask: bool) -> None:
        super().__init__(config)
        self.lengths = lengths
        self.has_mask = has_mask
        self._mask: AttentionSpan | None = None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss."""
        assert self.model is not None, "configure_model runs before the first step"
        span = AttentionSpan(batch["lengths"], max(self.lengths))
        if self.has_mask:
            self._mask = self._mask or self._dense(batch["tokens"].device)
            span = self._mask
        return self.model(batch["tokens"], batch["labels"], span=span).mean()

    def _dense(self, device: torch.device) -> AttentionSpan:
        sizes = torch.tensor(self.lengths, device=device)
        documents = torch.arange(len(self.lengths), device=device).repeat_interleave(sizes)
        positions = torch.cat([torch.arange(size, device=device) for size in self.lengths])
        mask = (documents[:, None] == documents)[None, None]
        return AttentionSpan(mask=mask, positions=positions[None])
