"""Validation of a checkpoint's metadata: the types of values that are read, and their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from lightning_megatron.errors import CorruptDataError, ParallelPlanError, UnsupportedError
from lightning_megatron.plan.settings import Index, coerced

#: Key of the optimizers' hyperparameters and parameter names.
OPTIMIZERS = "megatron_optimizers"
#: Key of the record of the model in one process: order, aliases, padding and numbering of tensors.
ONE_PROCESS = "megatron_one_process"
#: Key of the records of Hugging Face models.
HUGGING_FACE = "hugging_face"
#: Prefix of the entries of a model's tensors.
MODEL = "state_dict."
#: Prefix of the current weights, if the entries of the model are averaged weights.
CURRENT = "current_model_state."
#: Prefix of the histories from which the scales of 8-bit products follow.
SCALES = "fp8."

#: A vocabulary is padded to at most twice its rows plus this number (rows).
_MAX_PADDING = 1 << 20


class _NumberedGroup(TypedDict):
    params: list[Index | str]


class _NumberedOptimizer(TypedDict):
    """State of an optimizer in a file of Lightning's other strategies, as torch writes it."""

    state: dict[Any, dict[str, Any]]
    param_groups: list[_NumberedGroup]


_KINDS: Mapping[str, Any] = {
    "epoch": Index,
    "global_step": Index,
    "loops": dict[str, dict[str, Any]],
    "callbacks": dict[str, Any],
    "lr_schedulers": list[Any],
    "optimizer_states": list[_NumberedOptimizer],
}


def check_values(values: Mapping[str, Any], where: str) -> None:
    """Validate the types of the metadata that this library reads; other values may be anything."""
    for name in _KINDS.keys() & values.keys():
        try:
            coerced(name, values[name], _KINDS[name])
        except ParallelPlanError as error:
            raise _damaged(where, str(error).rstrip(".")) from error
    for optimizer in values.get("optimizer_states", ()):
        for group in optimizer["param_groups"]:
            names = [number for number in group["params"] if isinstance(number, str)]
            if names:
                raise UnsupportedError(
                    "optimizer states of another strategy must number the parameters, as those of "
                    f"ddp and of one process do: {where} names them ({names[0]!r}), as FSDP does. "
                    "Save with ddp, or load only the weights."
                )


def check_names(
    one_process: Mapping[str, Any],
    optimizers: Sequence[Mapping[str, Any]],
    shapes: Mapping[str, Sequence[int]],
    where: str,
) -> None:
    """Check that the values of a checkpoint name its tensors, and no others of the model.

    Args:
        shapes: Full shapes of all tensors, by entry.
    """
    aliases = one_process["aliases"]
    used = {aliases.get(name, name) for name in one_process["order"]}
    known = {name.removeprefix(MODEL) for name in shapes if name.startswith(MODEL)}
    # Checkpoints of earlier versions do not list the tensors without elements.
    absent = used - known - one_process.get("empty", dict.fromkeys(used)).keys()
    if names := sorted(known - used) or sorted(absent):
        reason = "the names of its state dict do not match its tensors"
        raise _damaged(where, f"{reason}: {', '.join(names[:5])}")
    for index, optimizer in enumerate(optimizers):
        start = f"optimizer.{index}.state."
        groups = [group["parameters"] for group in optimizer["groups"]]
        states = {name.removeprefix(start) for name in shapes if name.startswith(start)}
        unknown = {name.rpartition(".")[0] for name in states}.difference(*groups)
        if unknown:
            reason = "states belong to no parameter of their optimizer"
            raise _damaged(where, f"{reason}: {', '.join(sorted(unknown)[:5])}")
    for name, rows in one_process["padded_rows"].items():
        shape = shapes.get(f"{MODEL}{name}")
        if shape is not None and (not shape or not shape[0] <= rows <= 2 * shape[0] + _MAX_PADDING):
            raise _damaged(where, f"{name} of shape {tuple(shape)} cannot be padded to {rows} rows")


def _damaged(where: str, reason: str) -> CorruptDataError:
    return CorruptDataError(
        f"the values of a checkpoint must be as they were written: {where} is not: {reason}. Use "
        "another checkpoint."
    )
