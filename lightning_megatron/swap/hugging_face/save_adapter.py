"""Saving of a peft adapter around a model that is sharded over ranks."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from lightning_megatron.swap.hugging_face.save_pretrained import (
    check_arguments,
    mesh_of,
    write_together,
)
from lightning_megatron.swap.tensors.low_rank import is_factor, plain_name
from lightning_megatron.swap.weights.export import ADAPTER_WEIGHTS, export_adapter
from lightning_megatron.swap.weights.safetensors_writer import write_file

#: peft's default name of an adapter, whose files are in the folder itself.
_DEFAULT = "default"


def save_adapter(wrapper: Any, save_directory: str | os.PathLike[str], **others: Any) -> None:
    """Write the full adapter as a folder for ``PeftModel.from_pretrained``.

    The files equal those of peft's method for the same weights. If every rank has the full model,
    peft's method runs.

    Communication: one gather of names, then one message for each part of a tensor, over all ranks
    on the CPU.
    """
    model = wrapper.get_base_model()
    mesh = mesh_of(wrapper)
    if isinstance(model, ReplacedModel):
        check_arguments(others)
        _save_replaced(model, Path(save_directory))
    elif mesh is None:
        type(wrapper).save_pretrained(wrapper, save_directory, **others)
    else:
        check_arguments(others)
        _save_own_code(wrapper, Path(save_directory), mesh)


def _save_replaced(model: ReplacedModel, folder: Path) -> None:
    adapter = model.adapter
    family = model.family
    config = model.config.to_dict()  # type: ignore[operator,union-attr]
    assert adapter is not None, "peft has put an adapter into the model"
    model.body.wait_for_parameters()
    class_tensors = adapter.class_tensors(family.class_tensors(family.config(config)))
    held = {
        n if is_factor(n) else family.present_name(plain_name(n)): parameter
        for n, parameter in model.named_parameters()
    }

    def write(full: Iterator[tuple[str, Tensor]], _: Mapping[str, tuple[int, ...]]) -> None:
        export_adapter(full, family, config, adapter, _folder_of(adapter.name, folder))

    write_together(
        {name: parameter for name, parameter in held.items() if name in class_tensors},
        model.mesh,
        write,
    )


def _save_own_code(wrapper: Any, folder: Path, mesh: ParallelMesh) -> None:
    for name, config in wrapper.peft_config.items():
        if config.is_prompt_learning:
            raise UnsupportedError(
                "save_pretrained writes only adapters with tensors in layers, because each rank "
                f"holds a part of the model: {name!r} is of the type {config.peft_type}. Save a "
                "checkpoint, and write a file for one process with `lightning-megatron checkpoint "
                "consolidate`."
            )
    library = import_extra("peft.utils.save_and_load", "lora")
    state = wrapper.state_dict(keep_vars=True)
    for name in wrapper.peft_config:
        here = library.get_peft_model_state_dict(wrapper, state_dict=state, adapter_name=name)
        write_together(here, mesh, partial(_write, wrapper, here, name, folder))


def _write(
    wrapper: Any,
    here: Mapping[str, Tensor],
    name: str,
    folder: Path,
    full: Iterator[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Write one adapter; peft writes the files other than the tensors."""
    out = _folder_of(name, folder)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".adapter.", dir=out) as unfinished:
        written = _folder_of(name, Path(unfinished))
        # With a state dict as argument, peft does not request that of the full model.
        settings = {"selected_adapters": [name], "state_dict": wrapper.state_dict()}
        type(wrapper).save_pretrained(wrapper, unfinished, **settings)
        (written / ADAPTER_WEIGHTS).unlink()
        write_file(written, full, shapes, ADAPTER_WEIGHTS)
        for file in written.iterdir():
            shutil.move(file, out / file.name)


def _folder_of(name: str, folder: Path) -> Path:
    return folder if name == _DEFAULT else folder / name
