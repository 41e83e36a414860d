"""Export of a model as a Hugging Face folder, with one full tensor in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.swap.families.family import Family, ModelConfig
from lightning_megatron.swap.families.layer_names import SETTINGS, is_training_only
from lightning_megatron.swap.tensors.low_rank import Adapter
from lightning_megatron.swap.tensors.mapping import TensorMap, named
from lightning_megatron.swap.tensors.packed import pack_for_files
from lightning_megatron.swap.weights.file_format import FileFormat
from lightning_megatron.swap.weights.safetensors_folder import CONFIG, INDEX
from lightning_megatron.swap.weights.safetensors_writer import TensorWriter, write_synced

#: File names of peft, and the prefix of tensor names in them.
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_PEFT_PREFIX = "base_model.model."
#: Hugging Face's default for the size of a file (bytes).
MAX_FILE_BYTES = 5 * 10**9


def _parts_of_files(
    full_tensors: Iterable[tuple[str, Tensor]],
    family: Family,
    config: ModelConfig,
    table: tuple[TensorMap, ...],
) -> Iterator[tuple[str, Tensor]]:
    """Convert full tensors to those of the table, one after the other."""
    known = {tensor.target: tensor for tensor in table}
    left = dict(known)
    for name, full in full_tensors:
        if family.is_alias(name, config) or is_training_only(name):
            continue
        if name not in left:
            problem = "given twice" if name in known else "unknown"
            raise CheckpointMismatchError(
                f"the tensors must match a {family.architecture} of this configuration: {name!r} "
                f"is {problem}. Give the parameters of the whole model."
            )
        tensor = left.pop(name)
        if tuple(full.shape) != tensor.shape:
            raise CheckpointMismatchError(
                f"a full tensor must have its shape without padding: {name!r} has "
                f"{tuple(full.shape)} instead of {tensor.shape}. Give full tensors of the same "
                "model."
            )
        yield from tensor.split(full.detach()).items()
        # Free this tensor before the next one is gathered.
        del full
    heads = {name for name, tensor in known.items() if _is_head(tensor, family)}
    # A model may be built without a head, and Hugging Face loads files without one.
    if left and left.keys() != heads:
        raise CheckpointMismatchError(
            f"the tensors must match a {family.architecture} of this configuration: {named(left)} "
            "missing. Hugging Face would initialise them at random. Give the parameters of the "
            "whole model."
        )


def _is_head(tensor: TensorMap, family: Family) -> bool:
    return all(family.is_head(source.name) for source in tensor.sources)


def export_folder(
    full_tensors: Iterable[tuple[str, Tensor]],
    family: Family,
    hf_config: Mapping[str, Any],
    folder: str | os.PathLike[str],
    max_file_bytes: int = MAX_FILE_BYTES,
    dtype: torch.dtype | None = None,
    table: tuple[TensorMap, ...] | None = None,
) -> None:
    """Write a model's configuration and weights as a folder for ``from_pretrained``.

    Files get their final names when all are complete. Tokenizer and generation settings are not
    written.

    Args:
        full_tensors: Names in the class's module tree and full values, without padding, in any
            order.
        dtype: Dtype of the floating-point weights, except those with a fixed dtype; None keeps the
            dtypes of ``full_tensors``.
        table: Table with the names of ``full_tensors`` as targets; None takes that of the class.
    """
    config = family.config(hf_config)
    table = family.class_tensors(config) if table is None else table
    sources = [(source.name, tensor.dtype) for tensor in table for source in tensor.sources]
    parts = _parts_of_files(full_tensors, family, config, table)
    packed = pack_for_files(parts, dict(sources), family.packed)
    kept = {name: fixed for name, fixed in sources if fixed is not None}
    names = {"model_type": family.model_type, "architectures": [family.architecture]}
    _write_folder(packed, {**hf_config, **names}, folder, max_file_bytes, dtype, kept)


def export_as_it_is(
    full_tensors: Iterable[tuple[str, Tensor]],
    form: FileFormat | None,
    hf_config: Mapping[str, Any],
    architecture: str,
    folder: str | os.PathLike[str],
    max_file_bytes: int = MAX_FILE_BYTES,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model whose tensors have their class's names as a folder for ``from_pretrained``.

    Args:
        full_tensors: Names and full values, without padding, one block after the other. A shared
            tensor has one name.
        form: Format of the files; None writes the tensors as they are.
    """
    tensors = full_tensors if form is None else form.tensors(full_tensors)
    config = {**hf_config, "architectures": [architecture]}
    _write_folder(tensors, config, folder, max_file_bytes, dtype)


def _write_folder(
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    folder: str | os.PathLike[str],
    max_file_bytes: int,
    dtype: torch.dtype | None,
    kept_dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Write weights, and the configuration with the most common dtype; then name the files."""
    target = Path(folder)
    present = sorted(
        path.name for pattern in ("*.safetensors", "*.bin", INDEX) for path in target.glob(pattern)
    )
    if present:
        raise UnsupportedError(
            f"a model is exported to a folder without weights: {target} has {named(present)}. "
            "Files of two models would be mixed. Give another folder, or remove them."
        )
    target.mkdir(parents=True, exist_ok=True)
    writer = TensorWriter(target, max_file_bytes)
    writer.write(tensors, dtype, kept_dtypes)
    # ``auto_map`` names code that is not in the folder, and this package's settings of training do
    # not belong to the model.
    left = ("torch_dtype", "auto_map", SETTINGS)
    kept = {
        name: value
        for name, value in config.items()
        if not name.startswith("_") and name not in left
    }
    most_common = writer.floating.most_common(1)
    kept["dtype"] = most_common[0][0] if most_common else torch.float32
    _write_json(target / CONFIG, kept)
    writer.publish()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True, default=_plain)
    write_synced(path, f"{text}\n".encode())


def export_adapter(
    full_tensors: Iterable[tuple[str, Tensor]],
    family: Family,
    hf_config: Mapping[str, Any],
    adapter: Adapter,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
) -> None:
    """Write an adapter as a folder for ``PeftModel.from_pretrained``.

    Args:
        full_tensors: Names and full values of all trained tensors, by the names of the class's
            module tree.
    """
    class_tensors = adapter.class_tensors(family.class_tensors(family.config(hf_config)))
    by_name = dict(full_tensors)
    if class_tensors.keys() != by_name.keys():
        raise CheckpointMismatchError(
            "an adapter must be written with all its tensors: "
            f"{named(class_tensors.keys() ^ by_name.keys())} missing or unknown. peft would "
            "initialise them at random. Give the tensors of the whole model."
        )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    parts = {target: tensor.split(by_name[target]) for target, (tensor, _) in class_tensors.items()}
    tensors = {
        f"{_PEFT_PREFIX}{name}": parts[target][name].to(dtype).contiguous()
        for target, (_, names) in class_tensors.items()
        for name in names
    }
    write_adapter(target / ADAPTER_WEIGHTS, tensors)
    _write_json(target / ADAPTER_CONFIG, {**adapter.config, "inference_mode": True})


def write_adapter(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors of an adapter, which peft reads from a single file."""
    library = import_extra("safetensors.torch", "hf")
    write_synced(path, library.save(tensors, {"format": "pt"}))


def _plain(value: Any) -> str:
    if not isinstance(value, torch.dtype):
        raise TypeError(
            f"a configuration must hold values of JSON, which has no {type(value).__name__}: "
            f"{value!r}."
        )
    return str(value).removeprefix("torch.")
