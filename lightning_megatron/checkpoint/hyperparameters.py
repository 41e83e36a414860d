"""The hyperparameters of an optimizer's groups, which a checkpoint may give other values, but no other types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_megatron.errors import CheckpointMismatchError


def check_hyperparameters(
    groups: Iterable[Mapping[str, Any]], saved: Iterable[Mapping[str, Any]], index: int | None = None
) -> None:
    """Check that saved hyperparameters have the types of an optimizer's own.

    Args:
        groups: The groups of the optimizer.
        saved: The hyperparameters of each, as they were saved.
        index: Number of the optimizer, for errors.

    Raises:
        CheckpointMismatchError: If one has another type; what the optimizer has as None may have any.
    """
    which = "" if index is None else f" of optimizer {index}"
    for number, (own, taken) in enumerate(zip(groups, saved, strict=True)):
        for key in taken.keys() & own.keys() - {"params", "param_names"}:
            if not _is_alike(own[key], taken[key]):
                raise CheckpointMismatchError(
                    f"a hyperparameter in a checkpoint must have the type that the optimizer has: {key!r} of group "
                    f"{number}{which} is {taken[key]!r} ({type(taken[key]).__name__}) there, and "
                    f"{own[key]!r} ({type(own[key]).__name__}) in configure_optimizers. The optimizer would compute "
                    "with a value that it has not checked. Restore configure_optimizers as it was, or load the "
                    "weights alone."
                )


def _is_alike(own: Any, taken: Any) -> bool:
    """Return whether a saved value has the type of the optimizer's; integers and floats are numbers alike."""
    if own is None:
        return True
    if isinstance(own, Tensor) or isinstance(taken, Tensor):
        return isinstance(own, Tensor) and isinstance(taken, Tensor) and own.shape == taken.shape
    if isinstance(own, bool) or isinstance(taken, bool):
        return isinstance(own, bool) and isinstance(taken, bool)
    if isinstance(own, (int, float)):
        return isinstance(taken, (int, float))
    if isinstance(own, (list, tuple)):
        is_list = isinstance(taken, (list, tuple)) and len(own) == len(taken)
        return is_list and all(map(_is_alike, own, taken))
    return isinstance(taken, type(own)) or isinstance(own, type(taken))
