"""What code around a list of blocks gets from it: stand-ins that run a block where it is its turn and its stage."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.absent import line_of_user

#: Runs what torch.utils.checkpoint is given, in its reentrant form.
_REENTRANT = CheckpointFunction.forward.__code__

if TYPE_CHECKING:
    from lightning_megatron.models.staged_blocks import StagedBlocks


class Part:
    """Stand for a module inside a block.

    Args:
        blocks: The list.
        index: Which block.
        path: Name of the module in the block; empty for the block itself.
    """

    def __init__(self, blocks: StagedBlocks, index: int, path: str = "") -> None:
        self._blocks, self._index, self._path = blocks, index, path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module if it has no parameters; one with parameters runs in a step with its block alone.

        Raises:
            UnsupportedError: In a step.
        """
        is_bare = next(self._module.parameters(), next(self._module.buffers(), None)) is None
        if self._blocks.cursor is not None and not is_bare:
            self._refuse(
                "is called by itself",
                "Call the block, whose forward may call it, or name another list in pipeline_plan",
            )
        return self._module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module; a tensor that a block leaves in it travels between stages."""
        if name.startswith("__"):
            raise AttributeError(name)
        found, path = getattr(self._module, name), f"{self._path}.{name}".removeprefix(".")
        if isinstance(found, nn.Module):
            return Part(self._blocks, self._index, path)
        if isinstance(found, nn.Parameter):
            return self._blocks.weight(self._index, path, found)
        return self._blocks.left_behind(self._index, path, found) if isinstance(found, Tensor) else found

    def __iter__(self) -> Iterator[Any]:
        """List stand-ins for the parts of a list in a block."""
        return (Part(self._blocks, self._index, f"{self._path}.{key}".removeprefix(".")) for key in self._keys)

    def __len__(self) -> int:
        """Count the parts of a list in a block."""
        return len(self._keys)

    def __bool__(self) -> bool:
        """Return that there is a module."""
        return True

    def __getitem__(self, key: Any) -> Any:
        """Return a stand-in for a part of a list in a block, or several."""
        return getattr(self, key) if isinstance(key, str) else list(self)[key]

    @property
    def _keys(self) -> list[str]:
        module = self._module
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            raise TypeError(f"'{type(module).__name__}' object is not a list of modules")
        return list(module._modules)

    @property
    def _module(self) -> nn.Module:
        is_probed = self._blocks.cursor is not None and self._blocks.cursor.probe
        block = self._blocks.elsewhere[self._index] if is_probed else self._blocks.block(self._index)
        return block.get_submodule(self._path)

    def _refuse(self, what: str, instead: str) -> NoReturn:
        name = f"{self._blocks.name}.{self._index}.{self._path}".removesuffix(".")
        raise UnsupportedError(
            f"{name!r} {what}, where the stages of a pipeline share the blocks {self._blocks.name!r}: "
            f"{line_of_user()}. Only a stage that holds a block can run what is in it. {instead}, or use pp=1."
        )


class Turn(Part):
    """Stand for one block of a list while code iterates over it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block where it is this stage's."""
        return self._blocks.call(self._index, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, as a call of it does."""
        return self(*args, **kwargs)


class Turns(list[Any]):
    """Stand for a slice of a torch.nn.Sequential, which can be called."""

    def __call__(self, hidden: Any) -> Any:
        """Run the blocks in turn."""
        for block in self:
            hidden = block(hidden)
        return hidden


def is_recomputing() -> bool:
    """Return whether a backward pass is under way, in which torch.utils.checkpoint runs blocks again."""
    return torch._C._current_graph_task_id() != -1


def check_checkpoint() -> None:
    """Refuse a block under the reentrant form of torch.utils.checkpoint, which would drop gradients without a word.

    It looks at the tensors that it is given, which have no values where another stage computes them.

    Raises:
        UnsupportedError: With the line.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REENTRANT:
            raise UnsupportedError(
                "a block of a model that is cut into stages must be checkpointed by torch.utils.checkpoint with "
                f"use_reentrant=False: {line_of_user()}. The other form passes no gradients to what comes from another "
                "stage. Say use_reentrant=False."
            )
        frame = frame.f_back


def check_listing(blocks: StagedBlocks) -> None:
    """Refuse code of a step that lists all modules, because this stage has its own blocks alone.

    Code of Lightning, which looks for metrics, and whatever lists parameters, may do so.

    Raises:
        UnsupportedError: With the line.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in ("named_modules", "modules"):
        frame = frame.f_back
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    if package in ("torch", "lightning", "torchmetrics", "lightning_megatron"):
        return
    raise UnsupportedError(
        f"the modules of {blocks.name!r} are listed in a step, where each stage has its own blocks alone: "
        f"{line_of_user()}. What is read of them would be a part. Go through the list of blocks itself, which knows "
        "all of them, or use pp=1."
    )
