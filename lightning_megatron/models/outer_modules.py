"""Modules and parameters outside of staged blocks, which only the first or last stage has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.cut_blocks import CutBlocks, leave_to_other_stage
from lightning_megatron.models.remote_tensor import RemoteTensor, with_values
from lightning_megatron.models.stage_boundaries import called_twice
from lightning_megatron.user_code import line_of_user


class RemoteModule(nn.Module):
    """Proxy of a module outside of the blocks whose parameters are on another stage.

    A call returns placeholders with the shapes of the module's results.

    Args:
        source: Copy of the module on the meta device.
        is_before: Whether the module is called before the blocks, so that the first stage has it.
        end: Name of the outermost module outside of the blocks that contains this module; empty if
            it is this module.
    """

    source: nn.Module
    _cut_blocks: CutBlocks

    def __new__(cls, name: str = "", source: nn.Module | None = None, *_: Any) -> RemoteModule:
        """Return a proxy that can be iterated if and only if the module can."""
        is_list = cls is RemoteModule and hasattr(type(source), "__iter__")
        return super().__new__(RemoteModuleList if is_list else cls)

    def __init__(
        self, name: str, source: nn.Module, blocks: CutBlocks, is_before: bool, end: str = ""
    ) -> None:
        super().__init__()
        self.name = name
        self.is_before = is_before
        self.end = end or name
        # Set in this way, they are no children of this module.
        vars(self).update(source=source, _cut_blocks=blocks)
        self._is_copy = False

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteModule:
        """Return a proxy of a copy, such as that of an ``AveragedModel``."""
        source = deepcopy(self.source, memo)
        copy = RemoteModule(self.name, source, self._cut_blocks, self.is_before, self.end)
        copy._is_copy = True
        return copy

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RemoteModule:
        convert_meta(self.source, fn)
        return self

    @override
    def train(self, mode: bool = True) -> RemoteModule:
        self.source.train(mode)
        super().train(mode)
        return self

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        leave_to_other_stage(self.source, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module; modules become proxies, and tensors placeholders."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "source" not in vars(self):
                raise
        if name == "update_parameters" and isinstance(self.source, AveragedModel):
            return _average_nothing
        return self._proxy(f"{self.name}.{name}", getattr(self.source, name))

    def _proxy(self, name: str, value: Any) -> Any:
        """Return a proxy for a module, a placeholder for a tensor, and other values unchanged."""
        if isinstance(value, nn.Module):
            return RemoteModule(name, value, self._cut_blocks, self.is_before, self.end)
        return self._tensor(name, value) if isinstance(value, Tensor) else value

    def _tensor(self, name: str, like: Tensor) -> Tensor:
        """Return a parameter or buffer if its values have arrived; otherwise a placeholder."""
        blocks = self._cut_blocks
        value_name = f"parameter:{name}"
        cursor = blocks.cursor
        if cursor is not None and value_name in cursor.known:
            return cursor.known[value_name]
        result = RemoteTensor.of(like, blocks, f"the tensor {name!r}", value_name)
        if cursor is not None:
            stage = 0 if self.is_before else blocks.boundaries.last
            blocks.boundaries.record_origin(cursor, value_name, result, stage, at_start=True)
        return result

    def register_arrival(self, name: str) -> None:
        """Register a placeholder for a tensor of this module that the step will receive.

        Other tensors, by their names in the whole model, are ignored.
        """
        like = _tensor_of(self.source, self.name, name)
        if like is not None:
            self._tensor(name, like)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return placeholders with the shapes of the module's results.

        Calls between the blocks are refused, and those on the wrong side of them.
        """
        blocks = self._cut_blocks
        cursor = blocks.current()
        if self._is_copy:
            _refuse_copy(self.name)
        self._check_side(blocks)
        stage = 0 if self.is_before else blocks.boundaries.last
        leaves = pytree.tree_leaves((args, kwargs))
        if cursor.probe and cursor.plan is None:
            try:
                for leaf in leaves:
                    blocks.boundaries.record_use(cursor, leaf, stage)
            except UnsupportedError as error:
                if cursor.next_block and self.is_before:
                    raise self._wrong_side_error(blocks, "after") from None
                raise error from None
        spec = blocks.infer_outputs(self.name, self.source, args, kwargs)
        return blocks.placeholders(
            spec, cursor.use_of(self.name), f"the result of {self.name!r}", stage
        )

    def _check_side(self, blocks: CutBlocks) -> None:
        cursor = blocks.current()
        if 0 < cursor.next_block < len(blocks):
            raise UnsupportedError(
                f"{self.name!r} is called between the blocks {blocks.name!r}, which run on all "
                "stages, but only one stage holds its parameters. Wrap every block together with "
                "the modules that are called next to it, and name the list of wrappers in "
                "pipeline_plan, or use pp=1."
            )
        if self.is_before:
            if cursor.next_block == len(blocks) and cursor.is_last_call and not cursor.probe:
                raise self._wrong_side_error(blocks, "after")
        elif cursor.next_block == 0:
            raise self._wrong_side_error(blocks, "before")

    def _wrong_side_error(self, blocks: CutBlocks, side: str) -> UnsupportedError:
        stage = "last" if side == "after" else "first"
        if blocks.cursor is not None and blocks.cursor.uses[self.name]:
            return called_twice(self.name, blocks.name)
        skipped = ", or because blocks are skipped" if side == "before" else ""
        return UnsupportedError(
            f"{self.name!r} is called {side} the blocks {blocks.name!r}, but another stage holds "
            f"it, because it was defined on the other side of them{skipped}. Use the pipeline_plan "
            f"{blocks.plan | {self.end: stage}}."
        )


