"""Low-rank updates of Hugging Face layers, and their tensors in this package's layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.swap.tensors.mapping import Source, TensorMap, TensorsInMemory, named

#: Infixes of tensor names in a layer that peft has wrapped: of the layer itself and of the update.
_BASE_PART = ".base_layer."
_FACTOR_PART = re.compile(r"\.lora_[A-Za-z_]+\.")
#: Infixes of tensor names in a module of modules_to_save: of the trained and of the original
#: module.
_SAVED_PART = re.compile(r"\.modules_to_save\.[^.]+\.")
_ORIGINAL_PART = ".original_module."
#: Name of the updates in this package's layers, and peft's names for their factors.
UPDATES = "low_rank"
FACTORS = {"a": "lora_A", "b": "lora_B"}


@dataclass(frozen=True)
class Adapter:
    """Low-rank adapter of a model.

    Args:
        name: Name that peft gives the adapter.
        config: Configuration in the adapter's folder.
        ranks: Rank of the update of each adapted layer, by the layer's name in the family's table.
        scales: Factor of the update of each adapted layer, by the same names.
        saved: Names of peft's modules_to_save, whose weights are all trained and saved.
    """

    name: str
    config: Mapping[str, Any]
    ranks: Mapping[str, int]
    scales: Mapping[str, float]
    saved: tuple[str, ...] = ()

    def maps(self, table: Iterable[TensorMap]) -> tuple[LowRankMap, ...]:
        """List the sources of the factors."""
        return tuple(part for tensor in table for part in _low_rank_maps(tensor, self.ranks))

    def factors(self, table: Iterable[TensorMap]) -> tuple[TensorMap, ...]:
        """List the sources of the factors, without their layers."""
        return tuple(factor for update in self.maps(table) for factor in (update.a, update.b))

    def class_maps(self, table: Iterable[TensorMap]) -> tuple[LowRankMap, ...]:
        """List the sources of the factors in the module tree of the class, under peft's names."""
        return tuple(
            replace(
                update,
                a=replace(update.a, target=self.own_name(update.a.sources[0].name)),
                b=replace(update.b, target=self.own_name(update.b.sources[0].name)),
            )
            for update in self.maps(table)
        )

    def class_tensors(
        self, table: Iterable[TensorMap]
    ) -> dict[str, tuple[TensorMap, tuple[str, ...]]]:
        """List all trained tensors of the adapter's folder by their names in the tree."""
        table = tuple(table)
        factors = (factor for update in self.class_maps(table) for factor in (update.a, update.b))
        tensors = {factor.target: (factor, tuple(factor.source_shapes)) for factor in factors}
        for tensor in table:
            names = tuple(name for name in tensor.source_shapes if self.is_saved(name))
            if names:
                tensors[tensor.target] = (tensor, names)
        return tensors

    def is_saved(self, name: str) -> bool:
        """Return whether a tensor of the model belongs to one of the modules to save."""
        return any(name.startswith(f"{module}.") for module in self.saved)

    def wrapped_name(self, name: str) -> str:
        """Return the name that a model's tensor has inside the layers of peft."""
        module, _, kind = name.rpartition(".")
        if module in self.ranks:
            return f"{module}{_BASE_PART}{kind}"
        saved_module = next((saved for saved in self.saved if name.startswith(f"{saved}.")), None)
        return (
            name
            if saved_module is None
            else f"{saved_module}.modules_to_save.{self.name}{name.removeprefix(saved_module)}"
        )

    def own_name(self, name: str) -> str:
        """Convert a factor's name in a folder to its name inside the layers of peft."""
        module, _, kind = name.rpartition(".")
        return f"{module}.{self.name}.{kind}"


@dataclass(frozen=True)
class LowRankMap:
    """Rows of a layer that come from an adapted Hugging Face layer, and the names of its factors.

    Args:
        b: Map of the second factor, whose rows are in this package's order.
    """

    module: str
    layer: str
    rows: range
    a: TensorMap
    b: TensorMap

    @property
    def key(self) -> str:
        """Return the name of the update in this package's layer."""
        return self.module.rpartition(".")[2]


