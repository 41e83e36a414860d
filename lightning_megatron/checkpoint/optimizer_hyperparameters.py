"""Type check of an optimizer's saved hyperparameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_megatron.errors import CheckpointMismatchError


def check_hyperparameters(
    groups: Iterable[Mapping[str, Any]],
    saved: Iterable[Mapping[str, Any]],
    index: int | None = None,
) -> None:
    """Check that saved hyperparameters have the types of the optimizer's current ones.

    Values may differ. A hyperparameter that is None in the optimizer may have any type.

    Args:
        groups: Parameter groups of the optimizer.
        saved: Saved hyperparameters of each group.
        index: Index of the optimizer in errors.

    Raises:
        CheckpointMismatchError: If a hyperparameter has another type.
    """
    which = "" if index is None else f" of optimizer {index}"
    for number, (group, saved_group) in enumerate(zip(groups, saved, strict=True)):
        for key in saved_group.keys() & group.keys() - {"params", "param_names"}:
            if not _has_same_type(group[key], saved_group[key]):
                raise CheckpointMismatchError(
                    "a hyperparameter in a checkpoint must have the same type as in the optimizer: "
                    f"{key!r} of group {number}{which} is {saved_group[key]!r} "
                    f"({type(saved_group[key]).__name__}) there, and {group[key]!r} "
                    f"({type(group[key]).__name__}) in configure_optimizers. The optimizer does "
                    "not check loaded values. Restore configure_optimizers as it was, or load only "
                    "the weights."
                )


def _has_same_type(current: Any, saved: Any) -> bool:
    """Return whether a saved value has the type of the current one; int and float are one type."""
    if current is None:
        return True
    if isinstance(current, Tensor) or isinstance(saved, Tensor):
        return (
            isinstance(current, Tensor)
            and isinstance(saved, Tensor)
            and current.shape == saved.shape
        )
    if isinstance(current, bool) or isinstance(saved, bool):
        return isinstance(current, bool) and isinstance(saved, bool)
    if isinstance(current, (int, float)):
        return isinstance(saved, (int, float))
    if isinstance(current, (list, tuple)):
        is_list = isinstance(saved, (list, tuple)) and len(current) == len(saved)
        return is_list and all(map(_has_same_type, current, saved))
    return isinstance(saved, type(current)) or isinstance(current, type(saved))