class RemoteModuleList(RemoteModule):
    """Proxy of a list or dictionary outside of the blocks whose parameters are on another stage."""

    def __len__(self) -> int:
        """Return the length of the list."""
        return len(self.source)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over proxies for the items of a list, or over the keys of a dictionary."""
        source = self.source
        if isinstance(source, (nn.ModuleDict, nn.ParameterDict)):
            yield from source
        else:
            yield from (self[index] for index in range(len(source)))  # type: ignore[arg-type]

    def keys(self) -> Iterator[str]:
        """Return the keys of a dictionary."""
        return iter(self)

    def values(self) -> Iterator[Any]:
        """Return proxies for the values of a dictionary."""
        return (self[key] for key in self)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Return the keys of a dictionary, each with a proxy for its value."""
        return ((key, self[key]) for key in self)

    def __getitem__(self, key: Any) -> Any:
        """Return a proxy for an item, or a list of proxies for a slice."""
        if isinstance(key, slice):
            return list(self)[key]
        if isinstance(key, int) and key < 0:
            key += len(self)
        return self._proxy(f"{self.name}.{key}", self.source[key])  # type: ignore[index]


class LocalModule:
    """Module outside of the blocks on this stage, and the proxy that replaces it in probes."""

    def __init__(
        self, parent: nn.Module, key: str, remote: RemoteModule, blocks: CutBlocks
    ) -> None:
        self._parent = parent
        self._key = key
        self._remote = remote
        self._blocks = blocks
        self.stage = 0 if remote.is_before else blocks.boundaries.last
        module: Any = parent._modules[key]
        self._module: nn.Module = module
        module.register_forward_pre_hook(self._resolve, with_kwargs=True)
        module.register_forward_hook(self._keep)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalModule:
        """Return this object, so that it gets the calls of copies of the module."""
        return self

    def convert_meta(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a conversion of the model's dtype to the proxy."""
        self._remote._apply(fn)

    def hide(self) -> None:
        """Replace the module by its proxy."""
        self._parent._modules[self._key] = self._remote

    def show(self) -> None:
        """Restore the module in its parent."""
        self._parent._modules[self._key] = self._module

    def tensor(self, name: str) -> Tensor | None:
        """Return a tensor by its name in the whole model; None if it is not here, or is sharded."""
        tensor = _tensor_of(self._module, self._remote.name, name)
        whole = _tensor_of(self._remote.source, self._remote.name, name)
        return tensor if tensor is not None and tensor.shape == whole.shape else None

    def _resolve(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if module is not self._module and self._blocks.cursor is not None:
            _refuse_copy(self._remote.name)
        resolved: tuple[Any, Any] = with_values((args, kwargs), f"{self._remote.name!r} reads it")
        return resolved

    def _keep(self, module: nn.Module, args: Any, result: Any) -> None:
        cursor = self._blocks.cursor
        if cursor is not None:
            value_name = cursor.use_of(self._remote.name)
            self._blocks.boundaries.keep_values(cursor, value_name, pytree.tree_leaves(result))


def _average_nothing(model: nn.Module) -> None:
    """Update no average: the stage that holds the average updates it."""


def _refuse_copy(name: str) -> NoReturn:
    raise UnsupportedError(
        f"a copy of {name!r} cannot be called in a step with pp above 1, because it was made after "
        f"the module was divided among pipeline stages: {line_of_user()}. Make the copy in "
        "__init__ or configure_model, or use pp=1."
    )


def _tensor_of(module: nn.Module, module_name: str, name: str) -> Any:
    """Return a tensor of a module by its name in the whole model; None if it is of another one."""
    prefix, _, key = name.rpartition(".")
    if not f"{prefix}.".startswith(f"{module_name}."):
        return None
    inner = prefix.removeprefix(module_name).removeprefix(".")
    return getattr(module.get_submodule(inner), key)


class FirstStageParameter:
    """Parameter of a module that contains the blocks. Only the first stage has it."""

    def __init__(
        self, owner: nn.Module, key: str, name: str, blocks: CutBlocks, is_local: bool
    ) -> None:
        self._owner = owner
        self._key = key
        self._blocks = blocks
        self._is_local = is_local
        self._name = name
        self.stage = 0
        self._order: list[tuple[str, nn.Parameter | None]] = []
        parameter: Any = owner._parameters[key]
        self._form = torch.empty_like(parameter.detach(), device="meta")
        if not is_local:
            self.hide()
            owner.register_load_state_dict_pre_hook(self._leave_to_first_stage)

    def _leave_to_first_stage(
        self, owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any
    ) -> None:
        if self._key not in owner._parameters:
            state.pop(f"{prefix}{self._key}", None)

    def tensor(self, name: str) -> Tensor | None:
        """Return the parameter if it has a name in the whole model; otherwise None."""
        return getattr(self._owner, self._key) if name == self._name else None

    def convert_meta(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a conversion of the model's dtype to the placeholder."""
        self._form = self._form.to(fn(torch.empty(0, dtype=self._form.dtype)).dtype)
        if not self._is_local:
            self.hide()

    def hide(self) -> None:
        """Replace the parameter by a placeholder."""
        # `show` must restore the order of the parameters, because optimizers number them in it.
        if self._is_local:
            self._order = list(self._owner._parameters.items())
        self._owner._parameters.pop(self._key, None)
        value_name = f"parameter:{self._name}"
        title = f"the parameter {self._name!r}"
        absent = RemoteTensor.of(self._form, self._blocks, title, value_name)
        self._owner.__dict__[self._key] = absent
        cursor = self._blocks.cursor
        if cursor is not None:
            self._blocks.boundaries.record_origin(cursor, value_name, absent, 0)

    def show(self) -> None:
        """Restore the parameter in its module."""
        if self._is_local:
            del self._owner.__dict__[self._key]
            self._owner._parameters.clear()
            self._owner._parameters.update(self._order)


def convert_meta(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Apply the dtype change of a conversion to the meta tensors of a module, which stay there."""
    module._apply(
        lambda tensor: (
            tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype) if tensor.is_meta else tensor
        )
    )


def meta_copy_of(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the meta device, which needs no memory for tensors."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and id(tensor) not in memo and key in part._parameters:
                memo[id(tensor)] = nn.Parameter(
                    torch.empty_like(tensor, device="meta"), tensor.requires_grad
                )
            elif tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = torch.empty_like(tensor, device="meta")
        if hasattr(part, "config"):
            # All blocks share the configuration and only read it, so the copy can share it.
            memo[id(part.config)] = part.config
    return deepcopy(module, memo)
