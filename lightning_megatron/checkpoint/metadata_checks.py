"""Validation of a checkpoint's metadata: the types of values that are read, and their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from lightning_megatron.checkpoint.header import Header
from lightning_megatron.errors import CorruptDataError
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


def _is_number(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_shape(value: Any) -> bool:
    # torch counts elements in 64 bits, and the product must fit even if another size is 0.
    return (
        isinstance(value, list)
        and all(map(_is_number, value))
        and prod(size or 1 for size in value) < 1 << 59
    )


def _is_mapping(value: Any, inner: Callable[[Any], bool] = lambda value: True) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and inner(item) for name, item in value.items()
    )


def _is_loop(value: Any) -> bool:
    """Return whether the counts of batches and steps in a loop's state are valid."""
    if not isinstance(value, Mapping):
        return True
    counts = {"ready", "started", "processed", "completed"}
    parts = {"total", "current"}
    if not all(_is_number(count) for name, count in value.items() if name in counts):
        return False
    if parts & value.keys() and not all(isinstance(value.get(name), Mapping) for name in parts):
        return False
    inner = parts | {"optimizer", "step", "zero_grad"}
    return all(
        isinstance(part, Mapping) and _is_loop(part) if name in inner else _is_loop(part)
        for name, part in value.items()
    )


def _is_optimizer(value: Any) -> bool:
    return (
        _is_mapping(value)
        and isinstance(value.get("groups"), list)
        and all(map(_is_group, value["groups"]))
        and _is_mapping(value.get("values"), _is_mapping)
    )


def _is_group(value: Any) -> bool:
    return (
        _is_mapping(value)
        and _is_mapping(value.get("hyperparameters"))
        and _is_names(value.get("parameters"))
        and _is_names(value.get("states", []))
    )


def _is_plain_optimizer(value: Any) -> bool:
    """Return whether a value has the form of an optimizer's ``state_dict``."""
    if not _is_mapping(value) or not isinstance(value.get("state"), Mapping):
        return False
    groups = value.get("param_groups")
    states = list(value["state"].values())
    if not isinstance(groups, list) or not all(_is_mapping(group) for group in groups):
        return False
    if not all(isinstance(group.get("params"), list) for group in groups) or not all(
        map(_is_mapping, states)
    ):
        return False
    numbers = [number for group in groups for number in group["params"]]
    if not all(map(_is_number, numbers)) or len(set(numbers)) < len(numbers):
        return False
    kinds = {
        (key, isinstance(state_value, Tensor))
        for state in states
        for key, state_value in state.items()
    }
    return len(kinds) == len({key for key, _ in kinds})


def _is_one_process(value: Any) -> bool:
    return (
        _is_mapping(value)
        and _is_names(value.get("order"))
        and _is_mapping(value.get("aliases"), lambda name: isinstance(name, str))
        and _is_mapping(value.get("padded_rows"), _is_number)
        and _is_mapping(value.get("empty", {}), _is_shape)
        and isinstance(value.get("numbering"), list)
        and all(
            isinstance(entry, str) or (isinstance(entry, list) and all(map(_is_names, entry)))
            for entry in value["numbering"]
        )
    )


def _is_model(value: Any) -> bool:
    return (
        _is_mapping(value)
        and isinstance(value.get("architecture"), str)
        and _is_mapping(value.get("config"))
        and (value.get("adapter") is None or _is_mapping(value["adapter"]))
        and (OWN_CODE not in value or _is_own_code(value[OWN_CODE]))
    )


def _is_own_code(value: Any) -> bool:
    return (
        _is_mapping(value)
        and _is_mapping(value.get("tensors"), lambda name: isinstance(name, str))
        and len(set(value["tensors"].values())) == len(value["tensors"])
        and isinstance(value.get("has_other_format"), bool)
    )


_LEGAL: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "epoch": ("a whole number", _is_number),
    "global_step": ("a whole number", _is_number),
    "loops": (
        "a mapping of loops with their counts",
        lambda v: _is_mapping(v, _is_mapping) and _is_loop(v),
    ),
    "callbacks": ("a mapping", _is_mapping),
    "lr_schedulers": ("a list", lambda value: isinstance(value, list)),
    "optimizer_states": (
        "a list of torch optimizer states, each with state and param_groups, with unique parameter "
        "numbers, in which states of one name are all tensors or all plain values",
        lambda value: isinstance(value, list) and all(map(_is_plain_optimizer, value)),
    ),
    OPTIMIZERS: (
        "a list of groups and values of optimizers",
        lambda value: isinstance(value, list) and all(map(_is_optimizer, value)),
    ),
    ONE_PROCESS: ("a mapping with order, aliases, padded_rows and numbering", _is_one_process),
    HUGGING_FACE: (
        "a mapping of models, each with architecture and config",
        lambda v: _is_mapping(v, _is_model),
    ),
}


def check_values(values: Mapping[str, Any], where: str) -> None:
    """Validate the types of the metadata that this library reads; other values may be anything.

    Args:
        values: Metadata by name.

    Raises:
        CorruptDataError: If a value is invalid; the message names it.
    """
    for name, (legal, holds) in _LEGAL.items():
        if name in values and not holds(values[name]):
            raise _damaged(where, f"{name} must be {legal}: it is {str(values[name])[:200]!r}")


def check_metadata(values: Mapping[str, Any], header: Header, where: str) -> None:
    """Validate the metadata and compare its step and epoch with the header.

    Args:
        values: Metadata by name.
        header: Header of the same checkpoint.

    Raises:
        CorruptDataError: If a value is invalid or contradicts the header; the message names it.
    """
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
    """Check that the names in the record of one process match the tensors of the checkpoint.

    Args:
        one_process: The checkpoint's record of the model in one process.
        optimizers: The checkpoint's records of its optimizers.
        shapes: Full shapes of all tensors, by entry.

    Raises:
        CorruptDataError: If a tensor would be dropped, invented or used twice; the message names
            it.
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
    _check_same_names("a name occurs twice", _duplicates(names), where)
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
    """Check that each saved optimizer state is listed in the parameter group of its parameter.

    Args:
        groups: Parameter groups with the names of parameters and of their states.
        saved: Names of the saved states of every parameter.
        where: Name of the checkpoint in errors.

    Raises:
        CorruptDataError: If a state is not listed; the message names it.
    """
    group_of = {name: group for group in groups for name in group["parameters"]}
    for name, keys in saved.items():
        # Checkpoints of earlier versions do not list the states.
        known = None if name not in group_of else group_of[name].get("states", keys)
        wrong = [f"{key} of {name}" for key in keys if known is None or key not in known]
        _check_same_names(f"the groups of optimizer {index} do not know", wrong, where)


def _duplicates(names: Iterable[str]) -> set[str]:
    earlier: set[str] = set()
    return {name for name in names if name in earlier or earlier.add(name)}  # type: ignore[func-returns-value]


def _check_same_names(what: str, names: Iterable[str], where: str) -> None:
    if ordered := sorted(names):
        raise _damaged(where, f"{what}: {', '.join(ordered[:5])}")


def _damaged(where: str, reason: str) -> CorruptDataError:
    return CorruptDataError(
        f"the values of a checkpoint must be as they were written: {where} is not: {reason}. Use "
        "another checkpoint."
    )
