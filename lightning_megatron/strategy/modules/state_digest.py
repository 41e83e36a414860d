"""Digests of Python objects, to detect changes."""

from __future__ import annotations

import hashlib
import pickle
import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_megatron.graphs.backend import CAPTURE_ERRORS
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh

#: Types whose content is ignored: code, objects that are checked elsewhere and objects that steps
#: only read.
IGNORED_TYPES = (
    type,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
    ModuleType,
    torch.dtype,
    torch.device,
    nn.Module,
    ParallelMesh,
    MeshAxis,
    Trainer,
    Strategy,
    Callback,
    Logger,
    LightningDataModule,
    Dataset,
    DataLoader,
    Optimizer,
)
#: Packages of large objects that steps only read.
_IGNORED_PACKAGES = ("tokenizers", "sentencepiece")
#: Errors of pickling for objects that cannot be sent, such as locks, generators and open files, and
#: of their properties.
PICKLING_ERRORS = (*CAPTURE_ERRORS, pickle.PicklingError)
_LEAF_TYPES = frozenset({int, float, str, bool, bytes, type(None), Tensor})
#: Largest CPU tensor that is compared by value, which detects writes through ``.data`` (elements).
_MAX_COMPARED_ELEMENTS = 65536


@dataclass(frozen=True)
class ListDigest:
    """Digest of a list of numbers, strings and tensors, which also detects appended items.

    Args:
        owner: Identity of the list.
        items: Identities of the items.
    """

    owner: int
    items: tuple[int, ...]
    versions: int


def digest(value: Any) -> bytes | ListDigest | None:
    """Return the digest of a value and its content; None for unsupported values.

    Two digests of an object differ if its content was rebound, extended or written in place between
    them. Digests contain identities, so the value must live until they are compared. The values of
    tensors on a GPU are not read.
    """
    if (
        type(value) is list
        and set(map(type, value)) <= _LEAF_TYPES
        and not any(map(_is_untraced, value))
    ):
        return ListDigest(id(value), tuple(map(id, value)), _versions(value))
    sink = _HashSink()
    try:
        _Digester(sink, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except PICKLING_ERRORS:
        # Pickling runs properties of the user's objects, which may raise.
        return None
    return sink.hash.digest()


def num_kept(value: Any, before: bytes | ListDigest | None) -> int:
    """Return the length of a digested list if items were only appended since; else 0."""
    if type(value) is not list or not isinstance(before, ListDigest) or id(value) != before.owner:
        return 0
    kept = value[: len(before.items)]
    is_same = tuple(map(id, kept)) == before.items and _versions(kept) == before.versions
    return len(kept) if is_same else 0


def _versions(values: list[Any]) -> int:
    return sum(value._version for value in values if isinstance(value, Tensor))


def _is_untraced(value: Any) -> bool:
    """Return whether a value is a tensor without a version counter."""
    return isinstance(value, Tensor) and value.is_inference()


class _HashSink:
    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(data)


class _Digester(pickle.Pickler):
    """Pickler whose output feeds a hash and is never read."""

    def reducer_override(self, obj: Any) -> Any:
        # _parts itself must be pickled normally, or the recursion would never end.
        return NotImplemented if obj is _parts else (_parts, (id(obj), *_parts_of(obj)))


def _parts(*parts: Any) -> None:
    """Placeholder for the class of an object."""


def _parts_of(obj: Any) -> tuple[Any, ...]:
    if isinstance(obj, IGNORED_TYPES):
        return ()
    if isinstance(obj, Tensor):
        return _parts_of_tensor(obj)
    if isinstance(obj, np.ndarray):
        return (obj.shape, obj.dtype.str, obj.tobytes() if obj.dtype != object else obj.tolist())
    attributes = dict(vars(obj)) if hasattr(obj, "__dict__") else None
    if isinstance(obj, Mapping):
        return (dict(obj), attributes)
    if isinstance(obj, (list, tuple, set, frozenset, deque)):
        return (list(obj), attributes)
    slots = [name for kind in type(obj).__mro__ for name in vars(kind).get("__slots__", ())]
    if attributes is not None or slots:
        held = {
            name: getattr(obj, name)
            for name in slots
            if isinstance(name, str) and hasattr(obj, name)
        }
        return (held, attributes)
    if type(obj).__module__.partition(".")[0] in _IGNORED_PACKAGES:
        return ()
    try:
        return tuple(obj.__reduce_ex__(2)[1:3])
    except PICKLING_ERRORS:
        # A lock, a file or a generator counts as unchanged while it is the same object.
        return ()


def _parts_of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    untraced = tensor.is_inference()
    version = None if untraced else tensor._version
    parts: list[Any] = [str(tensor.dtype), tuple(tensor.shape), version]
    is_readable = (
        tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
    )
    if is_readable and (untraced or tensor.numel() <= _MAX_COMPARED_ELEMENTS):
        values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        parts.append(values.view(torch.uint8).numpy().tobytes())
    elif untraced:
        # A tensor without a version counter that is not read counts as changed.
        parts.append(secrets.token_bytes(16))
    return tuple(parts)
