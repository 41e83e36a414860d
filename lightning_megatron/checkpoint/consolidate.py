"""Write a sharded checkpoint as the one file that Lightning's own strategies load, optimizer states by number."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoint.header import METADATA
from lightning_megatron.checkpoint.load import load_metadata
from lightning_megatron.checkpoint.metadata_checks import (
    CURRENT,
    HUGGING_FACE,
    MODEL,
    ONE_PROCESS,
    OPTIMIZERS,
    check_names,
)
from lightning_megatron.checkpoint.stored import SavedTensor, Stored
from lightning_megatron.checkpoint.verify import verify_checkpoint
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.swap.class_tensors import ClassTensors, class_name_in, class_states
from lightning_megatron.swap.foreign_names import to_foreign_names

_STATE = re.compile(r"optimizer\.\d+\.state\.")
_TRAINING = re.compile(rf"{_STATE.pattern}|{re.escape(CURRENT)}")
#: Tensors are read in turns of this size (bytes).
_BATCH = 1 << 30
#: What Lightning leaves out of a checkpoint with ``save_weights_only=True``.
_TRAINING_KEYS = (OPTIMIZERS, "callbacks", "lr_schedulers", "MegatronPrecision", "averaging_state")


@dataclass(frozen=True)
class Written:
    """Say what was written.

    Args:
        num_tensors: Tensors in it.
        num_bytes: Their size (bytes).
    """

    num_tensors: int
    num_bytes: int


def consolidate(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    weights_only: bool = False,
    dtype: torch.dtype | None = None,
    unsafe: bool = False,
) -> Written:
    """Write one file that ``Trainer(strategy="auto").fit(ckpt_path=...)`` continues from.

    Tensors are read one after the other into temporary files beside the result, so that memory holds few of them.

    Args:
        path: A checkpoint of this library, saved by any layout.
        out: The file to write, on a mounted file system.
        weights_only: Leave out what a training needs to continue.
        dtype: Of the floating-point weights; None keeps what was saved, full precision under mixed precision.
        unsafe: Unpickle whatever the checkpoint holds beside tensors.

    Raises:
        CheckpointMismatchError: If there is no complete checkpoint, it does not say what one process would have, or
            ``out`` is a directory.
        CorruptDataError: If it is damaged, naming the file.
        UnsupportedError: If it holds more than tensors and plain values, and ``unsafe`` is not set, or optimizer states
            that one process would not have, and ``weights_only`` is not.
    """
    verify_checkpoint(path)
    metadata = load_metadata(path, weights_only=not unsafe)
    one_process, stored = metadata.pop(ONE_PROCESS, None), Stored.open(path)
    saved = stored.tensors
    if one_process is None:
        raise CheckpointMismatchError(
            f"a checkpoint must say how one process holds its model to be written as one file: {os.fspath(path)} "
            "does not. An earlier version saved it. Load it with MegatronStrategy and save it again."
        )
    shapes = {name: one.shape for name, one in saved.items()}
    where = stored.checkpoint.file(METADATA)
    check_names(one_process, metadata.get(OPTIMIZERS, ()), shapes, where)
    models = ClassTensors.saved(metadata.pop(HUGGING_FACE, {}))
    metadata = without_training(metadata) if weights_only else metadata
    target = _new_file(out)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        tensors = _TensorsOnDisk(Path(folder), one_process, saved)
        names = [name for name in saved if name.startswith(MODEL) or (not weights_only and _TRAINING.match(name))]
        for entry, full in read_one_by_one(stored, names):
            is_weight = entry.startswith((MODEL, CURRENT))
            name = entry.removeprefix(MODEL).removeprefix(CURRENT) if is_weight else _parameter_of(entry)
            converted = is_weight and dtype is not None and full.is_floating_point()
            tensors.add(entry, name, full.to(dtype) if converted else full)
        plain = _without_division(metadata, stored.checkpoint.header.layout.dp)
        aliases = one_process["aliases"]
        order = {name: aliases.get(name, name) for name in one_process["order"]}
        state = {name: tensors.get(f"{MODEL}{first}") for name, first in order.items()}
        plain["state_dict"] = to_foreign_names(models, state)
        if not weights_only and any(name.startswith(CURRENT) for name in names):
            current = {name: tensors.get(f"{CURRENT}{first}") for name, first in order.items()}
            plain["current_model_state"] = to_foreign_names(models, current)
        if not weights_only:
            plain["optimizer_states"] = [
                _numbered(index, optimizer, one_process["numbering"][index], tensors, models)
                for index, optimizer in enumerate(plain.pop(OPTIMIZERS, ()))
            ]
            _translate_precision(plain)
        unfinished = Path(folder) / target.name
        torch.save(plain, unfinished)
        os.replace(unfinished, target)
        return Written(tensors.num_tensors, tensors.num_bytes)


def _parameter_of(entry: str) -> str:
    """Return the parameter that an entry is a state of."""
    return _STATE.sub("", entry).rpartition(".")[0]


def _new_file(out: str | os.PathLike[str]) -> Path:
    target = Path(out)
    if target.is_dir():
        raise CheckpointMismatchError(
            f"a checkpoint is written as one file: {target} is a directory. What is in it would have to be removed "
            "first. Use the name of a file that is there or not."
        )
    return target


def without_training(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Lightning keeps with ``save_weights_only=True``."""
    return {key: value for key, value in metadata.items() if key not in _TRAINING_KEYS}


