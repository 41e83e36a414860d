"""Adapters of peft, as low-rank updates of the layers that replace a Hugging Face model's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.low_rank import LowRank, LowRankUpdates
from lightning_megatron.layers.replicated import ReplicatedLinear
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.gpt import GPT
from lightning_megatron.swap.families import Family
from lightning_megatron.swap.tensors.low_rank import FACTORS, Adapter, LowRankMap, plain_name
from lightning_megatron.swap.tensors.mapping import TensorsInMemory, named

#: Settings of LoraConfig with which an update is not just the product of two matrices.
_UNSUPPORTED = tuple(
    """
    alora_invocation_tokens arrow_config bias kasa_config layer_replication
    lora_bias monteclora_config trainable_token_indices use_bdlora use_dora
    use_qalora velora_config
    """.split()
)
_NO_EXPERTS = (
    "Experts and routers cannot be adapted: name the target_modules, such as ['q_proj', 'k_proj', "
    "'v_proj', 'o_proj'], because 'all-linear' includes experts"
)
_REMEDY_FOR_TARGETS = "Choose target_modules among the linear layers of its blocks"


def is_peft_module(module: Any) -> bool:
    """Return whether a module belongs to peft."""
    return type(module).__module__.partition(".")[0] == "peft"


def adapter_of(name: str, source: Any, family: Family) -> Adapter | None:
    """Return the adapter of a Hugging Face model; None if it has none."""
    layers, saved = _wrapped(source, family)
    if not layers and not saved:
        return None
    names = {key for layer in layers.values() for key in getattr(layer, "lora_A", ())}
    names |= {key for module in saved.values() for key in module.modules_to_save}
    if len(names) > 1:
        _refuse(name, f"it has the adapters {named(names)}", "Train one adapter at a time")
    config = next(iter(source.peft_config.values()))
    if getattr(config, "target_parameters", None):
        problem = f"its target_parameters has {named(map(str, config.target_parameters))}"
        _refuse(name, problem, f"Leave target_parameters out. {_NO_EXPERTS}")
    for field in _UNSUPPORTED:
        value = getattr(config, field, None)
        if value and value != "none":
            _refuse(name, f"its {field} is {value!r}", f"Leave {field} out")
    for module, layer in layers.items():
        # Compare names, because peft is an optional package.
        if (type(layer).__module__, type(layer).__name__) != ("peft.tuners.lora.layer", "Linear"):
            _refuse(
                name,
                f"{module!r} is a {type(layer).__name__}",
                "Adapt only linear layers, with LoraConfig",
            )
        _check_layer(name, module, layer, *names)
    _check_saved(name, source, family, saved)
    ends = (family.head, family.embedding)
    if family.config(source.config.to_dict()).tie_embeddings:
        for module in saved:
            if any(end.startswith(f"{module}.") for end in ends):
                _refuse(
                    name,
                    f"its modules_to_save has {module!r}, which is tied",
                    "Set tie_word_embeddings to false",
                )
    (adapter,) = names
    ranks = {module: layer.r[adapter] for module, layer in layers.items()}
    scales = {module: float(layer.scaling[adapter]) for module, layer in layers.items()}
    return Adapter(adapter, _as_plain(config, type(source)), ranks, scales, tuple(saved))


def updates_of(
    name: str, model: GPT | Encoder, source: Any, family: Family, adapter: Adapter
) -> list[Callable[[], None]]:
    """Return functions that add an adapter's updates to this rank's layers, with their values."""
    wrappers, _ = _wrapped(source, family)
    maps = adapter.maps(family.tensors(model.config))
    ends = {family.head, family.embedding}
    left = wrappers.keys() - {
        update.module for update in maps if f"{update.module}.weight" not in ends
    }
    if left:
        _refuse(name, f"{named(left)} cannot be adapted", _REMEDY_FOR_TARGETS)
    here: dict[str, Any] = dict(model.named_modules())
    updates: list[Callable[[], None]] = []
    for layer, group in groupby(maps, key=lambda update: update.layer):
        parts = tuple(group)
        base = here.get(layer)
        if base is None:
            continue
        if not isinstance(base, (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)):
            _refuse(name, f"{parts[0].module!r} cannot be adapted", _REMEDY_FOR_TARGETS)
        updates.append(partial(_add_updates, base, parts, wrappers, adapter, model.mesh))
    return updates


def _add_updates(
    base: Any,
    parts: Sequence[LowRankMap],
    wrappers: Mapping[str, Any],
    adapter: Adapter,
    mesh: ParallelMesh,
) -> None:
    base.low_rank = LowRankUpdates(
        {part.key: _update(base, part, wrappers[part.module], adapter, mesh) for part in parts}
    )


def is_input_hook(hook: Any) -> bool:
    """Return whether a hook makes inputs of recomputed blocks require gradients.

    transformers and peft each register one.
    """
    return getattr(hook, "__name__", "").startswith("make_inputs_require_grad")


def remove_input_hooks(source: nn.Module) -> None:
    """Remove hooks that make inputs of recomputed blocks require gradients."""
    for module in source.modules():
        for key, hook in list(module._forward_hooks.items()):
            if is_input_hook(hook):
                del module._forward_hooks[key]


def _update(
    base: Any, part: LowRankMap, wrapper: Any, adapter: Adapter, mesh: ParallelMesh
) -> LowRank:
    dropout = wrapper.lora_dropout[adapter.name]
    factors = {
        key: getattr(wrapper, attribute)[adapter.name].weight for key, attribute in FACTORS.items()
    }
    update = LowRank(
        base,
        part.rows,
        adapter.ranks[part.module],
        mesh,
        scale=adapter.scales[part.module],
        dropout=getattr(dropout, "p", 0.0),
    ).to(mesh.device, factors["a"].dtype)
    reader = TensorsInMemory(
        {f"{part.module}.{FACTORS[key]}.weight": tensor for key, tensor in factors.items()}
    )
    for key, tensor in (("a", part.a), ("b", part.b)):
        parameter = update.get_parameter(f"{key}.weight")
        for box, view in shard_spec_of(parameter).local_views(parameter.data):
            tensor.fill(view, box.offsets, box.sizes, reader)
        parameter.requires_grad_(factors[key].requires_grad)
    return update.train(dropout.training)


def _wrapped(source: nn.Module, family: Family) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return peft's wrappers of adapted modules and of modules to save, by the family's names."""
    layers = dict[str, Any]()
    saved = dict[str, Any]()
    inside = ""
    for path, module in source.named_modules():
        if is_peft_module(module) and not (inside and path.startswith(inside)):
            inside = f"{path}."
            is_saved = type(module).__name__ == "ModulesToSaveWrapper"
            wrappers = saved if is_saved else layers
            wrappers[family.present_name(f"{path}.weight").removesuffix(".weight")] = module
    return layers, saved


