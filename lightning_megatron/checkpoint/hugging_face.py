"""Hugging Face folders made of checkpoints, and checkpoints made of them, one tensor in memory at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint.consolidate import HUGGING_FACE, MODEL, ONE_PROCESS, Written, read_one_by_one
from lightning_megatron.checkpoint.header import Header
from lightning_megatron.checkpoint.load import load_metadata
from lightning_megatron.checkpoint.own_code import OwnCodeModel
from lightning_megatron.checkpoint.rewrite import write_checkpoint
from lightning_megatron.checkpoint.stored import Stored
from lightning_megatron.checkpoint.verify import verify_checkpoint
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.settings import shown
from lightning_megatron.swap.export import MAX_FILE_BYTES, export_adapter, export_folder
from lightning_megatron.swap.families import Family, family_of
from lightning_megatron.swap.load import full_tensors
from lightning_megatron.swap.low_rank import Adapter, is_factor, merged, plain_name
from lightning_megatron.swap.mapping import TensorMap
from lightning_megatron.swap.own_code import OWN_CODE, described, own_code_models
from lightning_megatron.swap.replaced import replaced_models
from lightning_megatron.swap.safetensors_folder import SafetensorsFolder


def describe_models(module: nn.Module, one_process: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return class, configuration and adapter of every Hugging Face model inside a module, by name.

    Args:
        module: The module.
        one_process: Names of the tensors that one process would have.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, part in replaced_models(module):
        config: Any = part.config
        found[name] = {"architecture": part.family.architecture, "config": config.to_dict()}
        if part.adapter is not None:
            found[name]["adapter"] = asdict(part.adapter)
    for name, model in own_code_models(module):
        found[name] = described(name, model, one_process["order"], one_process["aliases"])
    return found


@dataclass(frozen=True)
class SavedModel:
    """Read a Hugging Face model of a checkpoint that computed with layers of this package.

    Args:
        path: The checkpoint.
        prefix: What the names of its entries begin with.
        family: How its tensors are named and cut.
        config: Its configuration.
        adapter: Its adapter, if it has one.
    """

    path: str | os.PathLike[str]
    prefix: str
    family: Family
    config: Mapping[str, Any]
    adapter: Adapter | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str], name: str, record: Mapping[str, Any]) -> SavedModel:
        """Return a model of a checkpoint.

        Args:
            path: The checkpoint.
            name: The model in the LightningModule.
            record: What the checkpoint records of it.
        """
        family, adapter = family_of(record["architecture"]), record.get("adapter")
        prefix = f"{MODEL}{name}." if name else MODEL
        return cls(path, prefix, family, record["config"], None if adapter is None else Adapter(**adapter))

    def adapter_tensors(self) -> dict[str, Tensor]:
        """Read the full tensors that belong to the adapter, by the names that they have in the model's tree."""
        return {} if self.adapter is None else dict(self._read(self.adapter.tensors_at_home(self._table)))

    def merged_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Read the full tensors of the model one by one, by their names in its class, with the adapter merged."""
        if self.adapter is None:
            return self._read()
        maps = self.adapter.maps_at_home(self._table)
        factors = dict(self._read({factor.target for one in maps for factor in (one.a, one.b)}))
        return merged(self._read(), factors, maps, self.adapter)

    @property
    def _table(self) -> tuple[TensorMap, ...]:
        return self.family.at_home(self.family.config(self.config))

    def _read(self, only: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        stored = Stored.open(self.path)
        name_of = {entry: self._name(entry) for entry in stored.tensors if entry.startswith(self.prefix)}
        names = [entry for entry, name in name_of.items() if only is None or name in only]
        return ((name_of[entry], full) for entry, full in read_one_by_one(stored, names))

    def _name(self, entry: str) -> str:
        """Return the name that a tensor has in the class, or a factor in the layers of peft."""
        name = entry.removeprefix(self.prefix)
        return name if is_factor(name) else plain_name(name)


def find_model(
    path: str | os.PathLike[str], name: str | None = None, unsafe: bool = False
) -> SavedModel | OwnCodeModel:
    """Return a Hugging Face model of a checkpoint.

    Args:
        path: The checkpoint.
        name: The model in the LightningModule; None if there is one.
        unsafe: Unpickle whatever the checkpoint holds beside tensors.

    Raises:
        CheckpointMismatchError: If there is no complete checkpoint, or it has no such model.
        UnsupportedError: If the model computes with its own code, and peft has wrapped its layers.
    """
    metadata = load_metadata(path, weights_only=not unsafe)
    name, record = _chosen(metadata.get(HUGGING_FACE) or {}, name, path)
    if OWN_CODE in record:
        return OwnCodeModel.of(path, record, metadata.get(ONE_PROCESS) or {})
    return SavedModel.of(path, name, record)


def export_model(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    name: str | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    unsafe: bool = False,
    merge: bool = False,
) -> None:
    """Write a model of a checkpoint as a folder that ``from_pretrained`` reads, or its adapter as one for peft.

    Args:
        path: A checkpoint of this library, saved by any layout.
        out: The folder; it must not have weights yet.
        name: The model in the LightningModule; None if there is one.
        dtype: Of the weights; None keeps what was saved, full precision under mixed precision.
        max_file_bytes: A file ends before the tensor that would exceed this (bytes).
        unsafe: Unpickle whatever the checkpoint holds beside tensors.
        merge: Write a model with the updates of its adapter added to its weights, and not the adapter.

    Raises:
        CheckpointMismatchError: If there is no complete checkpoint, or it has no such model.
        CorruptDataError: If it is damaged, naming the file.
        UnsupportedError: If ``out`` has weights, or there is no adapter to merge.
    """
    verify_checkpoint(path)
    saved = find_model(path, name, unsafe)
    if merge and (isinstance(saved, OwnCodeModel) or saved.adapter is None):
        raise UnsupportedError(
            f"only an adapter can be merged: the model in {os.fspath(path)} has none. Its weights are what was "
            "trained. Leave merge out."
        )
    if isinstance(saved, OwnCodeModel):
        saved.export(out, max_file_bytes, dtype)
    elif saved.adapter is not None and not merge:
        export_adapter(saved.adapter_tensors().items(), saved.family, saved.config, saved.adapter, out, dtype)
    else:
        export_folder(saved.merged_tensors(), saved.family, saved.config, out, max_file_bytes, dtype, at_home=True)


def import_model(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    name: str = "model",
    dtype: torch.dtype | None = None,
    num_files: int = 1,
) -> Written:
    """Write the weights of a local Hugging Face folder as a checkpoint that every layout loads.

    It is one without optimizers: validate, test and predict take it as their ``ckpt_path``.

    Args:
        folder: A folder of safetensors files.
        out: The checkpoint; what is there is replaced when it is complete.
        name: Attribute of the LightningModule that holds the model.
        dtype: Of the weights; None keeps that of the files.
        num_files: Files of tensors (files).

    Raises:
        CheckpointMismatchError: If files or tensors are missing or left over.
        UnsupportedError: If the family is not known, or asks for something that we lack.
    """
    source = SafetensorsFolder(folder)
    family = family_of(_architecture(source))
    config = family.config(source.config)
    prefix = f"{MODEL}{name}."
    own = full_tensors(source, family, config, dtype or source.dtype, family.at_home(config))
    tensors = ((f"{prefix}{key}", full) for key, full in own)
    metadata = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": version("lightning"),
        HUGGING_FACE: {name: {"architecture": family.architecture, "config": source.config}},
    }
    header = Header(ParallelLayout(1), torch.__version__, {}, 0, 0, round(time.time(), 3))
    return write_checkpoint(out, num_files, tensors, {}, metadata, header)


def _architecture(source: SafetensorsFolder) -> str:
    classes, kind = source.config.get("architectures") or [], source.config.get("model_type") or ""
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in (*classes, kind)):
        raise CheckpointMismatchError(
            f"architectures of a configuration must be a list of names, and model_type a name: they are "
            f"{shown(classes)} and {shown(kind)} in {source.path}. They say what the tensors mean. Correct config.json."
        )
    return next(iter(classes), kind)


def _chosen(models: Mapping[str, Any], name: str | None, path: str | os.PathLike[str]) -> tuple[str, Any]:
    known = ", ".join(repr(one) for one in models) or "none"
    if name is None and len(models) == 1:
        return next(iter(models.items()))
    if name is None or name not in models:
        what = "it has" if name is None else f"{name!r} is none of them:"
        raise CheckpointMismatchError(
            f"a model that is exported must be one of Hugging Face's in the checkpoint: {os.fspath(path)}: {what} "
            f"{known}. Others have no form there. Name one of those that are there."
        )
    return name, models[name]
