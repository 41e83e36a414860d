"""Dropout whose masks no parallel layout, microbatch size or recomputation changes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused import choose_kernels
from lightning_megatron.plan.mask_numbers import MaskNumbers, PlaceCut, dimension_of_rows
from lightning_megatron.shapes import Bool, Float, Int

#: Constants of Philox 4x32.
_WORD = 0xFFFFFFFF
_FACTORS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10
#: Counters with neighbouring features; each of them has the numbers of four features.
_LANES = 32


def hidden_dropout(
    hidden: Float[Tensor, "*shape"],
    probability: float,
    training: bool,
    mesh: ParallelMesh,
    *,
    batch_first: bool = False,
) -> Float[Tensor, "*shape"]:
    """Drop elements of the residual stream.

    Whether an element is dropped depends on the seed of the run, the number of the batch, the
    layer, the draw within the layer, and on the element's sample, position and feature. It is the
    same in every layout and for every size of microbatches. The states of torch's default
    generators do not change.

    Shapes: ``(seq_local, batch, hidden)``, ``(batch, seq, hidden)`` with ``batch_first``, or
        ``(batch, hidden)``, whose ranks hold all positions.
    """
    if not training or probability == 0.0:
        return hidden
    sequence = (mesh.tp.rank, mesh.tp.size) if mesh.sequence_parallel else (0, 1)
    context = (mesh.cp.rank, mesh.cp.size)
    numbers = _hidden_numbers(tuple(hidden.shape), batch_first, sequence, context)
    return drop_numbered(hidden, probability, mesh, numbers)


# Every layer asks again in every step, and the host would take as long as for a launch.
@lru_cache
def _hidden_numbers(
    shape: tuple[int, ...], batch_first: bool, sequence: tuple[int, int], context: tuple[int, int]
) -> MaskNumbers:
    if len(shape) == 2:
        return MaskNumbers(dimension_of_rows(shape, 0))
    seq_dim = int(batch_first)
    samples = dimension_of_rows(shape, 1 - seq_dim)
    places = dimension_of_rows(shape, seq_dim)
    return MaskNumbers(samples, places, cut=PlaceCut.of(shape[seq_dim], sequence, context))


def places_of(mesh: ParallelMesh, length: int, is_sharded: bool) -> PlaceCut:
    """Return the positions of ``length`` row tokens that this rank holds.

    Args:
        is_sharded: Whether the ranks of tp share the positions.
    """
    sequence = (mesh.tp.rank, mesh.tp.size) if is_sharded else (0, 1)
    return PlaceCut.of(length, sequence, (mesh.cp.rank, mesh.cp.size))


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of attention weights, the same in every layout.

    Args:
        first_head: Number of this rank's first head in the whole layer (heads).
    """

    mesh: ParallelMesh
    first_head: int = 0

    def from_head(self, head: int) -> WeightDropout:
        """Return the dropout of the heads that follow the first ``head`` heads of this rank."""
        return replace(self, first_head=self.first_head + head)

    def __call__(
        self, weights: Float[Tensor, "batch heads seq _"], probability: float
    ) -> Float[Tensor, "batch heads seq _"]:
        if probability == 0.0:
            return weights
        batch, heads, places = (dimension_of_rows(weights.shape, dim) for dim in range(3))
        numbers = MaskNumbers(batch, places, heads, first_head=self.first_head)
        return drop_numbered(weights, probability, self.mesh, numbers, "attention")


def tensor_region_stream(
    probability: float,
    training: bool,
    mesh: ParallelMesh,
) -> AbstractContextManager[None]:
    """Select the random stream for kernels that draw masks inside a tensor-parallel region.

    Ranks have different heads or features there, and draw different masks. The stream does not
    change if nothing will be dropped.

    Source: Shoeybi et al. 2019, appendix B.2.
    """
    return mesh.random.fork("tensor") if training and probability > 0.0 else nullcontext()


@torch.compiler.disable
def drop_numbered(
    values: Float[Tensor, "*shape"],
    probability: float,
    mesh: ParallelMesh,
    numbers: MaskNumbers,
    purpose: str = "hidden",
) -> Float[Tensor, "*shape"]:
    """Drop elements whose rows have numbers in the whole batch.

    Args:
        purpose: Name of the masks, whose order in a layer must be the same in all layouts.
    """
    # torch.compile would specialise on the numbers of the key and recompile in every step.
    key = mesh.random.mask_key(purpose, numbers.samples[1])
    result: Tensor = _Dropout.apply(values, key, numbers.as_integers, probability)
    return result


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, key: Tensor, numbers: list[int], probability: float
    ) -> Tensor:
        # The backward pass computes the mask again. A recomputation replaces saved tensors only, so
        # the key is one; without a version, because each replay of a captured computation fills it.
        ctx.save_for_backward(key.data)
        ctx.settings = numbers, probability
        result: Tensor = torch.ops.lightning_megatron.dropout(values, key, numbers, probability)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (key,) = ctx.saved_tensors
        return _Dropout.apply(grads[0], key, *ctx.settings), None, None, None


