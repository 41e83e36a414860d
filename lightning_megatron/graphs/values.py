"""Nests of values as lists of their tensors, and back."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.nest import children, rebuild

#: Place of a tensor in a form.
TENSOR = "tensor"


@dataclass(frozen=True)
class FlatValues:
    """Tensors of a nest of values, and everything else.

    Args:
        tensors: The tensors, in the order of their containers.
        form: The nest with a mark in place of each tensor. Two nests with equal forms differ in
            their tensors alone.
    """

    tensors: tuple[Tensor, ...]
    form: Hashable
    nest: Any

    def with_tensors(self, tensors: Sequence[Any]) -> Any:
        """Return the nest with other values in place of its tensors.

        Args:
            tensors: New values, in the order of :attr:`tensors`.
        """
        return _filled(self.nest, iter(tensors))


def flatten(nest: Any) -> FlatValues:
    """Return the tensors of a nest and its form.

    Args:
        nest: Tensors, hashable plain values, and tuples and dataclasses of these.
    """
    tensors: list[Tensor] = []
    form = _form(nest, tensors)
    return FlatValues(tuple(tensors), form, nest)


def without_values(flat: FlatValues) -> FlatValues:
    """Return a nest whose tensors have shapes, strides and dtypes, but no values.

    Args:
        flat: The nest with values.
    """
    tensors = [
        torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        ).requires_grad_(tensor.requires_grad)
        for tensor in flat.tensors
    ]
    return flatten(flat.with_tensors(tensors))


def _form(node: Any, tensors: list[Tensor]) -> Hashable:
    if isinstance(node, Tensor):
        tensors.append(node)
        return TENSOR
    if node is None:
        return None
    parts = children(node)
    if parts is None:
        return (type(node), node)
    return (type(node), *(_form(value, tensors) for _, value in parts))


def _filled(node: Any, tensors: Iterator[Any]) -> Any:
    if isinstance(node, Tensor):
        return next(tensors)
    if node is None:
        return None
    return rebuild(node, lambda value: _filled(value, tensors))
