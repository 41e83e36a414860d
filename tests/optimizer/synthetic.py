"""A small model of bare tensors that covers every kind of sharding: the shards of each rank, and the
full tensors of one process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.random import derive_seed
from lightning_megatron.groups.shard_spec import ShardSpec, replicated_spec, set_shard_spec
from lightning_megatron.plan.shards import (
    attention_ranges,
    even_range,
    gated_ranges,
    padded_vocab_size,
    vocab_range,
)

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, VOCAB_MULTIPLE = 4, 4, 2, 2, 8, 10, 4
NUM_LAYERS = 4
WORD, HEAD = "model.embedding.word.weight", "model.head.weight"


@dataclass(frozen=True)
class FlatParameter:
    """One parameter of one rank: its spec and its extent along the cut dimension with padding."""

    spec: ShardSpec
    local_size: int | None = None


def pieces(mesh: ParallelMesh) -> dict[str, FlatParameter]:
    """Return the parameters that a rank holds, by name, in the order of the model."""
    tp, index = mesh.tp.size, mesh.tp.rank
    rows = padded_vocab_size(VOCAB, tp, VOCAB_MULTIPLE) // tp
    word = FlatParameter(
        ShardSpec((VOCAB, HIDDEN), (vocab_range(VOCAB, tp, index, VOCAB_MULTIPLE),)), rows
    )
    qkv_rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    flat_parameters = {WORD: word} if mesh.pp.is_first else {}
    for layer in range(NUM_LAYERS):
        if layer * mesh.pp.size // NUM_LAYERS != mesh.pp.rank:
            continue
        heads = attention_ranges(HEADS, KV_HEADS, HEAD_DIM, tp, index)
        specs = {
            "norm.weight": replicated_spec(torch.empty(HIDDEN), index, partial=True),
            "qkv.weight": ShardSpec((qkv_rows, HIDDEN), heads, partial=tp > KV_HEADS),
            "out.weight": ShardSpec((HIDDEN, HIDDEN), (even_range(HIDDEN, tp, index),), dim=1),
            "gated.weight": ShardSpec((2 * FFN, HIDDEN), gated_ranges(FFN, tp, index)),
            "scale": replicated_spec(torch.empty(()), index, partial=True),
        }
        for name, spec in specs.items():
            flat_parameters[f"model.layers.{layer}.{name}"] = FlatParameter(spec)
    if mesh.pp.is_last:
        norm = replicated_spec(torch.empty(HIDDEN), index)
        flat_parameters["model.final_norm.weight"] = FlatParameter(norm)
        if mesh.pp.size > 1:
            flat_parameters[HEAD] = FlatParameter(word.spec.tied("embedding.word.weight"), rows)
    return flat_parameters


def full_tensor(
    kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> Tensor:
    """Draw the same full tensor on every rank."""
    generator = torch.Generator().manual_seed(derive_seed(kind, name))
    return torch.randn(shape, generator=generator, dtype=dtype)


def full_parameters(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """List the full tensors of one process."""
    return {
        name: full_tensor("value", name, p.spec.full_shape, dtype)
        for name, p in pieces(ParallelMesh.single()).items()
    }


def parameters(
    mesh: ParallelMesh, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> dict[str, nn.Parameter]:
    """Build this rank's parameters, whose full values are the same in every layout; padding rows hold
    a value that must be neither counted nor saved.
    """
    named = {}
    for name, piece in pieces(mesh).items():
        full = full_tensor("value", WORD if name == HEAD else name, piece.spec.full_shape)
        local = piece.spec.shard(full, piece.local_size)
        if piece.local_size is not None:
            local[piece.spec.local_extent :] = 1000.0
        named[name] = set_shard_spec(nn.Parameter(local.to(device, dtype)), piece.spec)
    return named


def full_gradients(num_data_ranks: int) -> dict[str, Tensor]:
    """Return the mean over data ranks of the full gradients, where the gradient of the tied embedding
    is the sum of both uses.
    """
    shapes = {name: piece.spec.full_shape for name, piece in pieces(ParallelMesh.single()).items()}

    def mean(name: str, shape: tuple[int, ...]) -> Tensor:
        parts = [_gradient(name, rank, shape) for rank in range(num_data_ranks)]
        return torch.stack(parts).sum(0) / num_data_ranks

    gradients = {name: mean(name, shape) for name, shape in shapes.items()}
    gradients[WORD] += mean(HEAD, shapes[WORD])
    return gradients


def set_gradients(named: dict[str, nn.Parameter], mesh: ParallelMesh) -> None:
    """Set the gradient that this rank's backward pass would leave in each parameter, which is only a
    part of the sum where copies are partial.
    """
    for name, piece in pieces(mesh).items():
        full = _gradient(name, mesh.data.rank, piece.spec.full_shape)
        if name == WORD and mesh.pp.size == 1:
            full = full + _gradient(HEAD, mesh.data.rank, piece.spec.full_shape)
        local = piece.spec.shard(full, piece.local_size)
        if piece.spec.partial:
            for box, view in piece.spec.local_views(local):
                view.mul_(_part(name, box.offsets, box.copy, mesh.tp.size))
        named[name].grad = local.to(named[name].dtype)


def _gradient(name: str, data_rank: int, shape: tuple[int, ...]) -> Tensor:
    return full_tensor(f"gradient {data_rank}", name, shape)


def _part(name: str, offsets: tuple[int, ...], copy: int, tp: int) -> float:
    holders = tp
    if "qkv" in name:
        holders = 1 if offsets[0] < HEADS * HEAD_DIM else tp // KV_HEADS
    # Powers of two, so that the parts add up without rounding.
    return 1 - 0.125 * (holders - 1) if copy == 0 else 0.125


@contextmanager
def recorded_messages() -> Iterator[list[str]]:
    """Record the messages that the package logs inside the ``with`` block."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_megatron")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
