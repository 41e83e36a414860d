"""Validation of a checkpoint's metadata: the types of values that are read, and their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from lightning_megatron.checkpoint.header import Header
from lightning_megatron.errors import CorruptDataError, ParallelPlanError, UnsupportedError
from lightning_megatron.plan.settings import Index, coerced, shown
from lightning_megatron.swap.hugging_face.own_code import OWN_CODE

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


class _Group(TypedDict):
    hyperparameters: dict[str, Any]
    parameters: list[str]
    # Checkpoints of earlier versions do not list the states.
    states: NotRequired[list[str]]


class _Optimizer(TypedDict):
    groups: list[_Group]
    values: dict[str, dict[str, Any]]


class _NumberedGroup(TypedDict):
    params: list[Index | str]


class _NumberedOptimizer(TypedDict):
    """State of an optimizer in a file of Lightning's other strategies, as torch writes it."""

    state: dict[Any, dict[str, Any]]
    param_groups: list[_NumberedGroup]


class _OneProcess(TypedDict):
    order: list[str]
    aliases: dict[str, str]
    padded_rows: dict[str, Index]
    empty: NotRequired[dict[str, list[Index]]]
    # The reason why the numbers are unknown takes the place of the names of an optimizer.
    numbering: list[str | list[list[str]]]


class _OwnCode(TypedDict):
    tensors: dict[str, str]
    has_other_format: bool


class _Model(TypedDict):
    architecture: str
    config: dict[str, Any]
    adapter: NotRequired[dict[str, Any] | None]
    own_code: NotRequired[_OwnCode]


_KINDS: Mapping[str, Any] = {
    "epoch": Index,
    "global_step": Index,
    "loops": dict[str, dict[str, Any]],
    "callbacks": dict[str, Any],
    "lr_schedulers": list[Any],
    "optimizer_states": list[_NumberedOptimizer],
    OPTIMIZERS: list[_Optimizer],
    ONE_PROCESS: _OneProcess,
    HUGGING_FACE: dict[str, _Model],
}


def _has_counts(value: Any) -> bool:
    """Return whether the counts of batches and steps in a loop's state are valid."""
    if not isinstance(value, Mapping):
        return True
    counts = {"ready", "started", "processed", "completed"}
    parts = {"total", "current"}
    for name, count in value.items():
        if name in counts and (type(count) is not int or count < 0):
            return False
    if parts & value.keys() and not all(isinstance(value.get(name), Mapping) for name in parts):
        return False
    inner = parts | {"optimizer", "step", "zero_grad"}
    return all(
        isinstance(part, Mapping) and _has_counts(part) if name in inner else _has_counts(part)
        for name, part in value.items()
    )


def check_values(values: Mapping[str, Any], where: str) -> None:
    """Validate the types of the metadata that this library reads; other values may be anything."""
    for name, kind in _KINDS.items():
        if name in values:
            try:
                coerced(name, values[name], kind)
            except ParallelPlanError as error:
                raise _damaged(where, str(error).rstrip(".")) from error
    if not _has_counts(values.get("loops")):
        raise _damaged(where, f"loops must have whole numbers as counts: {shown(values['loops'])}")
    for optimizer in values.get("optimizer_states", ()):
        numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
        names = [number for number in numbers if isinstance(number, str)]
        if names:
            raise UnsupportedError(
                "optimizer states of another strategy must number the parameters, as those of ddp "
                f"and of one process do: {where} names them ({names[0]!r}), as FSDP does. Save "
                "with ddp, or load only the weights."
            )
        if len(set(numbers)) < len(numbers):
            raise _damaged(where, "optimizer_states must have unique parameter numbers")
    for name, model in values.get(HUGGING_FACE, {}).items():
        entries = model.get(OWN_CODE, {}).get("tensors", {}).values()
        if len(set(entries)) < len(entries):
            raise _damaged(where, f"the tensors of {HUGGING_FACE}.{name} must differ")


def check_metadata(values: Mapping[str, Any], header: Header, where: str) -> None:
    """Validate the metadata and compare its step and epoch with the header."""
    check_values(values, where)
    for name, number in (("global_step", header.global_step), ("epoch", header.epoch)):
        if name in values and values[name] != number:
            raise _damaged(where, f"its {name} is {values[name]}, but the header says {number}")


