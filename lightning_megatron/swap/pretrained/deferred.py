"""Models built without weights, which are read when user code or a replacement needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors

from lightning_megatron.layers.parameters.init import initialize_
from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.pretrained.unchanged_models import ModuleDescription
from lightning_megatron.swap.pretrained.without_weights import build_layers
from lightning_megatron.swap.tensors.low_rank import plain_name
from lightning_megatron.swap.tensors.mapping import TensorMap, TensorReader
from lightning_megatron.swap.tensors.packed import pack, whole_of
from lightning_megatron.swap.weights.load import reader_of
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder

_ATTRIBUTE = "deferred"

#: Attribute by which Hugging Face marks modules and tensors that are already initialized.
_INITIALIZED = "_is_hf_initialized"

#: Attributes of a tensor that do not depend on its values.
_PLAIN_GETTERS = frozenset(
    """
    shape dtype requires_grad grad grad_fn is_leaf ndim layout names is_sparse _base is_cuda
    is_quantized is_nested is_mkldnn _version _backward_hooks nbytes itemsize is_cpu is_xpu is_mps
    is_ipu is_vulkan is_maia retains_grad output_nr name
    """.split()
)
#: Functions that do not read the values of a tensor.
_PLAIN_FUNCTIONS = frozenset(
    """
    size dim ndimension numel nelement element_size is_floating_point is_complex __len__
    is_contiguous stride storage_offset requires_grad_ __hash__ is_inference has_names
    _has_compatible_shallow_copy_type is_same_size __repr__ __format__ register_hook
    register_post_accumulate_grad_hook is_signed get_device untyped_storage data_ptr
    """.split()
)
#: Methods that cast a tensor.
_CASTS = frozenset({"half", "float", "double", "bfloat16"})


@dataclass(frozen=True)
class Origin:
    """Source of the weights of a model that was built without them.

    Args:
        folder: Folder of the weights; None means random initial values.
    """

    family: Family
    config: Mapping[str, Any]
    folder: str | None
    dtype: torch.dtype
    parts: Mapping[str, ModuleDescription] = field(repr=False)

    def value_of(self, name: str) -> Tensor:
        """Return the initial value of a tensor of the class, from the files or drawn."""
        if self.has(name):
            parts = {}
            for part in self._names_in_files[name]:
                whole = tuple(slice(0, size) for size in self._files.shape(part))
                parts[part] = self._files.read(part, whole).clone()
        else:
            parts = self._drawn(name)
        return pack(parts, self.family.packed)[name]

    def has(self, name: str) -> bool:
        """Return whether the folder has a tensor of the class; False without a folder."""
        return name in self._names_in_files

    @cached_property
    def _files(self) -> TensorReader:
        """Return a reader of the folder by the family's tensor names."""
        assert self.folder is not None, "there are files where there is a folder"
        return reader_of(SafetensorsFolder(self.folder), self.family)

    @cached_property
    def _names_in_files(self) -> dict[str, list[str]]:
        """List the names in the files of each tensor of the class, or of its parts."""
        names: dict[str, list[str]] = {}
        for part in () if self.folder is None else self._files.names():
            names.setdefault(whole_of(part, self.family.packed), []).append(part)
        return names

    def _drawn(self, name: str) -> dict[str, Tensor]:
        """Draw a tensor's parts with the initial values of the replaced model."""
        layers = build_layers(self.config, self.family, self.dtype)
        table = [t for t in self.family.tensors(layers.config) if self._has(t, name)]
        if not table:
            raise KeyError(name)
        initialize_(layers, "cpu", torch.initial_seed(), {tensor.target for tensor in table})
        parts: dict[str, Tensor] = {}
        for tensor in table:
            parts |= tensor.split(layers.get_parameter(tensor.target).detach()[: tensor.shape[0]])
        return {
            part: drawn
            for part, drawn in parts.items()
            if whole_of(part, self.family.packed) == name
        }

    def _has(self, tensor: TensorMap, name: str) -> bool:
        """Return whether a full tensor has a part of the tensor of the class."""
        return any(whole_of(source.name, self.family.packed) == name for source in tensor.sources)