def read_one_by_one(stored: Stored, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Read full tensors, so that memory holds a gigabyte of them, or one that is larger.

    Args:
        stored: The checkpoint.
        names: The entries to read.
    """
    batch: list[str] = []
    size = 0
    for name in names:
        one = stored.tensors[name]
        num_bytes = prod(one.shape) * one.dtype.itemsize
        if batch and size + num_bytes > _BATCH:
            yield from stored.read_full(batch).items()
            batch, size = [], 0
        batch.append(name)
        size += num_bytes
    if batch:
        yield from stored.read_full(batch).items()


class _TensorsOnDisk:
    """Keep full tensors in files that memory is mapped to.

    Args:
        folder: Where the files are.
        one_process: What the checkpoint says of the model in one process: rows of the tensors that have more there,
            and shapes of those without elements.
        saved: All entries of the checkpoint.
    """

    def __init__(self, folder: Path, one_process: Mapping[str, Any], saved: Mapping[str, SavedTensor]) -> None:
        self._folder, self._saved = folder, saved
        self._padded_rows, self._empty = one_process["padded_rows"], one_process.get("empty", {})
        self._tensors: dict[str, Tensor] = {}
        self.num_bytes = 0

    @property
    def num_tensors(self) -> int:
        """Count the tensors."""
        return len(self._tensors)

    def add(self, entry: str, name: str, full: Tensor) -> None:
        """Keep a full tensor, with the padding that it has in one process.

        Args:
            entry: Its name in the checkpoint.
            name: The parameter that it is, or is a state of.
            full: The tensor.
        """
        shape, weights = list(full.shape), self._saved.get(f"{MODEL}{name}")
        if name in self._padded_rows and weights is not None and tuple(shape) == weights.shape:
            shape[0] = self._padded_rows[name]
        kept = full
        if full.dim():
            file = str(self._folder / f"{len(self._tensors)}.tensor")
            kept = torch.from_file(file, shared=True, size=prod(shape), dtype=full.dtype).view(shape)
            kept[: full.shape[0]].copy_(full)
        self._tensors[entry] = kept
        self.num_bytes += kept.nbytes

    def get(self, entry: str) -> Tensor:
        """Return a tensor; nothing is stored of one without elements."""
        shape = self._empty.get(entry.removeprefix(MODEL).removeprefix(CURRENT), (0,))
        return self._tensors[entry] if entry in self._tensors else torch.empty(shape)

    def states_of(self, prefix: str) -> Iterator[tuple[str, str, Tensor]]:
        """List (parameter, key, tensor) of an optimizer's states."""
        for entry, tensor in self._tensors.items():
            if entry.startswith(prefix):
                name, _, key = entry.removeprefix(prefix).rpartition(".")
                yield name, key, tensor


def _numbered(
    index: int,
    optimizer: Mapping[str, Any],
    numbering: list[list[str]] | str,
    tensors: _TensorsOnDisk,
    models: Sequence[ClassTensors],
) -> dict[str, Any]:
    """Return an optimizer's state dict as torch has it, where parameters are numbers."""
    if isinstance(numbering, str):
        raise UnsupportedError(
            f"{numbering} Until then, write the weights alone (--weights-only): they do not depend on the order."
        )
    # Parameters that are one in the class of a model have the place of the first.
    groups = [list(dict.fromkeys(class_name_in(models, name) for name in names)) for names in numbering]
    number_of: dict[str, int] = {}
    for name in (name for names in groups for name in names):
        if name in number_of:
            raise UnsupportedError(
                f"parameters that are one in the class of a Hugging Face model must be in one group of an optimizer: "
                f"those of {name!r} are in several. One process has one group for all. Write the weights alone "
                "(--weights-only)."
            )
        number_of[name] = len(number_of)
    by_key: dict[str, dict[str, Any]] = {}
    for name, key, tensor in tensors.states_of(f"optimizer.{index}.state."):
        by_key.setdefault(key, {})[name] = tensor
    for name, plain in optimizer["values"].items():
        for key, value in plain.items():
            by_key.setdefault(key, {})[name] = value
    state: dict[int, dict[str, Any]] = {}
    for key, states in by_key.items():
        for name, value in class_states(models, key, states).items():
            state.setdefault(number_of[name], {})[key] = value
    param_groups = [
        {**group["hyperparameters"], "params": [number_of[name] for name in names]}
        for group, names in zip(optimizer["groups"], groups, strict=True)
    ]
    return {"state": dict(sorted(state.items())), "param_groups": param_groups}


def _without_division(metadata: Mapping[str, Any], dp: int) -> dict[str, Any]:
    """Leave out the dataloader states of one of several data-parallel ranks: they are not those of one process."""
    plain = dict(metadata)
    loops = {key: dict(value) for key, value in metadata.get("loops", {}).items()}
    fit = dict(loops.get("fit_loop", {}).get("state_dict", {}))
    if dp > 1 and any(fit.get("combined_loader", ())):
        del fit["combined_loader"]
        loops["fit_loop"]["state_dict"] = fit
        plain["loops"] = loops
    return plain


def _translate_precision(plain: dict[str, Any]) -> None:
    """Let Lightning's own mixed precision go on with the loss scale."""
    scale = plain.pop("MegatronPrecision", {}).get("loss_scale")
    if scale is not None:
        plain["MixedPrecision"] = {
            "scale": scale["scale"],
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "_growth_tracker": scale["clean_steps"],
        }
