"""What a module returns, known from the shapes of its inputs alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatron.errors import UnsupportedError


class ResultForm:
    """Know what a module returns for inputs of some shapes, without its values.

    Args:
        name: Name of the module, for errors.
        source: The module, on the meta device.
        args: Arguments of a call, by position.
        kwargs: Arguments by name.

    Raises:
        UnsupportedError: If that depends on values, or the result has numbers that are not floating.
    """

    def __init__(self, name: str, source: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = name
        args, kwargs = pytree.tree_map(_without_values, (args, kwargs))
        try:
            with torch.no_grad(), torch.device("meta"):
                self._result = source(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise UnsupportedError(
                f"{name!r} must give results whose shapes follow from those of its inputs, because another stage "
                f"computes them: without values it fails with {error}. Use pp=1."
            ) from error

    def __call__(self, hidden: Tensor | None, device: torch.device) -> Any:
        """Return the result: ``hidden`` for its first tensor, if given, and NaN for others."""
        leaves, structure = pytree.tree_flatten(self._result)
        first = next((n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
        filled = [
            hidden if n == first and hidden is not None else self._unknown(leaf, device)
            for n, leaf in enumerate(leaves)
        ]
        return pytree.tree_unflatten(filled, structure)

    def _unknown(self, leaf: Any, device: torch.device) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not (leaf.is_floating_point() or leaf.is_complex()):
            raise UnsupportedError(
                f"{self.name!r} must give floating-point results, because another stage computes them and others "
                f"cannot be told from real ones: {leaf.dtype} is among them. Use pp=1."
            )
        return torch.full(leaf.shape, torch.nan, dtype=leaf.dtype, device=device)


def shapes_of(node: Any) -> Any:
    """Describe a nest of arguments by what the form of a result can depend on."""
    leaves, structure = pytree.tree_flatten(node)
    return structure, tuple(_kind_of(leaf) for leaf in leaves)


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf)


def _without_values(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf
