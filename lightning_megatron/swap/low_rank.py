"""Adapters of peft, which are low-rank updates of linear layers, as updates of the layers that replace these."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.low_rank import LowRank, LowRankUpdates
from lightning_megatron.layers.replicated import ReplicatedLinear
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.gpt import GPT
from lightning_megatron.swap.families import Family
from lightning_megatron.swap.mapping import TensorMap, TensorsInMemory, named

#: Parts of names inside a layer that peft has wrapped: the layer itself, and what was added to it.
_BASE, _ADDED = ".base_layer.", re.compile(r"\.lora_[A-Za-z_]+\.")
#: What a layer of ours calls its updates, and what peft calls their factors.
UPDATES, FACTORS = "low_rank", {"a": "lora_A", "b": "lora_B"}

#: Settings of LoraConfig that ask for more than a product of two matrices beside a linear layer.
_UNSUPPORTED = (
    *("alora_invocation_tokens", "arrow_config", "bias", "kasa_config", "layer_replication", "lora_bias"),
    *("modules_to_save", "monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora"),
    *("use_dora", "use_qalora", "velora_config"),
)
_NO_VALUES = "Import peft at the top of the file, and leave low_cpu_mem_usage out"
_OTHERS = "Choose target_modules among the linear layers of its blocks"


@dataclass(frozen=True)
class Adapter:
    """Describe the adapter of a model.

    Args:
        name: What peft calls it.
        config: What its folder says of it.
        ranks: Rank of the update of each adapted layer, by the layer's name in the family's table.
        scales: What that is multiplied by.
    """

    name: str
    config: Mapping[str, Any]
    ranks: Mapping[str, int]
    scales: Mapping[str, float]

    def maps(self, table: Iterable[TensorMap]) -> tuple[LowRankMap, ...]:
        """List where its factors are.

        Args:
            table: Where the full tensors of the model come from.
        """
        return tuple(low_rank_maps(table, self.ranks))

    def factors(self, table: Iterable[TensorMap]) -> tuple[TensorMap, ...]:
        """List where its factors are, without the layers that they belong to.

        Args:
            table: Where the full tensors of the model come from.
        """
        return tuple(factor for one in self.maps(table) for factor in (one.a, one.b))

    def wrapped_name(self, name: str) -> str:
        """Return the name that a tensor of the model has inside the layers of peft."""
        module, _, kind = name.rpartition(".")
        return f"{module}{_BASE}{kind}" if module in self.ranks else name

    def own_name(self, name: str) -> str:
        """Return the name that a factor has inside the layers of peft, by its name in a folder."""
        module, _, kind = name.rpartition(".")
        return f"{module}.{self.name}.{kind}"


@dataclass(frozen=True)
class LowRankMap:
    """Say which rows of which layer of ours an adapted layer is, and where its factors are.

    Args:
        module: Name of the foreign layer.
        layer: Name of the layer of ours.
        rows: Rows of its full weight.
        a: The first factor.
        b: The second factor, whose rows are in the order of ours.
    """

    module: str
    layer: str
    rows: range
    a: TensorMap
    b: TensorMap

    @property
    def key(self) -> str:
        """Return the name of the update in the layer of ours."""
        return key_of(self.module)


def key_of(module: str) -> str:
    """Return the name of the update that a foreign layer has in the layer of ours."""
    return module.rpartition(".")[2]


def low_rank_maps(table: Iterable[TensorMap], ranks: Mapping[str, int]) -> Iterator[LowRankMap]:
    """List where the factors of adapted layers are, as the table of their family has it.

    Args:
        table: Where the full tensors of the model come from.
        ranks: Rank of the update of each adapted layer, by its name.
    """
    for tensor in table:
        layer, _, kind = tensor.target.rpartition(".")
        if kind != "weight" or len(tensor.shape) != 2:
            continue
        start = 0
        for name, group in groupby(tensor.sources, key=lambda source: source.name):
            sources = tuple(group)
            num_rows, module = sum(source.num_rows for source in sources), name.removesuffix(".weight")
            if module in ranks:
                rank, names = ranks[module], {key: f"{module}.{factor}.weight" for key, factor in FACTORS.items()}
                whole = replace(sources[0], name=names["a"], num_rows=rank, is_transposed=False, first=0, strip=None)
                target = f"{layer}.{UPDATES}.{key_of(module)}"
                yield LowRankMap(
                    module,
                    layer,
                    range(start, start + num_rows),
                    TensorMap(f"{target}.a.weight", (rank, tensor.shape[1]), (whole,)),
                    TensorMap(
                        f"{target}.b.weight",
                        (num_rows, rank),
                        tuple(replace(source, name=names["b"], is_transposed=False) for source in sources),
                    ),
                )
            start += num_rows


def full_factors(
    tensors: Mapping[str, Tensor], adapter: Adapter | None, table: Iterable[TensorMap]
) -> Iterator[tuple[str, Tensor]]:
    """Make the full factors of ours, by name, of those among the tensors of a model that peft has wrapped.

    Args:
        tensors: Its state dict.
        adapter: The adapter that is expected.
        table: Where the full tensors of the model come from.

    Raises:
        CheckpointMismatchError: If the factors are not those of the adapter.
    """
    factors = () if adapter is None else adapter.factors(table)
    shapes = (
        {} if adapter is None else {adapter.own_name(n): s for one in factors for n, s in one.source_shapes.items()}
    )
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items() if _ADDED.search(name)}
    if shapes != given:
        differing = {name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name)}
        raise CheckpointMismatchError(
            f"the factors must be those of the adapter of the model: {named(differing)} are missing, left over or of "
            "another shape. Nothing may keep its first values or be forgotten. Use the LoraConfig that was trained."
        )
    for factor in factors:
        reader = TensorsInMemory({n: tensors[adapter.own_name(n)] for n in factor.source_shapes} if adapter else {})
        full = torch.empty(factor.shape, dtype=next(iter(reader.tensors.values())).dtype)
        factor.fill(full, [0, 0], factor.shape, reader)
        yield factor.target, full


def merged(
    full_tensors: Iterable[tuple[str, Tensor]],
    factors: Mapping[str, Tensor],
    maps: Iterable[LowRankMap],
    adapter: Adapter,
) -> Iterator[tuple[str, Tensor]]:
    """Add the updates to full tensors, one after the other.

    Args:
        full_tensors: Names of our parameters and their full values; the factors may be among them, and are left out.
        factors: The full factors by name.
        maps: Where they are.
        adapter: What they belong to.
    """
    of_layer: dict[str, list[LowRankMap]] = {}
    for one in maps:
        of_layer.setdefault(f"{one.layer}.weight", []).append(one)
    for name, full in full_tensors:
        if name in factors:
            continue
        if name in of_layer:
            wide = torch.promote_types(full.dtype, torch.float32)
            sums = full.to(wide, copy=True)
            for one in of_layer[name]:
                product = factors[one.b.target].to(wide) @ factors[one.a.target].to(wide)
                sums[one.rows.start : one.rows.stop] += adapter.scales[one.module] * product
            full = sums.to(full.dtype)
        yield name, full


def is_of_peft(module: Any) -> bool:
    """Tell whether a module is of peft."""
    return type(module).__module__.partition(".")[0] == "peft"


def without_adapters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a model by the names that they had before peft wrapped its layers."""
    return {name.replace(_BASE, "."): tensor for name, tensor in tensors.items() if not _ADDED.search(name)}


