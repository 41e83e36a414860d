"""Conversion between checkpoints and Hugging Face folders, with few tensors in memory at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint.consolidate import (
    HUGGING_FACE,
    MODEL,
    ONE_PROCESS,
    WrittenSize,
    read_one_by_one,
    write_checkpoint,
)
from lightning_megatron.checkpoint.header import Header
from lightning_megatron.checkpoint.load import load_metadata
from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint, verify_checkpoint
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.hub import TOKENIZER, tokenizer_files
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.hugging_face_folder import CONFIG
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.settings import coerced, join_or, shown
from lightning_megatron.swap.families import Family, exported_form, family_of
from lightning_megatron.swap.hugging_face.own_code import (
    OWN_CODE,
    checkpoint_record,
    own_code_models,
)
from lightning_megatron.swap.hugging_face.replaced_model import replaced_models
from lightning_megatron.swap.tensors.low_rank import Adapter, is_factor, merge_updates, plain_name
from lightning_megatron.swap.tensors.mapping import TensorMap, named
from lightning_megatron.swap.weights.export import (
    MAX_FILE_BYTES,
    export_adapter,
    export_as_it_is,
    export_folder,
)
from lightning_megatron.swap.weights.file_format import FileFormat, block
from lightning_megatron.swap.weights.load import full_tensors
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder


def describe_models(module: nn.Module, one_process: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Describe every Hugging Face model inside a module: its class, configuration and adapter.

    Returns:
        Record of each model for the metadata of a checkpoint, by name of the model
    """
    records: dict[str, dict[str, Any]] = {}
    for name, part in replaced_models(module):
        config: Any = part.config
        records[name] = {"architecture": part.family.architecture, "config": config.to_dict()}
        if part.adapter is not None:
            records[name]["adapter"] = asdict(part.adapter)
    for name, model in own_code_models(module):
        records[name] = checkpoint_record(name, model, one_process["order"], one_process["aliases"])
    return records


@dataclass(frozen=True)
class SavedModel:
    """Model of a checkpoint that has the layers of this package, and a Hugging Face class.

    Args:
        gpt: Configuration of a ``GPT``, whose tensors have its own names; None for a Hugging Face
            model whose layers were replaced.
    """

    stored: OpenCheckpoint
    prefix: str
    family: Family
    config: Mapping[str, Any]
    adapter: Adapter | None = None
    gpt: GPTConfig | None = None

    @classmethod
    def of(cls, stored: OpenCheckpoint, name: str, record: Mapping[str, Any]) -> SavedModel:
        """Return a model of a checkpoint."""
        adapter = record.get("adapter")
        adapter = None if adapter is None else Adapter(**adapter)
        prefix = f"{MODEL}{name}." if name else MODEL
        return cls(stored, prefix, family_of(record["architecture"]), record["config"], adapter)

    def export(
        self,
        out: str | os.PathLike[str],
        max_file_bytes: int,
        dtype: torch.dtype | None,
        merge: bool,
    ) -> None:
        """Write the model as a folder that ``from_pretrained`` reads, or its adapter for peft."""
        if self.adapter is None or merge:
            tensors = self.merged_tensors()
            table = self._table
            export_folder(tensors, self.family, self.config, out, max_file_bytes, dtype, table)
            return
        factors = self._read(self.adapter.class_tensors(self._table))
        export_adapter(factors, self.family, self.config, self.adapter, out, dtype)

    def merged_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors with the adapter merged, by the names in the model."""
        if self.adapter is None:
            return self._read()
        maps = self.adapter.class_maps(self._table)
        names = {factor.target for tensor_map in maps for factor in (tensor_map.a, tensor_map.b)}
        return merge_updates(self._read(), dict(self._read(names)), maps, self.adapter)

    @property
    def _table(self) -> tuple[TensorMap, ...]:
        if self.gpt is not None:
            return self.family.tensors(self.gpt)
        return self.family.class_tensors(self.family.config(self.config))

    def _read(self, only: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by their names in the model's class, or of an adapter's factor in peft."""
        name_of = {}
        for entry in self.stored.tensors:
            if entry.startswith(self.prefix):
                name = entry.removeprefix(self.prefix)
                name = name if is_factor(name) else plain_name(name)
                if only is None or name in only:
                    name_of[entry] = name
        return ((name_of[entry], full) for entry, full in read_one_by_one(self.stored, name_of))


