"""Tensor index of torch.distributed.checkpoint, a pickle that is read without running its code."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import IO, Any, NoReturn

import torch
import torch.distributed.checkpoint.filesystem as dcp_filesystem
import torch.distributed.checkpoint.metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata
from typing_extensions import override

from lightning_megatron.checkpoint.storage import HashingStream

_METADATA_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorStorageMetadata",
)

#: Values of a stored TensorProperties that every supported torch reads.
_NUM_PROPERTIES = 5


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler that accepts only the classes of a tensor index.

    A pickle runs code by calling objects that it names. Here it can name only plain data classes,
    sizes and dtypes. A pickle can also set attributes of each object that it names: it receives
    only sealed classes, because the process shares the real ones.
    """

    @override
    def find_class(self, module: str, name: str) -> Any:
        if module == dcp_metadata.__name__ and name in _METADATA_CLASSES:
            return _sealed(partial(object.__new__, getattr(dcp_metadata, name)))
        if (module, name) == (dcp_metadata.__name__, "TensorProperties"):
            return _sealed(partial(object.__new__, _StoredProperties))
        if (module, name) == (dcp_metadata.__name__, "_MEM_FORMAT_ENCODING"):
            return _sealed(int)
        if (module, name) == (dcp_filesystem.__name__, "_StorageInfo"):
            return _sealed(partial(object.__new__, dcp_filesystem._StorageInfo))
        if (module, name) == ("torch", "Size"):
            return _sealed(torch.Size)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _sealed(_layout_named)
        if (
            module == "torch"
            and "." not in name
            and isinstance(dtype := getattr(torch, name, None), torch.dtype)
        ):
            return dtype
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which does not belong in a list of tensors"
        )


class _StoredProperties(dcp_metadata.TensorProperties):
    """Properties whose memory format is a number: members of an enumeration are shared objects."""

    @override
    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__class__ = dcp_metadata.TensorProperties  # type: ignore[assignment]
        # torch 2.15 added strides, which no reader uses.
        dtype, layout, requires_grad, encoding, pin_memory = state[:_NUM_PROPERTIES]
        memory_format = dcp_metadata._MEM_FORMAT_ENCODING(encoding)
        self.__setstate__((dtype, layout, requires_grad, memory_format, pin_memory))


def _sealed(make: Callable[..., Any]) -> type:
    """Return a class whose calls return what ``make`` returns, and of which no state can be set."""
    return type("Sealed", (), {"__new__": lambda cls, *args: make(*args), "__setstate__": _refuse})


def _refuse(state: Any) -> NoReturn:
    raise pickle.UnpicklingError("it sets attributes of a class, which all others share")


def read_index(file: IO[bytes]) -> Metadata:
    """Read a tensor index."""
    metadata = _IndexUnpickler(file).load()
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise pickle.UnpicklingError("it is not a list of tensors")
    return metadata


def write_index(index: Metadata, file: HashingStream) -> None:
    """Write a tensor index in the format of torch.distributed.checkpoint, readable by every torch
    that the package supports.
    """
    _IndexPickler(file).dump(index)


class _IndexPickler(pickle.Pickler):
    """Pickler that leaves out what older torch could not read."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, dcp_metadata.TensorProperties):
            return NotImplemented
        reduced: Any = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        make, args, state = reduced[:3]
        return make, args, state[:_NUM_PROPERTIES]


def _layout_named(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"it has a tensor of layout {name}, which is never saved")
    return torch.strided
