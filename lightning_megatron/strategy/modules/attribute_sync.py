"""Module attributes set by steps on the last stage, copied to the other stages."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_megatron.groups.collectives import broadcast_object
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.remote_tensor import RemoteTensor
from lightning_megatron.models.stage import PipelinedModule
from lightning_megatron.strategy.modules.module_state import ModuleState
from lightning_megatron.strategy.modules.serialization import pack, unpack
from lightning_megatron.strategy.modules.state_digest import (
    PICKLING_ERRORS,
    ListDigest,
    digest,
    num_kept,
)
from lightning_megatron.strategy.optimization.parameter_readers import first_overridden
from lightning_megatron.swap.hugging_face.module_stubs import ModuleStub

log = logging.getLogger(__name__)

#: Hooks between a step and the next one, which may read attributes that the step has set, or set
#: attributes that are not the step's.
_HOOKS_AFTER_TRAINING: tuple[str, ...] = (
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "on_before_zero_grad",
    "lr_scheduler_step",
)
#: Longest container whose items are searched in every run of a step; longer ones hold results.
_MOST_ITEMS = 128
#: Location of a value: name of the module, whether the value is a buffer, name of the attribute.
_Location = tuple[str, bool, str]


@dataclass(frozen=True)
class _AttributeChange:
    """A new value of an attribute, or the items appended to a list.

    Args:
        num_kept: Number of unchanged items at the start of the list; 0 replaces the whole value.
    """

    value: Any
    num_kept: int = 0


class AttributeSync:
    """Module attributes outside the model that steps change, kept equal over the stages.

    Step code after the call of a pipelined model runs only on the last stage. Values that it stores
    in the module, such as lists of outputs or metric states, are missing on the other stages.
    Hooks run on all stages, because they may call collectives, save a checkpoint or generate text.
    Before such a hook runs, the last stage therefore sends all changes of steps to the stages with
    the same data. Values that a hook sets stay those of its rank, such as a copy of its weights.

    This covers attributes and buffers of the LightningModule and of modules without parameters,
    such as metrics.
    """

    def __init__(self, module: LightningModule, mesh: ParallelMesh) -> None:
        self._module = module
        self._mesh = mesh
        self._root = mesh.layout.loss_stage
        self._is_here = mesh.pp.size > 1 and mesh.has_loss
        self._before: dict[_Location, bytes | ListDigest | None] | None = None
        # Digests contain object ids. A reference to each object keeps its id from being reused.
        self._alive: list[Any] = []
        self._warned: set[_Location] = set()

    def begin(self) -> None:
        """Record the state before a step, unless steps have run since the last exchange."""
        if self._is_here and self._before is None:
            values = self._values()
            self._before = {location: digest(value) for location, value in values.items()}
            self._alive = list(values.values())

    def share(self) -> None:
        """Send all changes since the last exchange from the last stage to all stages.

        Communication: one broadcast of an object over pp on the CPU.
        """
        axis = self._mesh.pp_cpu
        if axis.size == 1:
            return
        data = broadcast_object(self._packed() if self._is_here else None, axis, self._root)
        self._before = None
        self._alive = []
        if data is not None and not self._is_here:
            self._apply_changes(*unpack(data, self._module, self._mesh.device))

    def share_after(self, step: str) -> None:
        """Send a step's changes at once if the user has a hook that runs before the next step.

        Args:
            step: Name of the step, such as ``training_step``.

        Communication: that of :meth:`share`.
        """
        stage = _stage_of(step)
        hooks: tuple[str, ...] = (f"on_{stage}_batch_start", f"on_{stage}_batch_end")
        hooks += _HOOKS_AFTER_TRAINING if stage == "train" else ()
        if self._mesh.pp.size > 1 and first_overridden(self._module.trainer, hooks) is not None:
            self.share()

    def outputs_after(self, step: str, outputs: Any) -> Any:
        """Return the last stage's step output if a hook receives it, else the argument.

        Args:
            step: Name of the step, such as ``training_step``.

        Communication: one broadcast of an object over pp on the CPU, if a hook receives the output.
        """
        axis = self._mesh.pp_cpu
        hooks = (f"on_{_stage_of(step)}_batch_end",)
        if axis.size == 1 or first_overridden(self._module.trainer, hooks) is None:
            return outputs
        data = broadcast_object(
            pack(outputs, self._module) if self._is_here else None, axis, self._root
        )
        return outputs if self._is_here else unpack(data, self._module, self._mesh.device)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Undo what a run of the step changes outside of the model, because another repeats it."""
        state = ModuleState(self._module, _outside_model(self._module), _MOST_ITEMS)
        try:
            yield
        finally:
            state.restore()

    def _packed(self) -> bytes | None:
        if self._before is None:
            return None
        values = self._values()
        before = self._before
        changed: dict[_Location, _AttributeChange] = {}
        for location, value in values.items():
            if location not in before or digest(value) != before[location]:
                kept = num_kept(value, before.get(location))
                changed[location] = _AttributeChange(value[kept:] if kept else value, kept)
        removed = tuple(location for location in before if location not in values)
        if not changed and not removed:
            return None
        try:
            return pack((changed, removed), self._module)
        except PICKLING_ERRORS:
            # The error does not name the value, so each value is tried separately.
            sendable = {key: one for key, one in changed.items() if self._is_sendable(key, one)}
            return pack((sendable, removed), self._module)

    def _is_sendable(self, location: _Location, change: _AttributeChange) -> bool:
        try:
            pack(change, self._module)
        except PICKLING_ERRORS as error:
            if location not in self._warned:
                self._warned.add(location)
                log.warning(
                    "%s has changed in the steps of the last pipeline stage and cannot be sent to "
                    "the others: %s: %s. Hooks on other ranks see the values of their own rank. "
                    "Keep tensors, numbers and plain containers in the module.",
                    ".".join(filter(None, ("self", location[0], location[2]))),
                    type(error).__name__,
                    error,
                )
            return False
        return True

    def _apply_changes(
        self, changed: Mapping[_Location, _AttributeChange], removed: Sequence[_Location]
    ) -> None:
        holders = dict(self._module.named_modules())
        for (holder, is_buffer, name), change in changed.items():
            if holder in holders:
                _put(_held(holders[holder], is_buffer), name, change)
        for holder, is_buffer, name in removed:
            if holder in holders:
                _held(holders[holder], is_buffer).pop(name, None)

    def _values(self) -> dict[_Location, Any]:
        values: dict[_Location, Any] = {}
        for name, part in self._module.named_modules():
            if part is not self._module and (
                isinstance(part, (PipelinedModule, ModuleStub))
                or any(True for _ in part.parameters())
            ):
                continue
            skipped = _MODULE_ATTRIBUTES if part is self._module else _PART_ATTRIBUTES
            values |= {
                (name, False, key): value
                for key, value in vars(part).items()
                if key not in skipped and not isinstance(value, RemoteTensor)
            }
            values |= {(name, True, key): value for key, value in part._buffers.items()}
        return values


def _stage_of(step: str) -> str:
    return step.removesuffix("_step").replace("training", "train")


def _outside_model(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and its submodules that are not parts of a model in stages, with names."""
    yield name, module
    for key, part in module.named_children():
        if not isinstance(part, (PipelinedModule, ModuleStub)):
            yield from _outside_model(part, f"{name}.{key}" if name else key)


def _held(part: nn.Module, is_buffer: bool) -> dict[str, Any]:
    return part._buffers if is_buffer else part.__dict__


def _put(held: dict[str, Any], name: str, change: _AttributeChange) -> None:
    """Set a value; containers are updated in place, because other code may reference them."""
    value: Any = change.value
    old: Any = held.get(name)
    if type(value) is type(old) and isinstance(old, list):
        old[change.num_kept :] = value
    elif type(value) is type(old) and isinstance(old, (dict, set)):
        old.clear()
        old.update(value)
    else:
        held[name] = value


#: Attributes that every module has, which the strategy and the Trainer manage.
_PART_ATTRIBUTES = frozenset(
    {*vars(nn.Module()), "update", "compute", "_update_signature", "process_group"}
)
_MODULE_ATTRIBUTES = frozenset({*vars(LightningModule()), "_device_mesh"})
