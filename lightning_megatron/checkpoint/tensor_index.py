"""Tensor index of torch.distributed.checkpoint, a pickle that is read without running its code."""

from __future__ import annotations

import pickle
from typing import IO, Any

import torch
import torch.distributed.checkpoint.filesystem as dcp_filesystem
import torch.distributed.checkpoint.metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata
from typing_extensions import override

from lightning_megatron.checkpoint.storage import HashingStream

_METADATA_CLASSES = (
    *(
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
    ),
    *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler that accepts only the classes of a tensor index.

    A pickle runs code by calling objects that it names. Here it can name only plain data classes,
    sizes and dtypes.
    """

    @override
    def find_class(self, module: str, name: str) -> Any:
        if module == dcp_metadata.__name__ and name in _METADATA_CLASSES:
            return getattr(dcp_metadata, name)
        if (module, name) == (dcp_filesystem.__name__, "_StorageInfo"):
            return dcp_filesystem._StorageInfo
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout_named
        if (
            module == "torch"
            and "." not in name
            and isinstance(dtype := getattr(torch, name, None), torch.dtype)
        ):
            return dtype
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which does not belong in a list of tensors"
        )


def read_index(file: IO[bytes]) -> Metadata:
    """Read a tensor index.

    Raises:
        pickle.UnpicklingError: If the pickle names another class, or is not a tensor index.
    """
    metadata = _IndexUnpickler(file).load()
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise pickle.UnpicklingError("it is not a list of tensors")
    return metadata


def write_index(index: Metadata, file: HashingStream) -> None:
    """Write a tensor index in the format of torch.distributed.checkpoint."""
    pickle.dump(index, file)


def _layout_named(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"it has a tensor of layout {name}, which is never saved")
    return torch.strided