def adapter_of(name: str, source: Any, family: Family) -> Adapter | None:
    """Return the adapter of a Hugging Face model; None if it has none.

    Args:
        name: Name of the model, for errors.
        source: The model.
        family: Its family.

    Raises:
        UnsupportedError: If the adapter is more than updates of low rank of linear layers.
    """
    layers = dict(_wrapped(source, family))
    if not layers:
        return None
    adapters = {key for layer in layers.values() for key in getattr(layer, "lora_A", ())}
    if len(adapters) > 1:
        _refuse(name, f"it has the adapters {named(adapters)}", "Train one adapter at a time")
    configs: Mapping[str, Any] = source.peft_config
    config = next(iter(configs.values()))
    for field in _UNSUPPORTED:
        value = getattr(config, field, None)
        if value and value != "none":
            _refuse(name, f"its {field} is {value!r}", f"Leave {field} out")
    for module, layer in layers.items():
        # By name: peft is an extra.
        if (type(layer).__module__, type(layer).__name__) != ("peft.tuners.lora.layer", "Linear"):
            _refuse(name, f"{module!r} is a {type(layer).__name__}", "Adapt linear layers with LoraConfig alone")
        _check_layer(name, module, layer, next(iter(adapters)))
    adapter = next(iter(adapters))
    scales = {module: float(layer.scaling[adapter]) for module, layer in layers.items()}
    return Adapter(adapter, _as_plain(config), {module: layer.r[adapter] for module, layer in layers.items()}, scales)


