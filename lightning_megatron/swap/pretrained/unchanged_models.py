"""Checks that user code has not changed a Hugging Face model since its class built it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.swap.families import Family
from lightning_megatron.swap.hugging_face.peft_layers import is_peft_module
from lightning_megatron.swap.pretrained.without_weights import without_weights
from lightning_megatron.swap.tensors.low_rank import plain_name

#: Attributes that may differ, because they configure training or calls, or follow from the shapes
#: of weights.
_IGNORED_ATTRIBUTES = frozenset(
    """
    training gradient_checkpointing name_or_path num_embeddings out_features vocab_size
    is_hf_initialized is_gradient_checkpointing is_loaded_in_4bit is_loaded_in_8bit
    """.split()
)
#: Fields of this package's configurations that follow from the shapes of weights.
_SHAPE_FIELDS = frozenset({"vocab_size", "num_labels"})


@dataclass(frozen=True)
class ModuleDescription:
    """Class, settings and computed tables of a module.

    Args:
        settings: Attributes that are numbers, booleans or strings, by name.
        tables: Non-persistent buffers, such as the frequencies of rotary embeddings, by name.
    """

    kind: type[nn.Module]
    settings: Mapping[str, Any]
    tables: Mapping[str, Tensor]


def describe_modules(model: nn.Module) -> dict[str, ModuleDescription]:
    """Describe every module of a model, by name."""
    described = {}
    for name, module in model.named_modules():
        tables = {key: table.clone() for key, table in _tables(module)}
        described[name] = ModuleDescription(type(module), dict(_settings(module)), tables)
    return described


def describe_built(model: Any) -> dict[str, ModuleDescription]:
    """Describe every module that a model's class builds from its configuration."""
    config = deepcopy(model.config)
    config.pad_token_id = built_settings(model)["pad_token_id"]
    return describe_modules(without_weights(lambda: type(model)(config)))


def built_settings(model: Any) -> dict[str, Any]:
    """Return a model's configuration with the padding token of its embedding.

    Many scripts set a padding token in the configuration after the model was built. The padding
    token of the embedding then stays the former one.
    """
    settings: dict[str, Any] = model.config.to_dict()
    embedding = model.get_input_embeddings()
    inner = getattr(embedding, "base_layer", embedding)
    return settings | {"pad_token_id": getattr(inner, "padding_idx", model.config.pad_token_id)}


def check_settings(
    name: str, family: Family, built: Mapping[str, Any], current: Mapping[str, Any]
) -> None:
    """Refuse a configuration that was changed after the model was built."""
    # Both get the padding token of the embedding, so that a new padding token is not a change.
    before, after = (
        family.config({**values, "pad_token_id": current["pad_token_id"]})
        for values in (built, current)
    )
    changed = [
        field.name
        for field in fields(before)
        if getattr(before, field.name) != getattr(after, field.name)
    ]
    if set(changed) - _SHAPE_FIELDS:
        keys = [key for key in current if current[key] != built.get(key) and key != "pad_token_id"]
        what = f"{', '.join(keys)} of the configuration of {name!r} changed after it had been built"
        _refuse(what, "Pass the final values to from_pretrained or from_config")


def check_tie(name: str, model: Any, *, is_tied: bool) -> None:
    """Refuse an output head whose tie to the embedding contradicts the configuration."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if head is None or is_peft_module(head) or is_peft_module(embedding):
        return
    if (head.weight is embedding.weight) != is_tied:
        is_or_not = "is not" if is_tied else "is"
        what = f"the weight of the output head of {name!r} {is_or_not} that of the embedding"
        _refuse(
            what, f"Pass tie_word_embeddings={not is_tied} to from_pretrained or the configuration"
        )


def check_untouched(name: str, model: nn.Module, parts: Mapping[str, ModuleDescription]) -> None:
    """Refuse a model with changed modules or settings, which the replacement would ignore."""
    _check_shared(name, model, parts)
    for path, module in model.named_modules():
        part = parts.get(plain_name(f"{path}.weight").removesuffix(".weight"))
        if is_peft_module(module) or part is None:
            continue
        where = f"{name}.{path}" if path else name
        if "forward" in vars(module):
            _refuse(f"{where!r} has a forward method of its own", "Keep the method of its class")
        if not isinstance(module, part.kind):
            expected = part.kind.__name__
            _refuse(
                f"{where!r} is a {type(module).__name__}, but its class builds a {expected}",
                "Keep the module of the class",
            )
        for key, value in _settings(module):
            if key in part.settings and part.settings[key] != value:
                what = f"{key} of {where!r} is {value!r}, but was built as {part.settings[key]!r}"
                _refuse(what, "Pass this value to from_pretrained or the configuration")
        for key, table in _tables(module):
            if key in part.tables and not _is_same(table, part.tables[key]):
                what = f"the buffer {key} of {where!r} has other values than the class computes"
                _refuse(
                    what,
                    "Pass the settings for these values to from_pretrained or the configuration",
                )


def _check_shared(name: str, model: nn.Module, parts: Mapping[str, ModuleDescription]) -> None:
    first: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if path in parts and first.setdefault(id(module), path) != path:
            what = f"'{name}.{path}' is the module '{name}.{first[id(module)]}', too"
            _refuse(what, "Use a separate module at each place")


def _is_same(table: Tensor, built: Tensor) -> bool:
    """Return whether a table has its initial values, up to the rounding of conversions."""
    if table.shape != built.shape or not table.is_floating_point():
        return torch.equal(table, built.to(table.device))
    # The tolerance is the precision of bf16, the narrowest dtype of weights.
    return torch.allclose(table.double(), built.to(table.device).double(), rtol=2.0**-8, atol=0.0)


def _tables(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for key in sorted(module._non_persistent_buffers_set):
        table = module._buffers.get(key)
        if table is not None and not table.is_meta:
            yield key, table


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        if (
            isinstance(value, (bool, int, float, str))
            and not key.startswith("_")
            and key not in _IGNORED_ATTRIBUTES
        ):
            yield key, value


def _refuse(what: str, remedy: str) -> None:
    raise UnsupportedError(
        f"a Hugging Face model that is replaced must compute what its class does: {what}. The "
        "layers that replace it would not have this change, and would compute other values. "
        f"{remedy}, or keep the model's own code by tensor_parallel_plan={{'model': 'replicate'}}, "
        "with the name of the model."
    )
