"""Serialisation of Python objects for other ranks, whose tensors are sent through the CPU."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_megatron.strategy.private.loops import attached_trainer

_BUILTIN_TYPES = frozenset({int, float, str, bytes, bool, type(None), list, dict, tuple, set})


def pack(value: Any, module: LightningModule) -> bytes:
    """Serialise a value by pickle, with its tensors on the CPU.

    Submodules of ``module``, their parameters and the Trainer are sent as names, and the receiver
    substitutes its own objects.
    """
    buffer = io.BytesIO()
    _Packer(buffer, module).dump(value)
    return buffer.getvalue()


def unpack(data: bytes, module: LightningModule, device: torch.device) -> Any:
    """Deserialise a value that another rank has packed."""
    # Inference tensors cannot be written outside inference mode, where metrics update their sums.
    with torch.inference_mode(False):
        return _Unpacker(io.BytesIO(data), module, device).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, module: LightningModule) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._trainer = attached_trainer(module)
        self._modules = {id(part): name for name, part in module.named_modules()}
        self._parameters = {id(parameter): name for name, parameter in module.named_parameters()}
        self._tensors: dict[int, tuple[int, Tensor]] = {}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _BUILTIN_TYPES:
            return None
        if isinstance(obj, nn.Module):
            return ("module", self._modules[id(obj)]) if id(obj) in self._modules else None
        if isinstance(obj, nn.Parameter):
            return ("parameter", self._parameters[id(obj)]) if id(obj) in self._parameters else None
        if isinstance(obj, Tensor) and obj.layout == torch.strided and not obj.is_quantized:
            if id(obj) in self._tensors:
                return ("tensor", self._tensors[id(obj)][0], None)
            self._tensors[id(obj)] = (len(self._tensors), obj)
            return ("tensor", len(self._tensors) - 1, _values(obj))
        return ("trainer", "") if obj is self._trainer and isinstance(obj, Trainer) else None


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, module: LightningModule, device: torch.device) -> None:
        super().__init__(file)
        self._module = module
        self._device = device
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Any:
        kind, name = pid[:2]
        if kind == "tensor":
            if name not in self._tensors:
                data, dtype, shape, is_on_cpu = pid[2]
                values = (
                    torch.frombuffer(bytearray(data), dtype=dtype)
                    if data
                    else torch.empty(0, dtype=dtype)
                )
                self._tensors[name] = values.reshape(shape).to("cpu" if is_on_cpu else self._device)
            return self._tensors[name]
        if kind == "module":
            return self._module.get_submodule(name)
        return self._module.get_parameter(name) if kind == "parameter" else self._module.trainer


def _values(tensor: Tensor) -> tuple[bytes, torch.dtype, tuple[int, ...], bool]:
    # Send only the values, because pickling a view would serialise its whole storage.
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return (
        values.view(torch.uint8).numpy().tobytes(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.device.type == "cpu",
    )
