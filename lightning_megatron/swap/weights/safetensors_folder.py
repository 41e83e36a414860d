"""Random access to tensors in a local Hugging Face folder of safetensors files."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.models.hugging_face_folder import name_folder_in_errors
from lightning_megatron.strict_json import parse_object, read_regular_file
from lightning_megatron.swap.tensors.mapping import Slices, named
from lightning_megatron.swap.weights.safetensors_file import StoredTensor, read_header
from lightning_megatron.swap.weights.scaled_blocks import (
    FolderTensor,
    is_read_as_numbers,
    join_scales,
)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
#: Field of a configuration that describes weights in few bits.
QUANTIZATION = "quantization_config"
_REMEDY = "Copy it again."
#: Size limit of an index, enough for a million tensors (bytes).
_MAX_INDEX_BYTES = 1 << 27
#: Size limit of a configuration, enough for the names of a hundred thousand classes (bytes).
_MAX_CONFIG_BYTES = 1 << 23
_FILE = re.compile(r"[^./\\\0][^/\\\0]*\.safetensors")
_NUMBERED = re.compile(
    r"(?P<start>.*)-(?P<number>\d{1,9})-of-(?P<count>\d{1,9})\.safetensors", re.ASCII
)


class SafetensorsFolder:
    """Reader of the tensors in a local Hugging Face folder.

    Equal to ``safetensors.safe_open`` on each file. The constructor reads and checks the headers.
    Any thread may read tensors. Weights in MXFP4, and weights in 8 bits with a scale for every 128
    rows and columns, are read as bfloat16. Damage that a header does not reveal
    (:func:`read_header`) is not detected.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._tensors = join_scales(_listed(self.path))

    @staticmethod
    def exists_in(path: str | os.PathLike[str]) -> bool:
        """Return whether a folder has weights of this format."""
        return any((Path(path) / name).is_file() for name in (WEIGHTS, INDEX))

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the most frequent floating-point dtype; float32 if there is none."""
        count: Counter[torch.dtype] = Counter()
        for tensor in self._tensors.values():
            if tensor.dtype.is_floating_point:
                count[tensor.dtype] += prod(tensor.shape)
        return count.most_common(1)[0][0] if count else torch.float32

    @property
    def has_scales(self) -> bool:
        """Return whether weights are stored in few bits with scales."""
        return any(not isinstance(tensor, StoredTensor) for tensor in self._tensors.values())

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return all fields of ``config.json``, without quantization that reading undoes.

        transformers adds the defaults of omitted fields, and converts earlier notations.
        """
        path = self.path / CONFIG
        if not path.is_file():
            raise CheckpointMismatchError(
                f"a Hugging Face folder must have a {CONFIG}, which describes the model: "
                f"{self.path} has none. Save the model with save_pretrained."
            )
        content = parse_object(
            read_regular_file(path, _REMEDY, _MAX_CONFIG_BYTES), str(path), _REMEDY
        )
        if is_read_as_numbers(content.get(QUANTIZATION)):
            del content[QUANTIZATION]
        with name_folder_in_errors(str(self.path), f"{CONFIG} must be one that transformers reads"):
            known: Any = import_extra("transformers", "hf").CONFIG_MAPPING
            config: dict[str, Any] = known[content["model_type"]].from_dict(content).to_dict()
        return config

    def check_types(self, names: Iterable[str]) -> None:
        """Refuse combinations of dtypes that tensors of one model cannot have.

        Weights are floating-point numbers, and a model has only one of two dtypes of the same
        width. Without this check, a header that declares a wrong dtype for a tensor would pass as
        valid.
        """
        examples: dict[torch.dtype, str] = {}
        for name in names:
            examples.setdefault(self.dtype_of(name), name)
        for dtype, name in examples.items():
            twins = [d for d in examples if d != dtype and d.itemsize == dtype.itemsize]
            if not dtype.is_floating_point or twins:
                rest = "".join(f", and {examples[twin]!r} {twin}" for twin in twins)
                raise CorruptDataError(
                    "weights must be floating-point numbers, and must not mix types of the same "
                    f"width: {name!r} of {self.path} is {dtype}{rest}. The bytes of one type "
                    "would be read as another. Save the model again, with one type."
                )

    def names(self) -> Collection[str]:
        """List the tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor (elements)."""
        return self._at(name).shape

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._at(name).dtype

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """Map a part of a tensor into memory, on the CPU; by default all of it."""
        stored = self._at(name)
        slices = tuple(slice(0, size) for size in stored.shape) if slices is None else slices
        return stored.read(slices)

    def _at(self, name: str) -> FolderTensor:
        if name not in self._tensors:
            raise CheckpointMismatchError(
                f"the folder must have every tensor of the model: {self.path} has no {name!r}. It "
                f"has {named(self._tensors)}. Use a folder of the same family and size."
            )
        return self._tensors[name]


