"""Full tensors that hooks draw or load into sharded parameters: each rank keeps its part."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.user_code import Line, outside_torch

_INIT_FILE = nn.init.normal_.__code__.co_filename
#: Methods that draw every value of a tensor.
_DRAWS = frozenset(
    f"{name}_"
    for name in """
    normal uniform bernoulli exponential geometric cauchy log_normal random kaiming_uniform
    kaiming_normal xavier_uniform xavier_normal trunc_normal orthogonal sparse
    """.split()
)


def accept_full_loads(module: nn.Module, undo: ExitStack) -> None:
    """Let ``load_state_dict`` of any submodule take full tensors until ``undo`` is closed.

    A sharded parameter takes this rank's part of a tensor of the full shape, and other tensors as
    they are.
    """
    for part in module.modules():
        if not all(shard_spec_of(weight).is_whole for weight in part.parameters(recurse=False)):
            undo.callback(part.register_load_state_dict_pre_hook(_take_parts).remove)


def _take_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        spec = shard_spec_of(parameter)
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and not spec.is_whole and value.shape == spec.full_shape:
            state[prefix + name] = spec.shard(value, parameter.shape[spec.dim])


class FullDraws(TorchFunctionMode):
    """Mode in which a random initialisation of a sharded parameter draws the full tensor.

    Each rank of tp then keeps its part, so that weights and random numbers are those of one
    process. With several stages, or with experts on several ranks, a rank cannot draw what the
    other ranks draw, and the initialisation is refused.
    """

    def __init__(self, module: nn.Module, mesh: ParallelMesh) -> None:
        super().__init__()
        self._module = module
        self._mesh = mesh

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function, on the full tensor if it initialises a sharded parameter."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        frame = sys._getframe(1)
        if name not in _DRAWS and not (name == "view_as" and _is_in_init(frame)):
            return func(*args, **kwargs)
        key = next((key for key in ("tensor", "input") if key in kwargs), "")
        target = kwargs[key] if key else args[0]
        found = self._parameter_of(target)
        if found is None:
            return func(*args, **kwargs)
        label, parameter = found
        spec = shard_spec_of(parameter)
        self._check(label, func, frame, is_whole=spec.is_whole)
        if spec.is_whole:
            return func(*args, **kwargs)
        full = torch.empty(spec.full_shape, dtype=target.dtype, device=target.device)
        if key:
            func(*args, **{**kwargs, key: full})
        else:
            func(full, *args[1:], **kwargs)
        with torch.no_grad():
            target.copy_(spec.shard(full, target.shape[spec.dim]))
        return target

    def _parameter_of(self, target: Any) -> tuple[str, nn.Parameter] | None:
        """Return the parameter whose memory a tensor has, such as ``parameter.data``."""
        if not isinstance(target, Tensor):
            return None
        for name, parameter in self._module.named_parameters():
            is_same = target.data_ptr() == parameter.data_ptr() and target.shape == parameter.shape
            if target is parameter or (is_same and target.numel()):
                return name, parameter
        return None

    def _check(
        self, label: str, func: Callable[..., Any], frame: FrameType, *, is_whole: bool
    ) -> None:
        """Refuse an initialisation whose full tensor this rank cannot draw."""
        layout = self._mesh.layout
        if layout.pp > 1 or layout.ep > 1:
            reason = (
                f"with pp ({layout.pp}) or ep ({layout.ep}) above 1 a rank draws nothing for the "
                "weights of other ranks, so that its next numbers are not those of one process"
            )
        elif not is_whole and _is_in_init(frame):
            reason = (
                f"the weight is cut over tp ({layout.tp}), and this function would use the sizes "
                "of this rank's part"
            )
        else:
            return
        reader = outside_torch(frame)
        line = Line("", 0) if reader is None else Line.of(reader)
        raise UnsupportedError(
            f"{line} must not initialise "
            f"{label!r} at random after the module was divided among the ranks: {reason}. "
            "Initialise weights in __init__ or configure_model."
        )


def _is_in_init(frame: FrameType) -> bool:
    """Return whether a function of torch.nn.init, which a mode does not see, makes a call."""
    return frame.f_code.co_filename == _INIT_FILE
