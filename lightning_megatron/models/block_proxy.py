"""Proxies of blocks and their submodules for the user's code around a list of staged blocks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.cut_blocks import CutBlocks
from lightning_megatron.models.remote_tensor import RemoteTensor
from lightning_megatron.user_code import line_of_user

#: Code object that runs the function of a reentrant torch.utils.checkpoint.
_REENTRANT = CheckpointFunction.forward.__code__


class ModuleProxy:
    """Proxy of a module inside a block, at a path that is empty for the block itself."""

    _blocks: CutBlocks
    _index: int
    _path: str

    def __init__(self, blocks: CutBlocks, index: int, path: str = "") -> None:
        # __setattr__ sets attributes of the module.
        vars(self).update(_blocks=blocks, _index=index, _path=path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; one with tensors is refused in a step, because other stages lack them."""
        is_bare = next(self._module.parameters(), next(self._module.buffers(), None)) is None
        if self._blocks.cursor is not None and not is_bare:
            self._refuse(
                "is called outside of its block",
                "Call the block, whose forward may call it, or name another list in pipeline_plan",
            )
        return self._module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module: a proxy for a module, or a placeholder for a tensor.

        A tensor that a block stores as an attribute is sent to the later stages that read it.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._module, name)
        path = f"{self._path}.{name}".removeprefix(".")
        if isinstance(value, nn.Module):
            return ModuleProxy(self._blocks, self._index, path)
        if isinstance(value, nn.Parameter):
            return self._blocks.parameter_of(self._index, path, value)
        if isinstance(value, Tensor):
            return self._blocks.stored_tensor(self._index, path, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the module, if it is on this stage, and of its copy without values.

        Hooks, and steps up to the call of the block, run on every stage, also on that of the block.
        """
        if isinstance(value, (nn.Module, nn.Parameter)):
            self._refuse(
                f"gets a new module or parameter as its attribute {name!r}",
                "Assign it before the fit, for example in configure_model",
            )
        if isinstance(value, RemoteTensor):
            self._refuse(
                f"gets a tensor of another stage as its attribute {name!r}",
                "Pass the tensor as an argument of the block",
            )
        self._check_unused(name)
        for module in self._copies:
            is_meta = isinstance(value, Tensor) and module is self._twin
            setattr(module, name, value.to("meta") if is_meta else value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the module, as :meth:`__setattr__` sets one."""
        self._check_unused(name)
        for module in self._copies:
            delattr(module, name)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over proxies for the items of a list in a block."""
        return (getattr(self, key) for key in self._keys)

    def __len__(self) -> int:
        """Return the length of a list in a block."""
        return len(self._keys)

    def __bool__(self) -> bool:
        """Return ``True``, because a module is true even if it is an empty list."""
        return True

    def __getitem__(self, key: Any) -> Any:
        """Return a proxy for an item of a list in a block, or a list of proxies for a slice."""
        return getattr(self, key) if isinstance(key, str) else list(self)[key]

    @property
    def _keys(self) -> list[str]:
        module = self._module
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            raise TypeError(f"'{type(module).__name__}' object is not a list of modules")
        return list(module._modules)

    def _check_unused(self, name: str) -> None:
        cursor = self._blocks.cursor
        if cursor is not None and self._index < cursor.next_block:
            self._refuse(
                f"gets another value of its attribute {name!r} after the block has run",
                "Set it before the call of the block, or in a hook",
            )

    @property
    def _twin(self) -> nn.Module:
        return self._blocks.meta_blocks[self._index].get_submodule(self._path)

    @property
    def _copies(self) -> list[nn.Module]:
        """Return the module on this stage, if any, and its copy on the meta device."""
        module = self._blocks.block(self._index).get_submodule(self._path)
        return [module] if module is self._twin else [module, self._twin]

    @property
    def _module(self) -> nn.Module:
        is_probed = self._blocks.cursor is not None and self._blocks.cursor.probe
        block = (
            self._blocks.meta_blocks[self._index] if is_probed else self._blocks.block(self._index)
        )
        return block.get_submodule(self._path)

    def _refuse(self, problem: str, remedy: str) -> NoReturn:
        name = f"{self._blocks.name}.{self._index}.{self._path}".removesuffix(".")
        raise UnsupportedError(
            f"{name!r} {problem}, but its block belongs to {self._blocks.name!r}, which is divided "
            f"among pipeline stages: {line_of_user()}. Only the stage that holds a block can run "
            f"its modules. {remedy}, or use pp=1."
        )


class BlockProxy(ModuleProxy):
    """Proxy of a block, which the list of blocks returns to the user's code."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block if it is on this stage; otherwise return placeholders."""
        return self._blocks.call(self._index, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block as ``__call__`` does."""
        return self(*args, **kwargs)


class BlockProxyList(list[Any]):
    """Callable slice of a ``torch.nn.Sequential``."""

    def __call__(self, hidden: Any) -> Any:
        """Run the blocks one after the other."""
        for block in self:
            hidden = block(hidden)
        return hidden


def is_recomputing() -> bool:
    """Return whether a backward pass is running, in which a checkpoint recomputes blocks."""
    return torch._C._current_graph_task_id() != -1


def check_checkpoint() -> None:
    """Raise if a block runs under a reentrant torch.utils.checkpoint, which would lose gradients.

    The reentrant form computes gradients only if an input requires gradients, but placeholders for
    tensors of other stages do not require gradients.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REENTRANT:
            raise UnsupportedError(
                "with pp above 1, torch.utils.checkpoint must be called with use_reentrant=False: "
                f"{line_of_user()}. The reentrant form passes no gradients to tensors of another "
                "stage. Set use_reentrant=False."
            )
        frame = frame.f_back


def check_listing(name: str) -> None:
    """Raise if the user's step lists all modules, because this stage has only some of the blocks.

    Code of torch (which lists parameters), Lightning (which looks for metrics) and torchmetrics may
    list modules.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in ("named_modules", "modules"):
        frame = frame.f_back
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    if package in ("torch", "lightning", "torchmetrics", "lightning_megatron"):
        return
    raise UnsupportedError(
        f"the modules of {name!r} cannot be listed in a step with pp above 1, because each stage "
        f"holds only some of the blocks: {line_of_user()}. Iterate over the list of blocks, which "
        "has an entry for every block, or use pp=1."
    )
