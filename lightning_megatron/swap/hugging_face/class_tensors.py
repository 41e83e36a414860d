"""Conversion between tensors of replaced models and of their classes: weights, optimizer states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.swap.families import Family, family_of
from lightning_megatron.swap.families.layer_names import is_training_only
from lightning_megatron.swap.hugging_face.own_code import OWN_CODE
from lightning_megatron.swap.hugging_face.replaced_model import replaced_models
from lightning_megatron.swap.tensors.low_rank import (
    Adapter,
    full_factors,
    is_factor,
    plain_name,
    without_adapters,
)
from lightning_megatron.swap.tensors.mapping import TensorMap, TensorsInMemory, named
from lightning_megatron.swap.tensors.packed import find_packed, pack, packed_rows, whole_of
from lightning_megatron.swap.weights.load import RenamedTensors, full_tensors


@dataclass(frozen=True)
class ClassTensors:
    """Conversion between one replaced model's tensors and those of its Hugging Face class.

    The conversion covers parameters and their optimizer state, in both directions. Tensor names
    include the prefix of the model.

    Args:
        order: Names of the class's parameters in its order, without the prefix; empty if unknown.
    """

    prefix: str
    family: Family
    config: Any
    adapter: Adapter | None = None
    order: tuple[str, ...] = ()

    @classmethod
    def of_module(cls, module: nn.Module) -> list[ClassTensors]:
        """Return the conversions of all replaced models inside a module."""
        return [
            cls(_prefix(name), part.family, part.body.config, part.adapter, part.class_order)
            for name, part in replaced_models(module)
        ]

    @classmethod
    def from_checkpoint(cls, models: Mapping[str, Mapping[str, Any]]) -> list[ClassTensors]:
        """Return the conversions of a checkpoint's replaced models.

        Args:
            models: Record of each Hugging Face model, by its name in the module. Models that
                run their own code are skipped, because their tensors are those of their classes.
        """
        conversions = []
        for name, model in models.items():
            if OWN_CODE in model:
                continue
            family = family_of(model["architecture"])
            adapter = Adapter(**model["adapter"]) if "adapter" in model else None
            conversions.append(cls(_prefix(name), family, family.config(model["config"]), adapter))
        return conversions

    def has(self, name: str) -> bool:
        """Return whether a name is that of a tensor of this model which the class has, too."""
        return name.startswith(self.prefix) and self._key(name) in self._maps

    def class_name(self, name: str) -> str:
        """Return the name of the class's tensor that equals or contains a tensor of the model."""
        return name.rpartition(".")[0] if self._is_of_stack(name) else name

    def place(self, name: str) -> int:
        """Return a parameter's index in the class's order; ``len(order)`` if it is unknown."""
        class_name = self.class_name(name) if self.has(name) else name
        return self._places.get(class_name.removeprefix(self.prefix), len(self.order))

    def has_same_form(self, name: str) -> bool:
        """Return whether the class stores a tensor of the model in the same form."""
        tensor = self._maps[self._key(name)]
        (first, *others) = tensor.sources
        is_cut = bool(others) or first.is_transposed or first.strip is not None or first.first > 0
        return not is_cut and self._class_tensor(tensor) == first.name

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Join full tensors of the model into the tensor of the class.

        Args:
            parts: All parts of one tensor of the class (those with the same :meth:`class_name`), by
                name. A vocabulary may have padding rows.
        """
        tensors: dict[str, Tensor] = {}
        for name, full in parts.items():
            tensor = self._maps[self._key(name)]
            tensors |= tensor.split(full[: tensor.shape[0]])
        first = next(iter(parts))
        members = self._members[self._class_tensor(self._maps[self._key(first)])]
        missing = set(members) - {self._key(name) for name in parts}
        if missing:
            raise CheckpointMismatchError(
                f"a tensor that {self.family.architecture} stores as one must have all its parts: "
                f"{named(missing)} of {self.class_name(first)!r} missing. Save all of them "
                "together."
            )
        (joined,) = pack(tensors, self.family.packed).values()
        return joined

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return a full tensor of the model from the class's tensor that contains it."""
        tensor = self._maps[self._key(name)]
        key = self._class_tensor(tensor)
        reader = TensorsInMemory({key: whole})
        parts = packed_rows(key, key, reader, self.family.packed)
        renamed = RenamedTensors({name_of_part: (reader, rows) for name_of_part, rows in parts})
        return tensor.full(renamed, whole.dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor of the model (elements)."""
        return self._maps[self._key(name)].shape

    @cached_property
    def _maps(self) -> dict[str, TensorMap]:
        table = self.family.class_tensors(self.config)
        maps = {tensor.target: tensor for tensor in table}
        for update in () if self.adapter is None else self.adapter.class_maps(table):
            maps |= {update.a.target: update.a, update.b.target: update.b}
        return maps

    @cached_property
    def _members(self) -> dict[str, list[str]]:
        members: dict[str, list[str]] = {}
        for target, tensor in self._maps.items():
            members.setdefault(self._class_tensor(tensor), []).append(target)
        return members

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.order)}

    def _key(self, name: str) -> str:
        key = name.removeprefix(self.prefix)
        return key if is_factor(key) else self.family.present_name(plain_name(key))

    def _is_of_stack(self, name: str) -> bool:
        match = find_packed(self._maps[self._key(name)].sources[0].name, self.family.packed)
        return match is not None and match[1].is_stack

    def _class_tensor(self, tensor: TensorMap) -> str:
        """Return the class's tensor that contains a tensor, by its name in the table."""
        return whole_of(tensor.sources[0].name, self.family.packed)


def class_name_in(models: Sequence[ClassTensors], name: str) -> str:
    """Return the name that a parameter had before the models of the module were replaced."""
    model = owner_of(models, name)
    return name if model is None else model.class_name(name)


def in_class_order(models: Sequence[ClassTensors], names: Sequence[str]) -> list[str]:
    """Sort the names of every replaced model in the order of its class.

    Names outside the replaced models keep their positions.
    """
    ordered = list(names)
    for model in models:
        held = [number for number, name in enumerate(names) if name.startswith(model.prefix)]
        sorted_names = sorted((names[number] for number in held), key=model.place)
        for number, name in zip(held, sorted_names, strict=True):
            ordered[number] = name
    return ordered


def class_states(
    models: Sequence[ClassTensors], key: str, states: Mapping[str, Any]
) -> dict[str, Any]:
    """Return optimizer state for the parameters of the models' classes.

    Args:
        key: Key of the optimizer state, such as ``exp_avg``.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, state in states.items():
        groups.setdefault(class_name_in(models, name), {})[name] = state
    return {name: _class_state(models, key, group) for name, group in groups.items()}


def state_from_class(
    model: ClassTensors | None, name: str, key: str, value: Any, shape: Sequence[int]
) -> Any:
    """Return the optimizer state of a replaced model's parameter from that of its class.

    Args:
        key: Key of the optimizer state, such as ``exp_avg``.
        value: State of the class's parameter: a full tensor or a plain value.
        shape: Shape of the class's parameter (elements).
    """
    if (
        model is None
        or model.has_same_form(name)
        or not isinstance(value, Tensor)
        or not value.dim()
    ):
        return value
    if tuple(value.shape) != tuple(shape):
        raise _other_shape(key, name, value, shape)
    return model.part(name, value)


def owner_of(models: Sequence[ClassTensors], name: str) -> ClassTensors | None:
    """Return the replaced model to which a parameter belongs; None if there is none."""
    return next((model for model in models if model.has(name)), None)


def _class_state(models: Sequence[ClassTensors], key: str, states: Mapping[str, Any]) -> Any:
    name, value = next(iter(states.items()))
    model = owner_of(models, name)
    if model is None or model.has_same_form(name):
        return value
    if isinstance(value, Tensor) and value.dim():
        for name_of_part, tensor in states.items():
            if tuple(tensor.shape) != model.shape(name_of_part):
                raise _other_shape(key, name_of_part, tensor, model.shape(name_of_part))
        return model.join(states)
    differing = [name_of_part for name_of_part, part in states.items() if not _is_same(value, part)]
    if differing:
        raise UnsupportedError(
            f"parameters that {model.family.architecture} stores as one must have equal scalars in "
            f"the optimizer state: {key!r} is {value} for {name!r} and {states[differing[0]]} for "
            f"{differing[0]!r}. Write only the weights (--weights_only)."
        )
    return value


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return bool(first == second)


def _other_shape(key: str, name: str, value: Tensor, shape: Sequence[int]) -> UnsupportedError:
    return UnsupportedError(
        "optimizer state must be shaped like its parameter or be a scalar to be converted: "
        f"{key!r} of {name!r} has shape {tuple(value.shape)}, the parameter {tuple(shape)}. The "
        "order of its elements is not known. Use an element-wise optimizer such as AdamW, or "
        "convert only the weights."
    )


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


def to_package_names(module: nn.Module, full: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the tensors of replaced models in a state dict to this package's names.

    Most tensors keep their names. Some are stored differently or are joined from several tensors.

    Args:
        full: Full tensors, by the names before the replacement. Tensors outside of replaced models
            are returned unchanged.
    """
    renamed = dict(full)
    for name, part in replaced_models(module):
        prefix = _prefix(name)
        config = part.body.config
        foreign = {
            key.removeprefix(prefix): renamed.pop(key) for key in full if key.startswith(prefix)
        }
        if not foreign:
            continue
        dtype = next(iter(foreign.values())).dtype
        table = part.family.class_tensors(config)
        adapter = part.adapter
        for target, tensor in full_tensors(
            without_adapters(foreign), part.family, config, dtype, table
        ):
            renamed[f"{prefix}{_in_tree(target, adapter)}"] = tensor
        for target, tensor in full_factors(foreign, adapter, table):
            renamed[f"{prefix}{target}"] = tensor
        # Other strategies do not save these tensors, so the module keeps its values.
        for key, buffer in part.named_buffers():
            if is_training_only(key):
                renamed[f"{prefix}{key}"] = buffer
        _add_aliases(renamed, prefix, part.family, config, adapter)
    return renamed


def to_class_names(
    models: Sequence[ClassTensors], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Convert replaced models' tensors in a state dict to the names and order of their classes.

    Args:
        state: Full tensors, by this package's names. Vocabularies may have padding rows.
    """
    parts: dict[str, list[str]] = {}
    for name in state:
        if not any(name.startswith(model.prefix) and is_training_only(name) for model in models):
            parts.setdefault(class_name_in(models, name), []).append(name)
    renamed: dict[str, Tensor] = {}
    for name, members in parts.items():
        model = owner_of(models, members[0])
        values = {member: state[member] for member in members}
        renamed[name] = values[name] if model is None else model.join(values)
    for model in models:
        _refuse_saved_modules(model.adapter)
        _add_aliases(renamed, model.prefix, model.family, model.config, model.adapter)
    return renamed


def _refuse_saved_modules(adapter: Adapter | None) -> None:
    if adapter is not None and adapter.saved:
        raise UnsupportedError(
            "modules that peft trains as a whole cannot be written as one file: "
            f"{', '.join(adapter.saved)}. peft also stores their original weights, which are not "
            "kept here. Write the adapter or the merged model with `lightning-megatron convert`."
        )


def _in_tree(name: str, adapter: Adapter | None) -> str:
    return name if adapter is None else adapter.wrapped_name(name)


def _add_aliases(
    tensors: dict[str, Any], prefix: str, family: Family, config: Any, adapter: Adapter | None
) -> None:
    """Add each tensor with two names under the second name, too."""
    aliases = dict(family.copies)
    if config.tie_embeddings:
        aliases[family.head] = family.embedding
    for alias, name in aliases.items():
        original = f"{prefix}{_in_tree(name, adapter)}"
        if original in tensors:
            tensors[f"{prefix}{_in_tree(alias, adapter)}"] = tensors[original]