@dataclass(frozen=True)
class SavedOwnCodeModel:
    """Hugging Face model of a checkpoint that was not replaced, with the tensor names of its class.

    Args:
        empty: Shapes of the tensors without elements, which are not stored, by entry.
        form: Conversion between the tensors of the model and of its files; None if they are equal.
    """

    stored: OpenCheckpoint
    architecture: str
    config: Mapping[str, Any]
    entries: Mapping[str, str]
    empty: Mapping[str, list[int]]
    form: FileFormat | None

    @classmethod
    def of(
        cls, stored: OpenCheckpoint, record: Mapping[str, Any], one_process: Mapping[str, Any]
    ) -> SavedOwnCodeModel:
        """Return a model of a checkpoint."""
        name = record["architecture"]
        config = record["config"]
        names = record[OWN_CODE]
        entries = {key: f"{MODEL}{entry}" for key, entry in names["tensors"].items()}
        adapted = [key for key in entries if is_factor(key) or plain_name(key) != key]
        if adapted:
            raise UnsupportedError(
                "a model with its own code must be written without an adapter: peft has wrapped "
                f"layers of this {name} ({named(adapted)}), and files of the class have no place "
                "for their tensors. Call save_pretrained of the PeftModel on all ranks, or let "
                "`lightning-megatron checkpoint consolidate` write a file for one process."
            )
        empty = {f"{MODEL}{key}": shape for key, shape in one_process.get("empty", {}).items()}
        missing = set(entries.values()) - stored.tensors.keys() - empty.keys()
        if missing:
            raise CheckpointMismatchError(
                f"a checkpoint must have all tensors of {name}: {named(missing)} missing in "
                f"{stored.checkpoint.path}. Hugging Face would initialise them at random. Save a "
                "checkpoint with all weights."
            )
        form = FileFormat.of_class(name, config) if names["has_other_format"] else None
        return cls(stored, name, config, entries, empty, form)

    def export(
        self, out: str | os.PathLike[str], max_file_bytes: int, dtype: torch.dtype | None
    ) -> None:
        """Write the model as a folder that ``from_pretrained`` reads."""
        tensors = self.tensors()
        name = self.architecture
        export_as_it_is(tensors, self.form, self.config, name, out, max_file_bytes, dtype)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors with their names in the model, one block after the other."""
        name_of = {entry: name for name, entry in self.entries.items()}
        for entry, shape in self.empty.items():
            if entry in name_of:
                yield name_of.pop(entry), torch.empty(shape)
        entries = sorted(name_of, key=lambda entry: block(name_of[entry]))
        for entry, full in read_one_by_one(self.stored, entries):
            yield name_of[entry], full

    def gap(self, folder: str) -> float:
        """Return the largest difference between a folder's tensors and those of the checkpoint.

        Returns:
            Largest difference, relative to the largest element of the tensor; infinity if tensors
            are missing, unexpected or of another shape
        """
        library: Any = import_extra("transformers", "hf")
        kind = getattr(library, self.architecture, None)
        if kind is None:
            raise UnsupportedError(
                f"--verify needs the class of the model: {self.architecture!r} is not in "
                f"transformers {library.__version__}. Leave --verify out."
            )
        model, report = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
        state = model.state_dict()
        largest_gap = 0.0
        for name, full in self.tensors():
            loaded = state.get(name)
            if any(report.values()) or loaded is None or loaded.shape != full.shape:
                return float("inf")
            if full.numel():
                largest = full.abs().max().item() or 1.0
                largest_gap = max(
                    largest_gap, (loaded.to(full.dtype) - full).abs().max().item() / largest
                )
        return largest_gap


def find_model(
    path: str | os.PathLike[str], name: str | None = None, unsafe: bool = False
) -> SavedModel | SavedOwnCodeModel:
    """Return the model of a checkpoint that becomes a Hugging Face folder.

    It is a Hugging Face model, or the ``GPT`` of a ``CausalLM``.
    """
    stored = OpenCheckpoint.open(path)
    metadata = load_metadata(stored, weights_only=not unsafe)
    config = (metadata.get("hyper_parameters") or {}).get("config")
    if HUGGING_FACE not in metadata and isinstance(config, Mapping):
        gpt: GPTConfig = coerced("config", config, GPTConfig)
        family, settings = exported_form(gpt)
        return SavedModel(stored, f"{MODEL}{name or 'model'}.", family, settings, gpt=gpt)
    name, record = _chosen(metadata.get(HUGGING_FACE) or {}, name, path)
    if OWN_CODE in record:
        return SavedOwnCodeModel.of(stored, record, metadata.get(ONE_PROCESS) or {})
    return SavedModel.of(stored, name, record)


def export_model(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    name: str | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    unsafe: bool = False,
    merge: bool = False,
) -> None:
    """Write a model of a checkpoint as a folder for ``from_pretrained``, or its adapter for peft.

    Args:
        dtype: Dtype of the weights; None keeps the saved dtype, which is full precision under mixed
            precision.
        max_file_bytes: Maximum size of a file, unless it has a single larger tensor (bytes).
        merge: Whether to write the whole model with its adapter merged, instead of the adapter.
    """
    verify_checkpoint(path)
    saved = find_model(path, name, unsafe)
    if merge and (isinstance(saved, SavedOwnCodeModel) or saved.adapter is None):
        raise UnsupportedError(
            f"only an adapter can be merged: the model in {os.fspath(path)} has no adapter. Leave "
            "merge out."
        )
    if isinstance(saved, SavedModel):
        saved.export(out, max_file_bytes, dtype, merge)
    else:
        saved.export(out, max_file_bytes, dtype)


def import_model(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    name: str = "model",
    dtype: torch.dtype | None = None,
    num_files: int = 1,
) -> WrittenSize:
    """Write the weights of a local Hugging Face folder as a checkpoint.

    The checkpoint has no optimizer: validate, test and predict accept it as ``ckpt_path``. With its
    configuration and the files of the tokenizer, it needs the folder no more.
    """
    source = SafetensorsFolder(folder)
    family = family_of(_architecture(source))
    config = family.config(source.config)
    prefix = f"{MODEL}{name}."
    named_tensors = full_tensors(
        source, family, config, dtype or source.dtype, family.class_tensors(config)
    )
    tensors = ((f"{prefix}{key}", full) for key, full in named_tensors)
    metadata = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": version("lightning"),
        HUGGING_FACE: {name: {"architecture": family.architecture, "config": source.config}},
        # As in a checkpoint of HuggingFaceCausalLM: commands read both. Its model is named so.
        "hyper_parameters": {"path": os.fspath(folder)} if name == "model" else {},
        TOKENIZER: {**tokenizer_files(folder), CONFIG: Path(folder, CONFIG).read_bytes()},
    }
    header = Header(ParallelLayout(1), torch.__version__, {}, 0, 0, round(time.time(), 3))
    return write_checkpoint(out, num_files, tensors, {}, metadata, header)


def _architecture(source: SafetensorsFolder) -> str:
    classes = source.config.get("architectures") or [source.config["model_type"]]
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise CheckpointMismatchError(
            "architectures of a configuration must be a list of names: they are "
            f"{shown(classes)} in {source.path}. They determine the meaning of the tensors. "
            "Correct config.json."
        )
    name: str = classes[0]
    return name


def _chosen(
    models: Mapping[str, Any], name: str | None, path: str | os.PathLike[str]
) -> tuple[str, Any]:
    if not models:
        raise CheckpointMismatchError(
            f"a checkpoint that is exported must hold a Hugging Face model or a CausalLM: "
            f"{os.fspath(path)} holds none. Other models have no form that from_pretrained reads. "
            "Use `lightning-megatron checkpoint consolidate` for one file with all tensors."
        )
    if name is None and len(models) == 1:
        return next(iter(models.items()))
    if name is None or name not in models:
        what = "none is named" if name is None else f"{name!r} is not among them"
        raise CheckpointMismatchError(
            "one of the Hugging Face models of a checkpoint must be chosen for the export: "
            f"{os.fspath(path)} holds {len(models)}, and {what}. A folder has one model. Choose "
            f"{join_or([repr(model) for model in models])} with --name."
        )
    return name, models[name]