def _listed(folder: Path) -> dict[str, StoredTensor]:
    # If the folder has both, from different saves, prefer the single file, as Hugging Face does.
    if (folder / WEIGHTS).is_file():
        return read_header(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        _refuse(folder)
    content = read_regular_file(folder / INDEX, _REMEDY, _MAX_INDEX_BYTES)
    weight_map = parse_object(content, str(folder / INDEX), _REMEDY).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise CorruptDataError(
            f"an index must map tensors to files in its weight_map: {folder / INDEX} does not. The "
            "file is damaged or has another format. Copy the folder again."
        )
    files = sorted(set(weight_map.values()))
    _check_files(folder, files)
    headers = {file: read_header(folder / file) for file in files}
    held = {(name, file) for file, tensors in headers.items() for name in tensors}
    differing = held ^ set(weight_map.items())
    if differing:
        raise CheckpointMismatchError(
            f"every file must have the tensors that {INDEX} lists for it, and no others: "
            f"{named(f'{name} in {file}' for name, file in differing)} of {folder} are only in one "
            "of them. Index and files are from different saves. Copy the folder again."
        )
    return {name: headers[file][name] for name, file in weight_map.items()}


def _check_files(folder: Path, files: Sequence[str]) -> None:
    """Refuse missing files, paths outside the folder, and incomplete series of files."""
    outside = [file for file in files if not _FILE.fullmatch(file) or not _is_inside(folder, file)]
    if outside:
        raise CheckpointMismatchError(
            f"every file that {INDEX} names must be a safetensors file of its own folder: "
            f"{named(outside)} of {folder} are not, or are links to files elsewhere. Put the files "
            "into the folder; hard links save space."
        )
    absent = [file for file in files if not os.path.isfile(folder / file)]
    if absent:
        raise CheckpointMismatchError(
            f"every file that {INDEX} names must be in its folder: {folder} lacks {named(absent)} "
            f"of {len(files)}. The copy is incomplete. Copy the missing files."
        )
    series: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, files)):
        series.setdefault((match["start"], match["count"]), set()).add(int(match["number"]))
    for (start, count), numbers in series.items():
        if len(numbers) != int(count) or max(numbers) > int(count):
            raise CheckpointMismatchError(
                f"{INDEX} must name every file of a series: it names {len(numbers)} of the "
                f"{int(count)} files {start}-...-of-{count} of {folder}. Copy the index again."
            )


def _is_inside(folder: Path, file: str) -> bool:
    """Return whether a file is in a folder or in its Hugging Face cache.

    In the cache, ``snapshots/REVISION/FILE`` is a link to ``blobs/HASH`` next to ``snapshots``.
    """
    inside = folder.resolve()
    target = Path(os.path.realpath(folder / file)).parent
    snapshots = next((parent for parent in inside.parents if parent.name == "snapshots"), None)
    return target in (inside, None if snapshots is None else snapshots.parent / "blobs")


def _refuse(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointMismatchError(
            f"weights are read from a local folder: {folder} is not a folder, and nothing is "
            "downloaded. Download the model first, and pass the path of its folder."
        )
    others = sorted(
        path.name
        for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5")
        for path in folder.glob(pattern)
    )
    if others:
        raise UnsupportedError(
            f"weights must be in safetensors files: {folder} has only {named(others)}. Pickled "
            "files must be read as a whole and can run code. Save the model again with "
            "save_pretrained, which writes safetensors."
        )
    raise CheckpointMismatchError(
        f"a folder of weights must have {WEIGHTS} or {INDEX}: {folder} has neither. Files with "
        "other names are not read. Use the folder that save_pretrained wrote."
    )
