"""Hugging Face models that run their own code, and the names of their tensors in files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_megatron.models.stage import computed_by
from lightning_megatron.swap.weights.file_format import has_other_format

#: Key of a checkpoint's record of such a model, in addition to its class and configuration.
OWN_CODE = "own_code"


def own_code_models(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """List the outermost Hugging Face models that run their own code, by name."""
    taken: list[str] = []
    for name, part in root.named_modules():
        if any(name.startswith(prefix) for prefix in taken):
            continue
        is_replaced = computed_by(part) is not None
        is_own = not is_replaced and is_pretrained(part) and not holds_replaced(part)
        if is_replaced or is_own:
            taken.append(f"{name}." if name else "")
        if is_own:
            yield name, part


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module's class derives from Hugging Face's base class of models."""
    # Compare names, because importing the library takes time.
    origins = ((kind.__module__, kind.__name__) for kind in type(module).__mro__)
    return ("transformers.modeling_utils", "PreTrainedModel") in origins


def is_hugging_face(module: nn.Module) -> bool:
    """Return whether a module is a Hugging Face model, and not a part of one."""
    return type(module).__module__.startswith("transformers.") and hasattr(module, "can_generate")


def holds_replaced(model: nn.Module) -> bool:
    """Return whether this package's layers compute the model or a part of it."""
    return any(computed_by(part) is not None for part in model.modules())


def plain_config(model: Any) -> dict[str, Any]:
    """Return a model's configuration with all fields, in the form of ``config.json``."""
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return config


def checkpoint_record(
    name: str, model: Any, order: Sequence[str], aliases: Mapping[str, str]
) -> dict[str, Any]:
    """Return a checkpoint's record of a model that runs its own code.

    Args:
        order: Names of all tensors of the module in one process.
        aliases: Further names of tensors, with the first name of the same tensor.
    """
    prefix = f"{name}." if name else ""
    of_tensor = {
        key.removeprefix(prefix): aliases.get(key, key) for key in order if key.startswith(prefix)
    }
    kept = {key: of_tensor[key] for key in names_in_files(model, of_tensor)}
    record = {"tensors": kept, "has_other_format": has_other_format(model)}
    return {"architecture": type(model).__name__, "config": plain_config(model), OWN_CODE: record}


def names_in_files(model: Any, of_tensor: Mapping[str, Any]) -> list[str]:
    """Return Hugging Face's file names of tensors that have several names.

    Args:
        of_tensor: Identity (``id``) of each name's tensor.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    names: dict[Any, list[str]] = {}
    for name, tensor in of_tensor.items():
        if name not in ignored:
            names.setdefault(tensor, []).append(name)
    tied = [re.compile(pattern) for pattern in _tied_keys(model)]
    kept: set[str] = set()
    for shared in names.values():
        matched = {name for name in shared for pattern in tied if pattern.search(name)}
        free = set(shared) - matched if len(shared) > 1 else set(shared)
        kept |= free or {max(shared)}
    return [name for name in of_tensor if name in kept]


def _tied_keys(model: nn.Module) -> Iterable[str]:
    for name, part in model.named_modules():
        for key in getattr(part, "_tied_weights_keys", None) or ():
            yield f"{name}.{key}" if name else key