def check_names(
    one_process: Mapping[str, Any],
    optimizers: Sequence[Mapping[str, Any]],
    shapes: Mapping[str, Sequence[int]],
    where: str,
) -> None:
    """Check that no tensor would be dropped, invented or used twice in one process.

    Args:
        shapes: Full shapes of all tensors, by entry.
    """
    names = one_process["order"]
    aliases = one_process["aliases"]
    # Checkpoints of earlier versions do not list the tensors without elements.
    known = {name.removeprefix(MODEL) for name in shapes if name.startswith(MODEL)}
    used = {aliases.get(name, name) for name in names}
    _check_same_names("the names of its state dict do not match its tensors", known - used, where)
    if "empty" in one_process:
        _check_same_names(
            "its state dict has names without tensors",
            used - known - one_process["empty"].keys(),
            where,
        )
        wrong = {name for name, shape in one_process["empty"].items() if 0 not in shape}
        _check_same_names("tensors without values have elements", wrong, where)
    twice = [name for name, count in Counter(names).items() if count > 1]
    _check_same_names("a name occurs twice", twice, where)
    for name, rows in one_process["padded_rows"].items():
        shape = shapes.get(f"{MODEL}{name}")
        if shape is not None and (not shape or not shape[0] <= rows <= 2 * shape[0] + _MAX_PADDING):
            raise _damaged(where, f"{name} of shape {tuple(shape)} cannot be padded to {rows} rows")
    _check_optimizers(optimizers, one_process["numbering"], shapes, where)
    starts = (
        MODEL,
        CURRENT,
        SCALES,
        *(f"optimizer.{index}.state." for index in range(len(optimizers))),
    )
    _check_same_names(
        "tensors belong to neither the model nor an optimizer",
        (name for name in shapes if not name.startswith(starts)),
        where,
    )


def _check_optimizers(
    optimizers: Sequence[Mapping[str, Any]],
    numberings: Sequence[Any],
    shapes: Mapping[str, Sequence[int]],
    where: str,
) -> None:
    """Check the names of the numbered parameters, of tensors and of values of optimizers."""
    for optimizer, numbering in zip(optimizers, numberings, strict=False):
        if not isinstance(numbering, str):
            groups = [group["parameters"] for group in optimizer["groups"]]
            if list(map(sorted, groups)) != list(map(sorted, numbering)):
                raise _damaged(
                    where, "the numbered parameters of an optimizer do not match its groups"
                )
    if len(optimizers) not in (0, len(numberings)):
        raise _damaged(
            where, f"{len(optimizers)} optimizers have {len(numberings)} lists of parameter numbers"
        )
    for index, optimizer in enumerate(optimizers):
        states: dict[str, dict[str, Any]] = {}
        for entry in (name for name in shapes if name.startswith(f"optimizer.{index}.state.")):
            name, _, key = entry.split(".", 3)[3].rpartition(".")
            states.setdefault(name, {})[key] = entry
        check_states(index, optimizer["groups"], states, where)
        known = {name for group in optimizer["groups"] for name in group["parameters"]}
        _check_same_names(
            "values belong to no parameter of their optimizer",
            optimizer["values"].keys() - known,
            where,
        )


def check_states(
    index: int, groups: Sequence[Mapping[str, Any]], saved: Mapping[str, Iterable[str]], where: str
) -> None:
    """Check that each saved optimizer state is listed in the parameter group of its parameter."""
    group_of = {name: group for group in groups for name in group["parameters"]}
    for name, keys in saved.items():
        # Checkpoints of earlier versions do not list the states.
        known = None if name not in group_of else group_of[name].get("states", keys)
        wrong = [f"{key} of {name}" for key in keys if known is None or key not in known]
        _check_same_names(f"the groups of optimizer {index} do not know", wrong, where)


def _check_same_names(what: str, names: Iterable[str], where: str) -> None:
    if ordered := sorted(names):
        raise _damaged(where, f"{what}: {', '.join(ordered[:5])}")


def _damaged(where: str, reason: str) -> CorruptDataError:
    return CorruptDataError(
        f"the values of a checkpoint must be as they were written: {where} is not: {reason}. Use "
        "another checkpoint."
    )
