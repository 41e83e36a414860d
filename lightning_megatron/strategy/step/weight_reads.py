"""Detection of user code that reads sharded weights in a step, or must not run on stages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.own_lists import is_gathered_part
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.models.stage import PipelinedModule, named_layers, pipelined_modules
from lightning_megatron.strategy.optimization.parameter_readers import is_accessor
from lightning_megatron.strategy.step.stage_guard import StageGuard
from lightning_megatron.user_code import (
    MODULE_CALL,
    Line,
    outside_torch,
    runs_package,
    runs_torch,
)

#: Attributes of a tensor through which its values can be read.
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
#: Functions that return metadata of a tensor or register hooks, and read no values.
_METADATA = frozenset(
    """
    size dim ndimension numel nelement stride storage_offset element_size data_ptr type
    is_floating_point is_complex is_contiguous is_signed get_device requires_grad_ __len__
    register_hook register_post_accumulate_grad_hook untyped_storage __repr__ __format__ __set__
    __hash__ __deepcopy__ __reduce_ex__ has_names is_inference is_same_size is_shared
    """.split()
)
_DERIVATIVES = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class WeightReads:
    """Guard of each step's first batch against user code that reads sharded weights.

    It also refuses derivatives that the step takes itself, if a rank cannot compute them. With
    stages it also refuses what :class:`StageGuard` describes.

    With tp a rank has a shard of each sharded weight, with ep a share of each stack of experts, and
    with pp only the layers of its own stage. A penalty over all parameters, or a logged norm, would
    therefore cover only a part of the model. Layers may read their own weights, because they
    account for the sharding.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh = mesh
        #: Steps whose first batch has been watched.
        self.checked_steps: set[str] = set()

    def guard(self, module: nn.Module, step: str) -> AbstractContextManager[Any]:
        """Return a context for a step, which watches the first call only."""
        axes = self.mesh.tp, self.mesh.pp, self.mesh.ep
        if step in self.checked_steps or all(axis.size == 1 for axis in axes):
            return nullcontext()
        self.checked_steps.add(step)
        # torch.compile would trace the guard's mode into the compiled code.
        if any(
            part._compiled_call_impl is not None or hasattr(part, "_orig_mod")
            for _, part in named_layers(module)
        ):
            return nullcontext()
        stages = StageGuard(module, step, self.mesh) if self.mesh.pp.size > 1 else nullcontext()
        watched = dict(self._incomplete(module))
        return _Guard(module, step, watched, stages, self)

    def _incomplete(self, module: nn.Module) -> Iterator[tuple[int, tuple[str, str]]]:
        """Yield identity, name and reason of the parameters that are incomplete on this rank."""
        staged = [model for _, model in pipelined_modules(module)]
        inside = {id(parameter) for part in staged for parameter in part.parameters()}
        tp = self.mesh.tp.size
        pp = self.mesh.pp.size
        for name, parameter in module.named_parameters():
            if shard_spec_of(parameter).over_ep:
                yield id(parameter), (name, f"divided over ep ({self.mesh.ep.size})")
            elif tp > 1 and _is_cut(parameter):
                yield id(parameter), (name, f"cut over tp ({tp})")
            elif pp > 1 and id(parameter) in inside:
                yield id(parameter), (name, f"in a model of which each stage has layers (pp {pp})")