def _check_saved(name: str, source: nn.Module, family: Family, saved: Iterable[str]) -> None:
    """Refuse modules to save whose tensors have other names in files."""
    tensors = {plain_name(key) for key in source.state_dict()}
    packed = {key for key in tensors for rule in family.packed if rule.is_name(key)}
    for module in saved:
        if any(key.startswith(f"{module}.") for key in packed):
            _refuse(name, f"its modules_to_save has {module!r}", _NO_EXPERTS)


def _check_layer(name: str, module: str, layer: Any, adapter: str) -> None:
    if adapter in layer.lora_variant:
        _refuse(
            name, f"{module!r} has a {type(layer.lora_variant[adapter]).__name__}", "Use plain LoRA"
        )
    if layer.merged or layer.disable_adapters or adapter not in layer.active_adapters:
        state = "merged" if layer.merged else "switched off"
        _refuse(
            name,
            f"the adapter of {module!r} is {state}",
            "Leave it active and not merged in configure_model",
        )
    if any(parameter.is_meta for parameter in layer.lora_A[adapter].parameters()):
        _refuse(name, f"the adapter of {module!r} has no values", "Leave out low_cpu_mem_usage")


def _refuse(name: str, problem: str, remedy: str) -> None:
    raise UnsupportedError(
        f"an adapter must be LoRA of linear layers: {problem} ({name!r}). The layers that replace "
        f"Hugging Face's implement no other adapter. {remedy}."
    )


def _as_plain(config: Any, kind: type[nn.Module]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=sorted))
    if plain.get("task_type") is None:
        # peft's own files have this entry, by which peft determines the class of the model.
        plain["auto_mapping"] = {
            "base_model_class": kind.__name__,
            "parent_library": kind.__module__,
        }
    return plain
