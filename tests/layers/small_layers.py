"""Small layers with slots for their gradients, and losses of stored logits, for comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.embedding import (
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_logits,
)
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.loss.chunked_loss import LogitForm
from lightning_megatron.layers.loss.cross_entropy import vocab_parallel_cross_entropy
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, set_slot
from lightning_megatron.layers.parameters.weight_gradient_queue import WeightGradientQueue

S, B, D, F_OUT, V = 8, 3, 16, 12, 150
FORMS = [LogitForm(), LogitForm(scale=0.5), LogitForm(scale=2.0, soft_cap=3.0)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def local_length(mesh: ParallelMesh) -> int:
    """Return the number of positions that a rank holds between layers."""
    return S // (mesh.tp.size if mesh.sequence_parallel else 1)


def run_once(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def run_twice(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) + layer(x * 0.5 if x.is_floating_point() else x.flip(0))


def run_recomputed(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


class TiedEmbedding(nn.Module):
    """Use one table as embedding and head, as a tied GPT on one stage does."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.word, self.mesh = VocabParallelEmbedding(V, D, mesh), mesh

    def forward(self, tokens: Tensor) -> Tensor:
        return vocab_logits(self.word(tokens).tanh(), self.word.weight, self.mesh)


def make_cases(mesh: ParallelMesh) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield layers of every kind with their inputs."""
    x = draw(local_length(mesh), B, D)
    for bias in (True, False):
        yield "column", ColumnParallelLinear(D, F_OUT, mesh, bias=bias), x
        row = RowParallelLinear(D, F_OUT, mesh, bias=bias)
        yield "row", row, draw(S, B, D // mesh.tp.size)
    yield "gathered column", ColumnParallelLinear(D, F_OUT, mesh, gather_output=True), x
    yield "head", VocabParallelHead(V, D, mesh), x
    tokens = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(4))
    tokens[0] = torch.tensor([5, V - 1, 5, 0, 5, 5, V - 1, 2])
    yield "embedding", VocabParallelEmbedding(V, D, mesh), tokens
    padded = VocabParallelEmbedding(V, D, mesh, padding_id=int(tokens[0, 1]))
    yield "embedding with padding", padded, tokens
    yield "tied", TiedEmbedding(mesh), tokens


def attach_slots(
    layer: nn.Module, dtype: torch.dtype = torch.float64, queue: WeightGradientQueue | None = None
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Give every parameter a slot over memory of NaN; return the gradients and the number of
    notices of each parameter.
    """
    gradients, calls = {}, dict.fromkeys(dict(layer.named_parameters()), 0)
    for name, parameter in layer.named_parameters():
        gradients[name] = torch.full_like(parameter, torch.nan, dtype=dtype)

        def count(name: str = name) -> None:
            calls[name] += 1

        set_slot(parameter, GradientSlot(gradients[name], count, queue=queue))
    return gradients, calls


@contextmanager
def record_products(events: list[str]) -> Iterator[None]:
    """Add the two products of a backward pass to events."""
    names = {
        torch.ops.aten.mm.default: "input gradient",
        torch.ops.aten.addmm.out: "weight gradient",
    }

    class RecordProducts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            events.extend([names[func]] if func in names else [])
            return func(*args, **(kwargs or {}))

    with RecordProducts():
        yield


def stored_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mesh: ParallelMesh,
    form: LogitForm = FORMS[0],
    **options: Any,
) -> Tensor:
    """Return losses by logits that are stored for all tokens."""
    logits = vocab_logits(hidden, weight, mesh) * form.scale
    if form.soft_cap is not None:
        logits = form.soft_cap * torch.tanh(logits / form.soft_cap)
    return vocab_parallel_cross_entropy(logits, labels, mesh, **options)
