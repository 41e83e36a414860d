"""What is beside a list of blocks that is cut into stages: modules and parameters of the first or the last stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.absent import AbsentTensor

if TYPE_CHECKING:
    from lightning_megatron.models.staged_blocks import StagedBlocks


class Elsewhere(nn.Module):
    """Stand for a module beside the blocks whose parameters another stage holds.

    It gives tensors without values, in the shapes of the module's results.

    Args:
        name: Name of the module, for errors.
        source: The module, on the meta device.
        blocks: The list.
        is_before: Whether it is to be called before the blocks.
        end: Name of the module beside the blocks that it is in, where it is not that one.
    """

    def __new__(cls, name: str = "", source: nn.Module | None = None, *_: Any) -> Elsewhere:
        """Return a stand-in that can be listed for a module that can, and for no other."""
        is_list = cls is Elsewhere and hasattr(type(source), "__iter__")
        return super().__new__(ElsewhereList if is_list else cls)

    def __init__(self, name: str, source: nn.Module, blocks: StagedBlocks, is_before: bool, end: str = "") -> None:
        super().__init__()
        self.name, self.is_before, self.end = name, is_before, end or name
        # Not registered: they are not parts of this module.
        self._others: tuple[nn.Module, StagedBlocks] = (source, blocks)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Elsewhere:
        follow(self._others[0], fn)
        return self

    @override
    def train(self, mode: bool = True) -> Elsewhere:
        self._others[0].train(mode)
        super().train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module; a tensor of it has no values here."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_others" not in self.__dict__:
                raise
        source, blocks = self._others
        found = getattr(source, name)
        if isinstance(found, nn.Module):
            return Elsewhere(f"{self.name}.{name}", found, blocks, self.is_before, self.end)
        if isinstance(found, Tensor):
            return self._tensor(f"{self.name}.{name}", found, blocks)
        return found

    def _tensor(self, name: str, form: Tensor, blocks: StagedBlocks) -> Tensor:
        """Return a parameter or buffer without values, or with those that have come."""
        point, cursor = f"parameter:{name}", blocks.cursor
        if cursor is not None and point in cursor.known:
            return cursor.known[point]
        result = AbsentTensor.of(form, blocks, f"the tensor {name!r}", point)
        if cursor is not None:
            blocks.crossings.make(cursor, point, result, 0 if self.is_before else blocks.crossings.last, at_start=True)
        return result

    @property
    def source(self) -> nn.Module:
        """Return the module without values."""
        return self._others[0]

    def foresee(self, name: str) -> None:
        """Know the form of a tensor of the module in a step, by its name in the whole; pass over others."""
        source, blocks = self._others
        prefix, _, key = name.rpartition(".")
        if f"{prefix}.".startswith(f"{self.name}."):
            inner = prefix.removeprefix(self.name).removeprefix(".")
            self._tensor(name, getattr(source.get_submodule(inner), key), blocks)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return tensors without values in the shapes of the module's results.

        Raises:
            UnsupportedError: If it is called on the other side of the blocks than it was taken for, or between them.
        """
        source, blocks = self._others
        cursor = blocks.current()
        self._check_side(blocks)
        stage = 0 if self.is_before else blocks.crossings.last
        leaves = pytree.tree_leaves((args, kwargs))
        if cursor.probe and cursor.plan is None:
            try:
                for leaf in leaves:
                    blocks.crossings.need(cursor, leaf, stage)
            except UnsupportedError as error:
                raise self._wrong_side(blocks, "after") if cursor.turn and self.is_before else error from None
        form = blocks.form_of(self.name, source, args, kwargs)
        return blocks.absent(form, cursor.use_of(self.name), f"the result of {self.name!r}", stage)

    def _check_side(self, blocks: StagedBlocks) -> None:
        cursor = blocks.current()
        if 0 < cursor.turn < len(blocks):
            raise UnsupportedError(
                f"{self.name!r} is called between the blocks {blocks.name!r}, of which every stage has some: one stage "
                "alone holds its parameters. Make a module of every block and what belongs to it, and name the list of "
                "those in pipeline_plan, or use pp=1."
            )
        is_over = cursor.turn == len(blocks) and (cursor.is_last_call and not cursor.probe)
        if is_over if self.is_before else cursor.turn == 0:
            raise self._wrong_side(blocks, "after" if self.is_before else "before")

    def _wrong_side(self, blocks: StagedBlocks, side: str) -> UnsupportedError:
        here = "last" if side == "after" else "first"
        if blocks.cursor is not None and blocks.cursor.uses[self.name]:
            return called_twice(self.name, blocks.name)
        skipped = ", or because blocks are skipped" if side == "before" else ""
        return UnsupportedError(
            f"{self.name!r} is called {side} the blocks {blocks.name!r}, but another stage holds it, because of "
            f"where it was defined{skipped}. Use the pipeline_plan {blocks.plan | {self.end: here}}."
        )


def called_twice(name: str, blocks: str) -> UnsupportedError:
    """Return the error for a module that is called on both sides of the blocks."""
    return UnsupportedError(
        f"{name!r} is called before and after the blocks {blocks!r}, and one pipeline stage alone holds it. Use two "
        "modules with weights of their own, or pp=1."
    )


