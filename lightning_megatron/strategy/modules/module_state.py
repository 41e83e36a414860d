"""Snapshot of a module's buffers and attributes, restored after a trial step."""

from __future__ import annotations

import math
import random
import re
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from copy import copy as shallow_copy
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_megatron.layers.linear.feature_shard import FeatureShard
from lightning_megatron.models.remote_tensor import RemoteTensor
from lightning_megatron.strategy.modules.state_digest import IGNORED_TYPES

#: Packages whose objects, other than modules, steps only read.
_READ_ONLY = frozenset(
    {"builtins", "torch", "lightning", "lightning_fabric", "transformers", "tokenizers", "logging"}
)
_PACKAGE = __name__.partition(".")[0]
#: Classes of this package whose objects accumulate something in a forward pass.
_ACCUMULATING = frozenset({"RouterStatistics", "RankRows"})
_IMMUTABLE = frozenset({int, float, complex, str, bytes, bool, type(None)})
_CONTAINERS = (dict, list, tuple, deque)
#: Attributes of every module, which torch, the Trainer and the strategy manage.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_HOOKS = tuple(key for key in _MODULE_ATTRIBUTES if re.search("(for|back)ward_.*hooks", key))
_LIGHTNING_ATTRIBUTES = frozenset({*vars(LightningModule()), "_device_mesh", "log"})


@dataclass(frozen=True)
class _Recorded:
    """Recorded value of one attribute or buffer.

    Args:
        name: Path of the attribute, as in ``self.calls``.
    """

    name: str
    kind: str
    value: Any
    copy: Any


class ModuleState:
    """Snapshot of a module's buffers and attributes, to find and undo changes.

    The snapshot covers numbers, tensors, containers of both, generators and plain objects of the
    user's classes. It leaves out parameters, modules and objects of known libraries. Hooks of
    modules are restored, too, because attributes may note which hooks are registered.

    Args:
        parts: Submodules to record, with their names; None records all.
        most_items: Length of the longest container whose items are searched for values that a step
            may change in place; longer ones only keep their items.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Iterable[tuple[str, nn.Module]] | None = None,
        most_items: float = math.inf,
    ) -> None:
        self._most_items = most_items
        parts = list(module.named_modules() if parts is None else parts)
        self._held = list(_dictionaries(parts))
        self._hooks = [(hooks, hooks.copy()) for _, part in parts for hooks in _hooks_of(part)]
        self._recorded: dict[int, _Recorded] = {}
        for attributes in self._held:
            for key, value in attributes.kept.items():
                self._record(f"{attributes.prefix}.{key}" if attributes.is_watched else "", value)
        tensors = [record for record in self._recorded.values() if isinstance(record.value, Tensor)]
        copies = [record.copy for record in tensors]
        copy_all_(copies, [record.value for record in tensors])

    def changes(self, tolerance: float = 0.0) -> dict[str, str]:
        """Return the kind of every changed value by name: number, tensor, container or object.

        Metrics, which accumulate on purpose, and modules of this package are left out.
        """
        kinds = {}
        for attributes in self._held:
            if not attributes.is_watched:
                continue
            now = _on_this_stage(attributes.now())
            kept = _on_this_stage(attributes.kept)
            for key in now.keys() | kept.keys():
                if (
                    key not in kept
                    or key not in now
                    or not self._is_as_recorded(kept[key], now[key], tolerance)
                ):
                    kinds[f"{attributes.prefix}.{key}"] = _kind(now.get(key))
        for recorded in self._recorded.values():
            if recorded.name and recorded.name not in kinds and not _holds(recorded, tolerance):
                kinds[recorded.name] = recorded.kind
        return kinds

    @torch.inference_mode()
    def restore(self) -> None:
        """Restore every recorded value; the host reads no tensor to see which have changed."""
        for attributes in self._held:
            for key in attributes.now().keys() - attributes.kept.keys():
                del attributes.held[key]
            attributes.held.update(attributes.kept)
        for hooks, earlier in self._hooks:
            if hooks != earlier:
                hooks.clear()
                hooks.update(earlier)
        tensors = []
        for recorded in self._recorded.values():
            if isinstance(recorded.value, Tensor):
                tensors.append(recorded)
            elif not _is_same(recorded):
                _put_back(recorded)
        # Writes through .data do not count as changes of tensors that a backward pass needs.
        written = [record.value.data for record in tensors]
        copy_all_(written, [record.copy for record in tensors])

    def _is_as_recorded(self, earlier: Any, current: Any, tolerance: float) -> bool:
        if earlier is current:
            return True
        recorded = self._recorded.get(id(earlier))
        return _almost_equal(
            earlier if recorded is None or recorded.kind == "object" else recorded.copy,
            current,
            tolerance,
        )

    def _record(self, name: str, value: Any) -> None:
        if type(value) in _IMMUTABLE or id(value) in self._recorded:
            return
        copy = _copy(value)
        if copy is not None:
            self._recorded[id(value)] = _Recorded(name, _kind(value), value, copy)
        children = _children(value)
        if len(children) <= self._most_items or not isinstance(value, _CONTAINERS):
            for child in children:
                self._record(name, child)


@dataclass(frozen=True)
class _Attributes:
    """One attribute dictionary of a module, and its recorded content.

    Args:
        prefix: Path of the module, as in ``self.net``.
        is_watched: Whether changes are reported; false for metrics and modules of this package.
    """

    prefix: str
    held: dict[str, Any]
    skipped: frozenset[str]
    is_watched: bool
    kept: dict[str, Any]

    def now(self) -> dict[str, Any]:
        """Return the current content of the dictionary."""
        return _values(self.held, self.skipped)


def own_parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a module and its submodules that are not of this package, with their names.

    Of the modules of this package only the statistics of experts change in a step.
    """
    return [
        (name, part)
        for name, part in module.named_modules()
        if not type(part).__module__.startswith(_PACKAGE)
    ]