class _Guard(TorchFunctionMode):
    """Mode that refuses torch functions of sharded parameters outside their own layers.

    Args:
        watched: Name of each incomplete parameter, and the reason, by identity of the parameter.
    """

    def __init__(
        self,
        root: nn.Module,
        step: str,
        watched: Mapping[int, tuple[str, str]],
        stages: AbstractContextManager[Any],
        reads: WeightReads,
    ) -> None:
        super().__init__()
        self._stages = stages
        self._reads = reads
        self._mesh = reads.mesh
        self._root = root
        self._step = step
        self._watched = watched

    def __enter__(self) -> Self:
        self._stages.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """End a run of the step.

        A step that fails is watched again, because a trial without gradients may repeat it.
        """
        super().__exit__(*error)
        if isinstance(error[1], RuntimeError):
            self._reads.checked_steps.discard(self._step)
        self._stages.__exit__(*error)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _reads_values(func):
            for value in tree_leaves((args, kwargs)):
                is_parameter = isinstance(value, nn.Parameter) and id(value) in self._watched
                if is_parameter or (isinstance(value, Tensor) and is_gathered_part(value)):
                    self._check(value)
        if func not in _DERIVATIVES:
            return func(*args, **kwargs)
        self._check_stages()
        result = func(*args, **kwargs)
        if kwargs.get("create_graph") and func is torch.autograd.grad:
            self._check_second(result)
        return result

    def _check_stages(self) -> None:
        """Refuse a derivative that a step, and not one of its modules, takes of several stages."""
        frame = outside_torch(sys._getframe(2))
        if self._mesh.pp.size == 1 or frame is None or runs_package(frame):
            return
        line = Line.of(frame)
        while frame is not None and frame.f_code is not MODULE_CALL:
            frame = frame.f_back
        if frame is None or frame.f_locals["self"] is self._root:
            raise UnsupportedError(
                f"{self._step} must not take derivatives itself with pp ({self._mesh.pp.size}) "
                f"above 1, because each stage has a part of the graph: {line}. Use pp=1 (tp and "
                "more data ranks divide the model as well), or leave the derivative out."
            )

    def _check_second(self, gradients: Sequence[Tensor | None]) -> None:
        """Refuse derivatives of layers that cannot be differentiated twice."""
        frame = outside_torch(sys._getframe(2))
        nodes = [value.grad_fn for value in gradients if value is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            if node is None:
                continue
            if type(node).__name__ == "Error" and frame is not None:
                raise UnsupportedError(
                    f"{self._step} must not differentiate twice through layers that tp "
                    f"({self._mesh.tp.size}) cuts, as for a penalty on gradients: "
                    f"{Line.of(frame)}. Give these layers the kind 'replicate' in "
                    "tensor_parallel_plan, or use tp=1."
                )
            nodes += {after for after, _ in node.next_functions} - seen
            seen |= {after for after, _ in node.next_functions}

    def _check(self, parameter: Tensor) -> None:
        # Skip this method, its caller, the accessors of ``parameter.data`` and frames of torch, up
        # to the user's code or the call of a module.
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and is_accessor(frame.f_code):
            frame = frame.f_back
        while frame is not None and runs_torch(frame) and frame.f_code is not MODULE_CALL:
            frame = frame.f_back
        reader = outside_torch(frame)
        if reader is None or runs_package(reader) or self._is_owner_called(parameter, frame):
            return
        unnamed = "a weight of experts", f"cut over tp ({self._mesh.tp.size})"
        name, reason = self._watched.get(id(parameter), unnamed)
        line = Line.of(reader)
        whole = "pp=1"
        if "over ep" in reason:
            whole = "read it in the forward of its module, or use ep=1"
        elif "tp" in reason:
            whole = "give its layer the kind 'replicate' in tensor_parallel_plan"
        raise UnsupportedError(
            f"{self._step} must not read a weight of which this rank holds a part: {name!r} is "
            f"{reason}, and {line.place} reads it: {line.text!r}. A penalty or a norm would be "
            "computed from this part only. Use the optimizer's weight_decay for a penalty, the "
            f"strategy's checkpoints to read values, or {whole}."
        )

    def _is_owner_called(self, parameter: Tensor, frame: FrameType | None) -> bool:
        """Return whether a module that may read the parameter is being called."""
        is_cut = _is_cut(parameter)
        while frame is not None:
            if frame.f_code is MODULE_CALL:
                module: nn.Module = frame.f_locals["self"]
                if module is self._root:
                    return False
                # A module may read whole weights of its submodules, but sharded weights only if it
                # owns them directly. A pipelined module has only some of its layers, so it may not.
                parameters = chain(module.parameters(recurse=not is_cut), vars(module).values())
                if not isinstance(module, PipelinedModule) and any(
                    owned is parameter for owned in parameters
                ):
                    return True
            frame = frame.f_back
        return False


def _is_cut(parameter: Tensor) -> bool:
    return shard_spec_of(parameter).full_shape != tuple(parameter.shape)


def _reads_values(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _VALUES
    return name not in _METADATA