def defer(model: nn.Module, origin: Origin) -> None:
    """Mark the parameters of a model on the meta device, so that they can be read later.

    Parameters that are in the files get Hugging Face's mark for initialized weights, so that
    ``init_weights`` does not change them.
    """
    for name, parameter in model.named_parameters():
        setattr(parameter, _ATTRIBUTE, (origin, name))
        if origin.has(name):
            setattr(parameter, _INITIALIZED, True)
    for module in model.modules():
        setattr(module, _INITIALIZED, True)


def origin_of(model: nn.Module) -> Origin | None:
    """Return the source of a deferred model's weights; None for other models."""
    for parameter in model.parameters():
        attached = getattr(parameter, _ATTRIBUTE, None)
        if attached is not None:
            origin: Origin = attached[0]
            return origin
    return None


def is_part_of_deferred(model: nn.Module) -> bool:
    """Return whether a model is a part of a deferred model, such as its body alone."""
    marks = ((name, getattr(p, _ATTRIBUTE, None)) for name, p in model.named_parameters())
    return any(mark is not None and mark[1] != plain_name(name) for name, mark in marks)


def read_deferred(model: nn.Module) -> Callable[[], None]:
    """Read the values of all deferred parameters of a model; do not change the model.

    Returns:
        Function that gives the parameters their values.
    """
    values = [
        (parameter, _value_of(parameter))
        for parameter in model.parameters()
        if _is_deferred(parameter)
    ]

    def give() -> None:
        for parameter, value in values:
            _give_value(parameter, value)

    return give


class ReadOnFirstUse(TorchFunctionMode):
    """Torch function mode that reads the values of deferred parameters on first use.

    Inside the block, a deferred parameter reports the CPU as its device. An operation that needs
    only shape or dtype does not read the parameter. Any other operation, such as an in-place write,
    a product, a resized vocabulary or ``load_state_dict``, first reads this one parameter, which is
    then an ordinary tensor, whose value is used when the model is replaced.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function; read the values of deferred arguments first if it needs them."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if name == "__get__" and _is_deferred(first):
            key = func.__self__.__name__
            if key in ("device", "is_meta", "is_cpu"):
                return {"device": torch.device("cpu"), "is_meta": False, "is_cpu": True}[key]
            if key in _PLAIN_GETTERS:
                return func(*args, **kwargs)
        elif name == "__set__" and _is_deferred(first):
            key = func.__self__.__name__
            if key in ("requires_grad", "grad") or (key == "data" and args[1].is_meta):
                return func(*args, **kwargs)
        elif name in _PLAIN_FUNCTIONS:
            return func(*args, **kwargs)
        elif (
            first is not None
            and _is_deferred(first)
            and (name == "__deepcopy__" or _is_cast(name, args, kwargs))
        ):
            return _marked(func(*args, **kwargs), first)
        for parameter in _deferred_in((*args, *kwargs.values())):
            _give_value(parameter, _value_of(parameter))
        return func(*args, **kwargs)


def _is_deferred(value: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return isinstance(value, Tensor) and value.is_meta and hasattr(value, _ATTRIBUTE)


def _deferred_in(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if _is_deferred(value):
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _deferred_in(value)
        elif isinstance(value, dict):
            yield from _deferred_in(value.values())


def _is_cast(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if name in _CASTS:
        return True
    rest = [
        value
        for value in (*args[1:], *kwargs.values())
        if value is not None and not isinstance(value, bool)
    ]
    return name == "to" and all(
        isinstance(value, (torch.dtype, torch.memory_format)) for value in rest
    )


def _marked(result: Tensor, source: Tensor) -> Tensor:
    setattr(result, _ATTRIBUTE, getattr(source, _ATTRIBUTE))
    return result


def _value_of(parameter: Tensor) -> Tensor:
    origin, name = getattr(parameter, _ATTRIBUTE)
    value: Tensor = origin.value_of(name).to(parameter.dtype)
    return value


def _give_value(parameter: Tensor, value: Tensor) -> None:
    replacement = (
        nn.Parameter(value, parameter.requires_grad)
        if isinstance(parameter, nn.Parameter)
        else value
    )
    kept = dict(vars(parameter))
    # The parameter must stay the same object, because modules and optimizers may refer to it.
    swap_tensors(parameter, replacement)
    vars(parameter).update(kept)