def _dictionaries(parts: Iterable[tuple[str, nn.Module]]) -> Iterator[_Attributes]:
    """Return the attribute and buffer dictionaries of modules."""
    for name, part in parts:
        prefix = f"self.{name}" if name else "self"
        is_watched = not isinstance(part, Metric) and not type(part).__module__.startswith(_PACKAGE)
        skipped = _LIGHTNING_ATTRIBUTES if isinstance(part, LightningModule) else _MODULE_ATTRIBUTES
        for held, left_out in ((vars(part), skipped), (part._buffers, frozenset[str]())):
            yield _Attributes(prefix, held, left_out, is_watched, _values(held, left_out))


def _hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    return [vars(module)[key] for key in _HOOKS if key in vars(module)]


def _values(held: dict[str, Any], skipped: frozenset[str]) -> dict[str, Any]:
    """Return the entries of a dictionary that the snapshot covers."""
    return {key: value for key, value in held.items() if key not in skipped}


def _on_this_stage(values: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that are no placeholders for tensors of another stage."""
    return {key: value for key, value in values.items() if not isinstance(value, RemoteTensor)}


def _kind(value: Any) -> str:
    if isinstance(value, (int, float, complex, np.number)):
        return "number"
    if isinstance(value, (Tensor, np.ndarray)):
        return "tensor"
    return "container" if isinstance(value, (list, dict, set, deque)) else "object"


def _copy(value: Any) -> Any:
    """Return a copy of a mutable value for restoring; None if immutable or not covered.

    Of a tensor it is memory without values, because the snapshot copies all tensors together.
    """
    if isinstance(value, Tensor):
        is_plain = (
            not isinstance(value, (nn.Parameter, RemoteTensor, FeatureShard))
            and value.layout == torch.strided
            and value.device.type != "meta"
            # Torch writes no expanded tensor.
            and 0 not in value.stride()
        )
        return torch.empty_like(value, requires_grad=False) if is_plain else None
    if isinstance(value, (list, dict, set, deque)):
        return shallow_copy(value)
    accessors = _accessors_of(value)
    if accessors is not None:
        return accessors[0](value)
    if isinstance(value, np.ndarray):
        return value.copy() if value.flags.writeable else None
    return dict(vars(value)) if _is_users(value) else None


def _children(value: Any) -> Collection[Any]:
    if isinstance(value, _CONTAINERS):
        return value.values() if isinstance(value, dict) else value
    return vars(value).values() if _is_users(value) else ()


def _is_users(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, IGNORED_TYPES) or not hasattr(value, "__dict__"):
        return False
    package = kind.__module__.partition(".")[0]
    return package not in _READ_ONLY and (package != _PACKAGE or kind.__name__ in _ACCUMULATING)


def _holds(recorded: _Recorded, tolerance: float) -> bool:
    """Return whether a value still equals its recorded content."""
    return _almost_equal(recorded.copy, _content(recorded.value), tolerance)


def _content(value: Any) -> Any:
    """Return what a snapshot copies: the state of a generator, or the attributes of an object."""
    accessors = _accessors_of(value)
    if accessors is not None:
        return accessors[0](value)
    return vars(value) if _kind(value) == "object" else value


def _is_same(recorded: _Recorded) -> bool:
    """Return whether a container or an object still has the same items; False if unknown."""
    now = _content(recorded.value)
    earlier = recorded.copy
    if isinstance(now, set):
        return bool(now == earlier)
    if not isinstance(now, (dict, list, deque)) or len(now) != len(earlier):
        return False
    values_are_same = not isinstance(now, dict) or all(map(is_, now.values(), earlier.values()))
    return values_are_same and all(map(is_, now, earlier))


def _almost_equal(earlier: Any, current: Any, tolerance: float) -> bool:
    """Return whether two values are equal, with a relative tolerance for numbers."""
    if earlier is current:
        return True
    if isinstance(earlier, RemoteTensor) or isinstance(current, RemoteTensor):
        # The tensor is on another stage.
        return True
    if isinstance(earlier, (Tensor, np.ndarray)) and isinstance(current, (Tensor, np.ndarray)):
        return _equal(torch.as_tensor(earlier), torch.as_tensor(current), tolerance)
    if type(earlier) is not type(current):
        return False
    if _kind(current) == "number":
        return bool(
            earlier == current
            or abs(earlier - current) <= tolerance * abs(earlier)
            or earlier != earlier
        )
    if isinstance(current, (list, tuple, deque)):
        pairs = zip(earlier, current, strict=False)
        return len(earlier) == len(current) and all(
            _almost_equal(earlier_item, current_item, tolerance)
            for earlier_item, current_item in pairs
        )
    if isinstance(current, dict):
        return earlier.keys() == current.keys() and all(
            _almost_equal(earlier[key], current[key], tolerance) for key in earlier
        )
    return bool(earlier == current) if isinstance(current, (set, str, bytes)) else False


def _put_back(recorded: _Recorded) -> None:
    value = recorded.value
    copy = recorded.copy
    accessors = _accessors_of(value)
    if isinstance(value, np.ndarray):
        value[...] = copy
    elif accessors is not None:
        accessors[1](value, copy)
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(copy)
    else:
        held = value if isinstance(value, (dict, set)) else vars(value)
        held.clear()
        held.update(copy)


def _equal(earlier: Tensor, current: Tensor, tolerance: float) -> bool:
    if (
        earlier.shape != current.shape
        or earlier.dtype != current.dtype
        or earlier.device != current.device
    ):
        return False
    if earlier.is_floating_point() or earlier.is_complex():
        return torch.allclose(earlier, current, rtol=tolerance, atol=tolerance / 10, equal_nan=True)
    return torch.equal(earlier, current)


_Accessors = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]


def _accessors_of(value: Any) -> _Accessors | None:
    """Return the functions that read and write the state of a generator; None for other values."""
    return next((pair for kind, pair in _GENERATORS.items() if isinstance(value, kind)), None)


_GENERATORS: dict[type, _Accessors] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
    np.random.RandomState: (
        lambda generator: generator.get_state(),
        lambda generator, state: generator.set_state(state),
    ),
}


@torch.no_grad()
def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors, with one kernel launch for each device and dtype."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    copy_all_(copies, tensors)
    return copies


@torch.no_grad()
def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into targets of equal shapes, with one launch for each device and dtype."""
    groups: dict[Hashable, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        group = groups.setdefault((target.device, target.dtype), ([], []))
        group[0].append(target)
        group[1].append(source)
    for into, from_tensors in groups.values():
        torch._foreach_copy_(into, from_tensors)