def add_adapter(name: str, model: GPT | Encoder, source: Any, family: Family, adapter: Adapter) -> None:
    """Give the layers on this rank the updates of a model's adapter, with their values.

    Args:
        name: Name of the model, for errors.
        model: Any rank's part of what replaces it.
        source: The model.
        family: Its family.
        adapter: Its adapter.

    Raises:
        UnsupportedError: If something is adapted that cannot be here, or the adapter has no values.
    """
    layers: dict[str, Any] = dict(_wrapped(source, family))
    maps = adapter.maps(family.tensors(model.config))
    ends = {family.head, family.embedding}
    left = layers.keys() - {one.module for one in maps if f"{one.module}.weight" not in ends}
    if left:
        _refuse(name, f"{named(left)} cannot be adapted", _OTHERS)
    here: dict[str, Any] = dict(model.named_modules())
    for layer, group in groupby(maps, key=lambda one: one.layer):
        if layer in here:
            base, parts = here[layer], list(group)
            if not isinstance(base, (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)):
                _refuse(name, f"{parts[0].module!r} cannot be adapted", _OTHERS)
            base.low_rank = LowRankUpdates(
                {one.key: _update(model, base, one, layers[one.module], adapter) for one in parts}
            )


def _update(model: GPT | Encoder, base: Any, place: LowRankMap, layer: Any, adapter: Adapter) -> LowRank:
    dropout = layer.lora_dropout[adapter.name]
    factors = {key: getattr(layer, theirs)[adapter.name].weight for key, theirs in FACTORS.items()}
    update = LowRank(
        base,
        place.rows,
        adapter.ranks[place.module],
        model.mesh,
        scale=adapter.scales[place.module],
        dropout=getattr(dropout, "p", 0.0),
    ).to(model.mesh.device, factors["a"].dtype)
    reader = TensorsInMemory({f"{place.module}.{FACTORS[key]}.weight": tensor for key, tensor in factors.items()})
    for key, tensor in (("a", place.a), ("b", place.b)):
        parameter = update.get_parameter(f"{key}.weight")
        for box, view in shard_spec_of(parameter).local_views(parameter.data):
            tensor.fill(view, box.offsets, box.sizes, reader)
        parameter.requires_grad_(factors[key].requires_grad)
    return update.train(dropout.training)


def _wrapped(source: nn.Module, family: Family) -> Iterator[tuple[str, Any]]:
    """List what peft has put into a model, by the names of the family's table."""
    inside = ""
    for path, module in source.named_modules():
        if is_of_peft(module) and not (inside and path.startswith(inside)):
            inside = f"{path}."
            yield family.present_name(f"{path}.weight").removesuffix(".weight"), module


def _check_layer(name: str, module: str, layer: Any, adapter: str) -> None:
    if adapter in layer.lora_variant:
        _refuse(name, f"{module!r} has a {type(layer.lora_variant[adapter]).__name__}", "Use plain LoRA")
    if layer.merged or layer.disable_adapters or adapter not in layer.active_adapters:
        state = "merged" if layer.merged else "switched off"
        _refuse(name, f"the adapter of {module!r} is {state}", "Leave it active and not merged in configure_model")
    if any(parameter.is_meta for parameter in layer.lora_A[adapter].parameters()):
        _refuse(name, f"the adapter of {module!r} has no values", _NO_VALUES)


def _refuse(name: str, problem: str, remedy: str) -> None:
    raise UnsupportedError(
        f"an adapter must be LoRA of linear layers: {problem} ({name!r}). The layers that take the place of Hugging "
        f"Face's can have products of two matrices beside their weights, and nothing else. {remedy}."
    )


def _as_plain(config: Any) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=sorted))
    return plain