class ElsewhereList(Elsewhere):
    """Stand for a list of modules beside the blocks whose parameters another stage holds."""

    def __len__(self) -> int:
        """Count the parts of a list."""
        return len(self._others[0])  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """List stand-ins for the parts of a list."""
        source = self._others[0]
        if isinstance(source, (nn.ModuleDict, nn.ParameterDict)):
            yield from source
        else:
            yield from (self[index] for index in range(len(source)))  # type: ignore[arg-type]

    def keys(self) -> Iterator[str]:
        """List the names of the parts of a dictionary."""
        return iter(self)

    def values(self) -> Iterator[Any]:
        """List stand-ins for the parts of a dictionary."""
        return (self[key] for key in self)

    def items(self) -> Iterator[tuple[str, Any]]:
        """List the names of the parts of a dictionary with stand-ins for them."""
        return ((key, self[key]) for key in self)

    def __getitem__(self, key: Any) -> Any:
        """Return a stand-in for a part of a list, or several."""
        source, blocks = self._others
        if isinstance(key, slice):
            return list(self)[key]
        if isinstance(key, int) and key < 0:
            key += len(self)
        found = source[key]  # type: ignore[index]
        if isinstance(found, Tensor):
            return self._tensor(f"{self.name}.{key}", found, blocks)
        return Elsewhere(f"{self.name}.{key}", found, blocks, self.is_before, self.end)


class HeldModule:
    """Know a module beside the blocks that this stage holds, and what stands for it in a probe.

    Args:
        parent: The module around it.
        key: Its name there.
        stand_in: What gives tensors without values.
        blocks: The list.
    """

    def __init__(self, parent: nn.Module, key: str, stand_in: Elsewhere, blocks: StagedBlocks) -> None:
        self._parent, self._key, self._stand_in, self._blocks = parent, key, stand_in, blocks
        self.stage = 0 if stand_in.is_before else blocks.crossings.last
        module: Any = parent._modules[key]
        self._module: nn.Module = module
        module.register_forward_pre_hook(self._settle, with_kwargs=True)
        module.register_forward_hook(self._keep)

    def follow(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Take the type that a conversion gives to others."""
        self._stand_in._apply(fn)

    def hide(self) -> None:
        """Let the stand-in be called."""
        self._parent._modules[self._key] = self._stand_in

    def show(self) -> None:
        """Let the module be called again."""
        self._parent._modules[self._key] = self._module

    def tensor(self, name: str) -> Tensor | None:
        """Return a parameter or buffer by its name in the whole; None if it is not in the module, or not whole."""
        prefix, _, key = name.rpartition(".")
        if not f"{prefix}.".startswith(f"{self._stand_in.name}."):
            return None
        inner = prefix.removeprefix(self._stand_in.name).removeprefix(".")
        found: Any = getattr(self._module.get_submodule(inner), key)
        return found if found.shape == getattr(self._stand_in.source.get_submodule(inner), key).shape else None

    def _settle(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        why = f"{self._stand_in.name!r} reads it"
        found: tuple[Any, Any] = pytree.tree_map(
            lambda leaf: leaf.settle(why) if isinstance(leaf, AbsentTensor) else leaf, (args, kwargs)
        )
        return found

    def _keep(self, module: nn.Module, args: Any, result: Any) -> None:
        cursor = self._blocks.cursor
        if cursor is not None:
            point = cursor.use_of(self._stand_in.name)
            self._blocks.crossings.keep(cursor, point, pytree.tree_leaves(result))


class LooseParameter:
    """Know a parameter of a module around the blocks, which the first stage holds.

    Args:
        owner: The module.
        key: Its name there.
        name: Its name in the whole.
        blocks: The list.
        is_held: Whether this stage is the first.
    """

    def __init__(self, owner: nn.Module, key: str, name: str, blocks: StagedBlocks, is_held: bool) -> None:
        self._owner, self._key, self._blocks, self._is_held = owner, key, blocks, is_held
        self.point, self.stage = f"parameter:{name}", 0
        self._order: list[tuple[str, nn.Parameter | None]] = []
        parameter: Any = owner._parameters[key]
        self._form = torch.empty_like(parameter.detach(), device="meta")
        self._name = f"the parameter {name!r}"
        self.absent = AbsentTensor.of(self._form, blocks, self._name, self.point)
        if not is_held:
            self.hide()

    @property
    def value(self) -> Tensor:
        """Return the parameter."""
        found: Tensor = getattr(self._owner, self._key)
        return found

    def follow(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Take the type that a conversion gives to others."""
        self._form = self._form.to(fn(torch.empty(0, dtype=self._form.dtype)).dtype)
        if not self._is_held:
            self.hide()

    def hide(self) -> None:
        """Let code that reads the parameter find a tensor without values."""
        if self._is_held:
            self._order = list(self._owner._parameters.items())
        self._owner._parameters.pop(self._key, None)
        self.absent = AbsentTensor.of(self._form, self._blocks, self._name, self.point)
        self._owner.__dict__[self._key] = self.absent

    def show(self) -> None:
        """Let the parameter be found again."""
        if self._is_held:
            del self._owner.__dict__[self._key]
            self._owner._parameters.clear()
            self._owner._parameters.update(self._order)


def follow(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Give a module without values the types that a conversion gives to others, and leave it where it is."""
    module._apply(lambda tensor: tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype) if tensor.is_meta else tensor)


def twin_of(module: nn.Module) -> nn.Module:
    """Return a copy of a module without values, which costs no memory."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and id(tensor) not in memo and key in part._parameters:
                memo[id(tensor)] = nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
            elif tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = torch.empty_like(tensor, device="meta")
        if hasattr(part, "config"):
            # Shared by all blocks, and only read.
            memo[id(part.config)] = part.config
    return deepcopy(module, memo)