def _low_rank_maps(tensor: TensorMap, ranks: Mapping[str, int]) -> Iterator[LowRankMap]:
    """List the factors of a weight's adapted layers, from the first row to the last."""
    layer, _, kind = tensor.target.rpartition(".")
    if kind != "weight" or len(tensor.shape) != 2:
        return
    start = 0
    keys = set[str]()
    for name, group in groupby(tensor.sources, key=lambda source: source.name):
        sources = tuple(group)
        rows = range(start, start + sum(source.num_rows for source in sources))
        start = rows.stop
        module = name.removesuffix(".weight")
        if module not in ranks:
            continue
        key = module.rpartition(".")[2]
        if key in keys:
            raise ValueError(
                f"the names of layers that become {layer} must end differently: {module} ends like "
                "another."
            )
        keys.add(key)
        rank = ranks[module]
        first, second = (f"{module}.{factor}.weight" for factor in FACTORS.values())
        target = f"{layer}.{UPDATES}.{key}"
        b_sources = (replace(source, name=second, is_transposed=False) for source in sources)
        yield LowRankMap(
            module,
            layer,
            rows,
            TensorMap(f"{target}.a.weight", (rank, tensor.shape[1]), (Source(first, rank),)),
            TensorMap(f"{target}.b.weight", (len(rows), rank), tuple(b_sources)),
        )


def full_factors(
    tensors: Mapping[str, Tensor], adapter: Adapter | None, table: Iterable[TensorMap]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full factors in a wrapped model's tensors, by their names in the model's tree."""
    maps = () if adapter is None else adapter.class_maps(table)
    factors = tuple(factor for update in maps for factor in (update.a, update.b))
    shapes = (
        {}
        if adapter is None
        else {adapter.own_name(n): s for factor in factors for n, s in factor.source_shapes.items()}
    )
    actual = {
        name: tuple(tensor.shape) for name, tensor in tensors.items() if _FACTOR_PART.search(name)
    }
    if shapes != actual:
        differing = {
            name for name in shapes.keys() | actual.keys() if shapes.get(name) != actual.get(name)
        }
        raise CheckpointMismatchError(
            f"the LoRA factors must match the adapter of the model: {named(differing)} are "
            "missing, unexpected or of another shape. Factors would keep their initial values, or "
            "tensors would be ignored. Use the LoraConfig that was trained."
        )
    for factor in factors:
        reader = TensorsInMemory(
            {n: tensors[adapter.own_name(n)] for n in factor.source_shapes} if adapter else {}
        )
        yield factor.target, factor.full(reader, next(iter(reader.tensors.values())).dtype)


def merge_updates(
    full_tensors: Iterable[tuple[str, Tensor]],
    factors: Mapping[str, Tensor],
    maps: Iterable[LowRankMap],
    adapter: Adapter,
) -> Iterator[tuple[str, Tensor]]:
    """Add the updates to full tensors, one after the other.

    Args:
        full_tensors: Names and full values of this package's parameters; factors among them are
            skipped.
    """
    of_layer: dict[str, list[LowRankMap]] = {}
    for part in maps:
        of_layer.setdefault(f"{part.layer}.weight", []).append(part)
    for name, full in full_tensors:
        if name in factors:
            continue
        if name in of_layer:
            wide = torch.promote_types(full.dtype, torch.float32)
            sums = full.to(wide, copy=True)
            for part in of_layer[name]:
                product = factors[part.b.target].to(wide) @ factors[part.a.target].to(wide)
                sums[part.rows.start : part.rows.stop] += adapter.scales[part.module] * product
            full = sums.to(full.dtype)
        yield name, full


def is_factor(name: str) -> bool:
    """Return whether a tensor of a model wrapped by peft is a factor of an update."""
    return _FACTOR_PART.search(name) is not None


def plain_name(name: str) -> str:
    """Return the name of a tensor before peft wrapped its modules."""
    return _SAVED_PART.sub(".", name.replace(_BASE_PART, ".").replace(_ORIGINAL_PART, "."))


def without_adapters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors without updates, by their names before wrapping."""
    return {
        plain_name(name): tensor
        for name, tensor in tensors.items()
        if not _FACTOR_PART.search(name) and _ORIGINAL_PART not in name
    }
