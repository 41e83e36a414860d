"""Methods of Hugging Face models and of peft's wrappers that a swap binds to the instances."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.low_rank import LowRankUpdates
from lightning_megatron.models.stage import named_layers
from lightning_megatron.swap.hugging_face.peft_layers import is_peft_module
from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from lightning_megatron.swap.hugging_face.save_pretrained import (
    check_arguments,
    mesh_of,
    save_as_it_is,
    write_together,
)
from lightning_megatron.swap.tensors.low_rank import is_factor, plain_name
from lightning_megatron.swap.weights.export import ADAPTER_WEIGHTS, export_adapter, write_adapter

#: Methods that search for peft's layers. A replaced model has no such layers, so the methods would
#: silently do nothing.
_PEFT_METHODS = tuple(
    """
    add_adapter add_weighted_adapter delete_adapter get_layer_status
    get_model_status load_adapter merge_adapter merge_and_unload push_to_hub
    set_adapter set_requires_grad unload unmerge_adapter
    """.split()
)
_COUNTS = "get_nb_trainable_parameters"
_BOUND = "base_model_prepare_inputs_for_generation"


def whole_counts(root: nn.Module) -> list[tuple[Any, tuple[int, int]]]:
    """Count the trained and all parameters of each wrapper of peft, before ranks divide them."""
    parts: list[Any] = [part for part in root.modules() if hasattr(part, _COUNTS)]
    return [(part, getattr(part, _COUNTS)()) for part in parts if is_peft_module(part)]


def _counted(counts: tuple[int, int]) -> tuple[int, int]:
    return counts


def bind_methods(
    root: nn.Module,
    own_code: Iterable[Any],
    counts: Iterable[tuple[Any, tuple[int, int]]] = (),
) -> None:
    """Bind methods that work on sharded weights to models and wrappers of peft.

    ``save_pretrained`` of a model that runs its own code, and of a wrapper, writes full tensors
    from all ranks. A wrapper around a replaced model keeps its configuration, ``generate``,
    ``disable_adapter`` and ``print_trainable_parameters``, which counts the parameters of all ranks
    when the run began; methods that change or merge adapters raise an UnsupportedError.

    Args:
        own_code: Models inside the root that run their own code.
        counts: Wrappers with their counts of :func:`whole_counts`.
    """
    wrappers: list[Any] = list(root.modules())
    for wrapper in wrappers:
        if is_peft_module(wrapper) and hasattr(wrapper, "get_base_model"):
            model = wrapper.get_base_model()
            vars(wrapper)["save_pretrained"] = partial(save_adapter, wrapper)
            if isinstance(model, ReplacedModel):
                if hasattr(wrapper, _BOUND):
                    # The bound method of the original model would keep that model alive with all
                    # weights.
                    setattr(wrapper, _BOUND, model.prepare_inputs_for_generation)
                kind = type(wrapper)
                refusals = {name: _refused(name) for name in _PEFT_METHODS}
                wrapper.__class__ = type(
                    kind.__name__, (kind,), {"disable_adapter": _disabled, **refusals}
                )
    for wrapper, count in counts:
        vars(wrapper)[_COUNTS] = partial(_counted, count)
    for model in own_code:
        vars(model)["save_pretrained"] = partial(save_as_it_is, model)


@contextmanager
def _disabled(wrapper: nn.Module) -> Iterator[None]:
    """Disable the adapter of a wrapped model inside the block."""
    saved = [
        name
        for part in wrapper.modules()
        if isinstance(part, ReplacedModel) and part.adapter
        for name in part.adapter.saved
    ]
    if saved:
        raise UnsupportedError(
            f"an adapter with modules_to_save cannot be switched off: {', '.join(saved)}. Their "
            "original weights are not kept. Leave modules_to_save out."
        )
    updates = [part for _, part in named_layers(wrapper) if isinstance(part, LowRankUpdates)]
    before = [part.is_enabled for part in updates]
    for part in updates:
        part.is_enabled = False
    try:
        yield
    finally:
        for part, was_enabled in zip(updates, before, strict=True):
            part.is_enabled = was_enabled


def _refused(name: str) -> Callable[..., Any]:
    def method(wrapper: Any, *_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            f"{name} needs the layers of peft, which a {type(wrapper).__name__} that is cut over "
            "ranks does not have. Save a checkpoint, and write the adapter or the merged model "
            "with `lightning-megatron convert`."
        )

    return method


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
        name if is_factor(name) else family.present_name(plain_name(name)): parameter
        for name, parameter in model.named_parameters()
    }
    trained = {name: parameter for name, parameter in held.items() if name in class_tensors}
    out = _folder_of(adapter.name, folder)
    write_together(
        trained, model.mesh, lambda full: export_adapter(full, family, config, adapter, out)
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
        write_adapter(written / ADAPTER_WEIGHTS, dict(full))
        for file in written.iterdir():
            shutil.move(file, out / file.name)


def _folder_of(name: str, folder: Path) -> Path:
    return folder if name == _DEFAULT else folder / name
