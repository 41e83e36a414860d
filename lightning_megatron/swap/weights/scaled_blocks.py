"""Weights that files store in 4 or 8 bits with a scale for each block of elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_megatron.swap.tensors.mapping import Slices
from lightning_megatron.swap.weights.safetensors_file import StoredTensor

#: Positive numbers of 4 bits (1 for the sign, 2 for the exponent, 1 for the mantissa), by their
#: bits.
_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Number of elements with a common scale in the MXFP4 format.
_MXFP4_BLOCK = 32
#: Bits of the exponent zero in a scale of the MXFP4 format.
_BIAS = 127
#: Number of rows, and of columns, with a common scale in DeepSeek's 8-bit format.
_FP8_BLOCK = 128
#: Suffixes of the names of packed numbers, of their scales, and of the scales of squares.
_PACKED = "_blocks"
_SCALES = "_scales"
_INVERSE = "_scale_inv"


@dataclass(frozen=True)
class FourBitExperts:
    """Stacked weights of experts in the MXFP4 format, as bfloat16.

    Two numbers of 4 bits share a byte, and every 32 numbers along the input features share a power
    of two. Equal to transformers' conversion of ``..._blocks`` and ``..._scales``: files store the
    output features first, and the class the input features.

    Args:
        packed: Numbers (expert, output feature, run, 16 bytes).
        scales: Exponents plus 127 (expert, output feature, run).
    """

    packed: StoredTensor
    scales: StoredTensor
    dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape: experts, input features and output features (elements)."""
        experts, outputs, runs = self.scales.shape
        return experts, runs * _MXFP4_BLOCK, outputs

    def read(self, slices: Slices) -> Tensor:
        """Return a part of the weights."""
        experts, inputs, outputs = slices
        runs = slice(inputs.start // _MXFP4_BLOCK, -(-inputs.stop // _MXFP4_BLOCK))
        exponents = self.scales.read((experts, outputs, runs))
        packed = self.packed.read((experts, outputs, runs, slice(0, _MXFP4_BLOCK // 2)))
        pair = torch.stack((packed & 0xF, packed >> 4), -1)
        positive = torch.tensor(_FOUR_BITS)
        numbers = torch.cat((positive, -positive))[pair.int()].flatten(-2)
        scaled = torch.ldexp(numbers, exponents.int().unsqueeze(-1) - _BIAS).flatten(-2)
        first = runs.start * _MXFP4_BLOCK
        inputs_in_block = slice(inputs.start - first, inputs.stop - first, inputs.step)
        return scaled[..., inputs_in_block].to(self.dtype).transpose(1, 2)


@dataclass(frozen=True)
class ScaledSquares:
    """Weight in 8 bits with a scale for every 128 rows and columns, as bfloat16.

    Equal to the product of each element with the scale of its square, in float32.

    Args:
        numbers: Elements (row, column).
        scales: Scales (row of squares, column of squares).
    """

    numbers: StoredTensor
    scales: StoredTensor
    dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape (elements)."""
        return self.numbers.shape

    def read(self, slices: Slices) -> Tensor:
        """Return a part of the weight."""
        whole = tuple(slice(0, size) for size in self.scales.shape)
        scales = self.scales.read(whole).float()
        rows, columns = (
            torch.arange(size)[part] // _FP8_BLOCK
            for part, size in zip(slices, self.shape, strict=True)
        )
        numbers = self.numbers.read(slices).float()
        return (numbers * scales[rows][:, columns]).to(self.dtype)


FolderTensor: TypeAlias = StoredTensor | FourBitExperts | ScaledSquares
"""Tensor of a folder, of which parts can be read."""


def join_scales(tensors: Mapping[str, StoredTensor]) -> dict[str, FolderTensor]:
    """Join each weight in 4 or 8 bits with its scales to one tensor; keep all other tensors."""
    joined: dict[str, FolderTensor] = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(_PACKED):
            stem = name.removesuffix(_PACKED)
            scales = tensors.get(f"{stem}{_SCALES}")
            if scales is not None and _is_packed(tensor, scales):
                del joined[name], joined[f"{stem}{_SCALES}"]
                joined[stem] = FourBitExperts(tensor, scales)
        elif name.endswith(_INVERSE):
            stem = name.removesuffix(_INVERSE)
            numbers = tensors.get(stem)
            if numbers is not None and _is_in_squares(numbers, tensor):
                del joined[name]
                joined[stem] = ScaledSquares(numbers, tensor)
    return joined


def is_read_as_numbers(quantization: Any) -> bool:
    """Return whether weights of a ``quantization_config`` are read as floating-point numbers."""
    if hasattr(quantization, "to_dict"):
        quantization = quantization.to_dict()
    if not isinstance(quantization, Mapping):
        return False
    method = quantization.get("quant_method")
    block_shape = quantization.get("weight_block_size")
    return method == "mxfp4" or (
        method == "fp8"
        and isinstance(block_shape, (list, tuple))
        and [*block_shape] == [_FP8_BLOCK, _FP8_BLOCK]
    )


def _is_packed(packed: StoredTensor, scales: StoredTensor) -> bool:
    return (
        packed.dtype == scales.dtype == torch.uint8
        and len(scales.shape) == 3
        and packed.shape == (*scales.shape, _MXFP4_BLOCK // 2)
    )


def _is_in_squares(numbers: StoredTensor, scales: StoredTensor) -> bool:
    return (
        numbers.dtype == torch.float8_e4m3fn
        and scales.dtype.is_floating_point
        and len(numbers.shape) == 2
        and scales.shape == tuple(-(-size // _FP8_BLOCK) for size in numbers.shape)
    )
