"""Copies of a checkpoint: one file that Lightning's own strategies load, or another checkpoint."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoint.directory import checkpoint_path_of
from lightning_megatron.checkpoint.entries import BoxToWrite
from lightning_megatron.checkpoint.header import METADATA, Header
from lightning_megatron.checkpoint.load import load_metadata
from lightning_megatron.checkpoint.metadata_checks import (
    CURRENT,
    HUGGING_FACE,
    MODEL,
    ONE_PROCESS,
    OPTIMIZERS,
    check_names,
)
from lightning_megatron.checkpoint.open_checkpoint import (
    OpenCheckpoint,
    TensorToRead,
    read_object,
    verify_checkpoint,
)
from lightning_megatron.checkpoint.storage import open_for_writing
from lightning_megatron.checkpoint.tensor_index import (
    StoredPiece,
    write_metadata,
    write_object,
    write_piece,
)
from lightning_megatron.checkpoint.values import to_bytes
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.groups.shard_spec import Box, replicated_spec
from lightning_megatron.swap.hugging_face.class_tensors import (
    ClassTensors,
    class_name_in,
    class_states,
    to_class_names,
)

_STATE = re.compile(r"optimizer\.\d+\.state\.")
_TRAINING = re.compile(rf"{_STATE.pattern}|{re.escape(CURRENT)}")
#: Tensors are read in batches of about this size (bytes).
_BATCH = 1 << 30
#: Keys that Lightning omits from a checkpoint with ``save_weights_only=True``.
_TRAINING_KEYS = (OPTIMIZERS, "callbacks", "lr_schedulers", "MegatronPrecision", "averaging_state")


@dataclass(frozen=True)
class WrittenSize:
    """Size of a checkpoint that was written."""

    num_tensors: int
    num_bytes: int


def consolidate(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    weights_only: bool = False,
    dtype: torch.dtype | None = None,
    unsafe: bool = False,
) -> WrittenSize:
    """Write one file from which ``Trainer(strategy="auto").fit(ckpt_path=...)`` resumes.

    Tensors are read into temporary files in the folder of ``out``, so that only a few of them are
    in memory at a time.

    Args:
        weights_only: Whether to omit optimizer states and all else that only training needs.
        dtype: Dtype of the floating-point weights; None keeps the saved dtype, which is full
            precision under mixed precision.
    """
    stored, metadata = _verified(path, unsafe)
    one_process = metadata.pop(ONE_PROCESS, None)
    if one_process is None:
        raise CheckpointMismatchError(
            "a checkpoint must describe the state of one process to be written as one file: "
            f"{os.fspath(path)} was saved by an earlier version and does not. Load it with "
            "MegatronStrategy and save it again."
        )
    models = ClassTensors.from_checkpoint(metadata.pop(HUGGING_FACE, {}))
    metadata = without_training(metadata) if weights_only else metadata
    target = Path(out)
    if target.is_dir():
        raise CheckpointMismatchError(
            f"a checkpoint is written as one file: {target} is a directory. Pass the name of a "
            "file."
        )
    names = [
        name
        for name in stored.tensors
        if name.startswith(MODEL) or (not weights_only and _TRAINING.match(name))
    ]
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        tensors = _read_to_disk(stored, names, dtype, one_process["padded_rows"], Path(folder))
        values = _without_division(metadata, stored.checkpoint.header.layout.dp)
        values["state_dict"] = _weights(MODEL, one_process, tensors, models)
        if any(name.startswith(CURRENT) for name in names):
            values["current_model_state"] = _weights(CURRENT, one_process, tensors, models)
        if not weights_only:
            values["optimizer_states"] = [
                _numbered(index, optimizer, one_process["numbering"][index], tensors, models)
                for index, optimizer in enumerate(values.pop(OPTIMIZERS, ()))
            ]
            _translate_precision(values)
        unfinished = Path(folder) / target.name
        torch.save(values, unfinished)
        os.replace(unfinished, target)
        return WrittenSize(len(tensors), sum(tensor.nbytes for tensor in tensors.values()))


def _verified(path: str | os.PathLike[str], unsafe: bool) -> tuple[OpenCheckpoint, dict[str, Any]]:
    """Return a checkpoint whose files and names were checked, and its metadata."""
    verify_checkpoint(path)
    stored = OpenCheckpoint.open(path)
    metadata = load_metadata(stored, weights_only=not unsafe)
    if ONE_PROCESS in metadata:
        shapes = {name: tensor.shape for name, tensor in stored.tensors.items()}
        optimizers = metadata.get(OPTIMIZERS, ())
        check_names(metadata[ONE_PROCESS], optimizers, shapes, stored.checkpoint.file(METADATA))
    return stored, metadata


def _read_to_disk(
    stored: OpenCheckpoint,
    names: Iterable[str],
    dtype: torch.dtype | None,
    padded_rows: Mapping[str, int],
    folder: Path,
) -> dict[str, Tensor]:
    """Read full tensors into memory-mapped files, with the padding of the model in one process.

    Args:
        dtype: Dtype of the floating-point weights; None keeps the saved dtype.
        padded_rows: Number of rows of padded tensors, by name of the parameter.
    """
    tensors: dict[str, Tensor] = {}
    targets = []
    for entry in names:
        saved = stored.tensors[entry]
        is_weight = entry.startswith((MODEL, CURRENT))
        weight = entry.removeprefix(MODEL).removeprefix(CURRENT)
        # An optimizer state is padded as its parameter.
        name = weight if is_weight else _STATE.sub("", entry).rpartition(".")[0]
        weights = stored.tensors.get(f"{MODEL}{name}")
        shape = saved.shape
        if name in padded_rows and weights is not None and shape == weights.shape:
            shape = (padded_rows[name], *shape[1:])
        converts = is_weight and dtype is not None and saved.dtype.is_floating_point
        kind = dtype if converts else saved.dtype
        full = torch.empty((), dtype=kind)
        part = full
        if shape:
            file = str(folder / f"{len(tensors)}.tensor")
            flat = torch.from_file(file, shared=True, size=prod(shape), dtype=kind)
            full = flat.view(shape)
            part = full[: saved.shape[0]]
        tensors[entry] = full
        targets.append(TensorToRead(entry, part, replicated_spec(part)))
    stored.read(targets)
    return tensors


def _weights(
    prefix: str,
    one_process: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    models: Sequence[ClassTensors],
) -> dict[str, Any]:
    """Return the weights whose entries have a prefix, by their names in one process."""
    empty = one_process.get("empty", {})
    state = {}
    for name in one_process["order"]:
        source = one_process["aliases"].get(name, name)
        # Tensors without elements are not stored.
        known = tensors.get(f"{prefix}{source}")
        state[name] = torch.empty(empty.get(source, (0,))) if known is None else known
    return to_class_names(models, state)


def without_training(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that Lightning keeps with ``save_weights_only=True``."""
    return {key: value for key, value in metadata.items() if key not in _TRAINING_KEYS}