def _drop(values: Tensor, key: Tensor, numbers: Sequence[int], dropout: float) -> Tensor:
    if dropout == 0.0:
        return values.clone()
    rows = _rows_of(tuple(numbers))
    threshold = round(dropout * 2**31)
    scale = 1.0 / (1.0 - dropout)
    kernels = _kernels_for(values)
    if kernels is not None:
        result: Tensor = kernels.drop_elements(values, key, rows, threshold, scale)
        return result
    shape = values.numel() // values.shape[-1], values.shape[-1]
    mask = keep_mask(key, shape, rows, threshold, values.device).view(values.shape)
    return torch.where(mask, values * scale, 0.0)


@lru_cache
def _rows_of(numbers: tuple[int, ...]) -> MaskNumbers:
    return MaskNumbers.of_integers(numbers)


def _shape_of_result(values: Tensor, key: Tensor, numbers: Sequence[int], dropout: float) -> Tensor:
    return torch.empty(values.shape, dtype=values.dtype, device=values.device)


# An operator that is defined by its schema takes a fifth of the host's time of torch's custom_op.
# Modes that replace random operators of torch recognise it by its tag, and turn dropout off by the
# name of its argument.
_LIBRARY = torch.library.Library("lightning_megatron", "FRAGMENT")
_LIBRARY.define(
    "dropout(Tensor values, Tensor key, int[] numbers, float dropout) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_LIBRARY.impl("dropout", _drop, "CompositeExplicitAutograd")
_LIBRARY.impl("dropout", _shape_of_result, "Meta")


def _kernels_for(values: Tensor) -> ModuleType | None:
    if not values.is_cuda or values.dtype == torch.float64:
        return None
    return choose_kernels.choose_kernels(values.device).kernels


def keep_mask(
    key: Int[Tensor, "4"],
    shape: tuple[int, int],
    numbers: MaskNumbers,
    threshold: int,
    device: torch.device,
) -> Bool[Tensor, "rows features"]:
    """Return which elements are kept.

    The random number of an element is a function of the key, of its feature and head in the whole
    layer, of its position in the whole row, and of its sample in the batch of all data ranks. It
    does not depend on the ranks that share these, or on the microbatch.

    Args:
        key: Seed of the mask, number of the first sample, distance between the numbers of
            neighbouring samples, and rows of each sample, as ``RandomStreams.mask_key`` returns.
        threshold: Elements with a smaller 31-bit number are dropped.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox).
    """
    num_rows, features = shape
    seed, first_sample, stride, rows_of_sample = key.to(device).unbind()
    rows = torch.arange(num_rows, device=device)[:, None]
    index, place, head = (
        rows // divisor % size for divisor, size in (numbers.samples, numbers.places, numbers.heads)
    )
    cut = numbers.cut
    place = place + cut.offset
    place = torch.where(place < cut.piece, place + cut.early, place + (cut.late - cut.piece))
    sample = first_sample + stride * (index // rows_of_sample)
    part = head + numbers.first_head + index % rows_of_sample * 65536
    # Counter 32 i + j has the numbers of the features 128 i + j + (0, 32, 64, 96).
    width = 4 * _LANES
    start = numbers.first_feature // width
    stop = -(-(numbers.first_feature + features) // width)
    lanes = torch.arange(start * _LANES, stop * _LANES, device=device)[None]
    words = philox((lanes, place, sample, part), (seed & _WORD, seed >> 32 & _WORD))
    by_feature = torch.stack([word.unflatten(1, (-1, _LANES)) for word in words], 2).flatten(1)
    first = numbers.first_feature - start * width
    return by_feature[:, first : first + features] >> 1 >= threshold


def philox(
    counter: tuple[Int[Tensor, "..."], Int[Tensor, "..."], Int[Tensor, "..."], Int[Tensor, "..."]],
    key: tuple[Int[Tensor, "..."], Int[Tensor, "..."]],
) -> tuple[Int[Tensor, "..."], Int[Tensor, "..."], Int[Tensor, "..."], Int[Tensor, "..."]]:
    """Return four random 32-bit words for each counter, by Philox 4x32 of ten rounds.

    All words are integers of 64 bits; those of the counters broadcast.
    """
    first, second, third, fourth = (word & _WORD for word in counter)
    low, high = key
    for _ in range(_NUM_ROUNDS):
        # The products wrap around at 64 bits; their halves are those of unsigned numbers.
        of_first = first * _FACTORS[0]
        of_third = third * _FACTORS[1]
        first = of_third >> 32 & _WORD ^ second ^ low
        third = of_first >> 32 & _WORD ^ fourth ^ high
        second = of_third & _WORD
        fourth = of_first & _WORD
        low = low + _KEY_STEPS[0] & _WORD
        high = high + _KEY_STEPS[1] & _WORD
    return first, second, third, fourth