def read_one_by_one(stored: OpenCheckpoint, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Read full tensors with at most a gigabyte in memory at a time, or one larger tensor."""
    batch: list[str] = []
    size = 0
    for name in names:
        tensor = stored.tensors[name]
        num_bytes = prod(tensor.shape) * tensor.dtype.itemsize
        if batch and size + num_bytes > _BATCH:
            yield from stored.read_full(batch).items()
            batch = []
            size = 0
        batch.append(name)
        size += num_bytes
    if batch:
        yield from stored.read_full(batch).items()


def _numbered(
    index: int,
    optimizer: Mapping[str, Any],
    numbering: list[list[str]] | str,
    tensors: Mapping[str, Tensor],
    models: Sequence[ClassTensors],
) -> dict[str, Any]:
    """Return an optimizer's state dict as torch has it, with numbers in place of names."""
    if isinstance(numbering, str):
        raise UnsupportedError(
            f"{numbering} Until then, write only the weights (--weights_only), which do not depend "
            "on the order."
        )
    # Several parameters of this package can be one parameter of the model's class. The latter takes
    # the position of the first of them.
    groups = []
    for names in numbering:
        groups.append(list(dict.fromkeys(class_name_in(models, name) for name in names)))
    number_of: dict[str, int] = {}
    for name in (name for names in groups for name in names):
        if name in number_of:
            raise UnsupportedError(
                "parameters that the class of a Hugging Face model stores as one must be in one "
                f"group of an optimizer: the parameters of {name!r} are in several. Write only the "
                "weights (--weights_only)."
            )
        number_of[name] = len(number_of)
    by_key: dict[str, dict[str, Any]] = {}
    prefix = f"optimizer.{index}.state."
    for entry, tensor in tensors.items():
        if entry.startswith(prefix):
            name, _, key = entry.removeprefix(prefix).rpartition(".")
            by_key.setdefault(key, {})[name] = tensor
    for name, values in optimizer["values"].items():
        for key, value in values.items():
            by_key.setdefault(key, {})[name] = value
    state: dict[int, dict[str, Any]] = {}
    for key, states in by_key.items():
        for name, value in class_states(models, key, states).items():
            state.setdefault(number_of[name], {})[key] = value
    param_groups = []
    for group, names in zip(optimizer["groups"], groups, strict=True):
        numbers = [number_of[name] for name in names]
        param_groups.append({**group["hyperparameters"], "params": numbers})
    return {"state": dict(sorted(state.items())), "param_groups": param_groups}


def _without_division(metadata: Mapping[str, Any], dp: int) -> dict[str, Any]:
    """Omit the dataloader state if several ranks divided the data: one process cannot use it."""
    values = dict(metadata)
    loops = {key: dict(value) for key, value in metadata.get("loops", {}).items()}
    fit = dict(loops.get("fit_loop", {}).get("state_dict", {}))
    if dp > 1 and any(fit.get("combined_loader", ())):
        del fit["combined_loader"]
        loops["fit_loop"]["state_dict"] = fit
        values["loops"] = loops
    return values


def _translate_precision(values: dict[str, Any]) -> None:
    """Convert the state of the loss scale to that of Lightning's mixed-precision plugin."""
    scale = values.pop("MegatronPrecision", {}).get("loss_scale")
    if scale is not None:
        values["MixedPrecision"] = {
            "scale": scale["scale"],
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "_growth_tracker": scale["clean_steps"],
        }


#: Approximate maximum size of a piece, so that a rank need not read the full tensor (bytes).
_PIECE = 1 << 26


def rewrite(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    num_files: int = 1,
    weights_only: bool = False,
    dtype: torch.dtype | None = None,
    unsafe: bool = False,
) -> WrittenSize:
    """Write a copy of a checkpoint, with other files or another dtype.

    Tensors are read and written one after the other, so that only a few of them are in memory at a
    time.

    Args:
        dtype: Dtype of the floating-point weights; None keeps the saved dtype.
    """
    stored, metadata = _verified(path, unsafe)
    names = [name for name in stored.tensors if not weights_only or name.startswith(MODEL)]
    objects = {} if weights_only else stored.index.objects
    tensors = (
        (name, _converted(name, full, dtype)) for name, full in read_one_by_one(stored, names)
    )
    states = {name: read_object(stored.checkpoint, piece) for name, piece in objects.items()}
    kept = metadata if not weights_only else without_training(metadata)
    header = replace(stored.checkpoint.header, folder=".", torch=torch.__version__)
    return write_checkpoint(out, num_files, tensors, states, kept, header)


def _converted(entry: str, full: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not entry.startswith(MODEL) or not full.is_floating_point():
        return full
    return full.to(dtype)


def write_checkpoint(
    out: str | os.PathLike[str],
    num_files: int,
    tensors: Iterable[tuple[str, Tensor]],
    objects: Mapping[str, bytes],
    metadata: Mapping[str, Any],
    header: Header,
) -> WrittenSize:
    """Write full tensors as a checkpoint, which becomes visible when it is complete.

    Each piece is appended to the smallest file.

    Args:
        header: Header of the checkpoint, without its list of files.
    """
    target = checkpoint_path_of(out)
    token = target.begin()
    pieces: list[StoredPiece] = []
    sizes: list[int] = []
    try:
        folder = target.folder(token)
        with ExitStack() as stack:
            streams = {}
            for number in range(num_files):
                name = f"__{number}_0.distcp"
                streams[name] = stack.enter_context(open_for_writing(folder, name))
            for name, full in tensors:
                sizes.append(full.nbytes)
                for piece in _pieces_of(name, full):
                    file = min(streams, key=lambda file: streams[file].tell())
                    pieces.append(write_piece(piece, file, streams[file]))
            for name, data in objects.items():
                file = min(streams, key=lambda file: streams[file].tell())
                pieces.append(write_object(name, data, file, streams[file]))
        files = {name: stream.record for name, stream in streams.items()}
        files |= write_metadata(folder, to_bytes(dict(metadata)), pieces)
        target.publish(token, replace(header, files=files))
    except BaseException:
        target.discard(token)
        raise
    return WrittenSize(len(sizes), sum(sizes))


def _pieces_of(name: str, full: Tensor) -> Iterator[BoxToWrite]:
    """Divide a full tensor into pieces of whole rows."""
    shape = tuple(full.shape)
    if not shape:
        yield BoxToWrite(name, (), Box((), (), 0, 0), full)
        return
    step = max(1, _PIECE * shape[0] // max(1, full.nbytes))
    for start in range(0, shape[0], step):
        part = full[start : start + step]
        offsets = (start, *[0] * (len(shape) - 1))
        yield BoxToWrite(name, shape, Box(offsets, tuple(part.shape), 0, 0), part)
