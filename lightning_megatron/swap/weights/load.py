"""Loading of this rank's parameters from Hugging Face tensors, a few parts in memory at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.parameters.init import initialize_, materialised
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.layered import WORD_EMBEDDING
from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.tensors.mapping import (
    Slices,
    TensorMap,
    TensorReader,
    TensorsInMemory,
    named,
)
from lightning_megatron.swap.tensors.packed import PackedRows, packed_rows
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder


def load_from(
    model: GPT | Encoder,
    tensors: TensorReader | Mapping[str, Tensor],
    family: Family,
    *,
    may_lack: bool = False,
) -> tuple[str, ...]:
    """Fill this rank's parameters and buffers with Hugging Face tensors, converted to their dtype.

    Parameters on the meta device move to the mesh's device. Buffers without a Hugging Face tensor
    keep their values, because only training uses them. Names and shapes are checked before any
    tensor is changed. Padding is set to zero.

    Args:
        may_lack: Whether tensors of heads may be missing, which then get initial values.

    Returns:
        Names of the tensors of heads that were missing, the same on every rank.
    """
    loading = plan_loading(model, reader_of(tensors, family), family, may_lack=may_lack)
    loading.run()
    return loading.missing


@dataclass(frozen=True)
class WeightLoading:
    """Loading of Hugging Face tensors into this rank's part of a model, after all checks."""

    model: GPT | Encoder
    reader: RenamedTensors
    family: Family

    @cached_property
    def table(self) -> dict[str, TensorMap]:
        """Return the sources of all full tensors, by name."""
        return {tensor.target: tensor for tensor in self.family.tensors(self.model.config)}

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """List the tensors that the reader lacks, the same on every rank."""
        names = {name for tensor in self.table.values() for name in tensor.source_shapes}
        return tuple(sorted(names - self.reader.tensors.keys()))

    def run(self, shows_progress: bool = False) -> None:
        """Fill the model's parameters and buffers, converted to their dtype.

        Missing tensors get initial values, which depend on torch's initial seed.
        """
        model = self.model
        lacking = set(self.missing)
        drawn: set[str] = set()
        filled: dict[str, TensorMap] = {}
        for name, parameter in _values_of(model, self.table).items():
            tensor = self.table[shard_spec_of(parameter).tied_to or name]
            sources = tensor.source_shapes.keys()
            if sources & lacking:
                drawn.add(name)
            if sources - lacking:
                filled[name] = tensor
        initialize_(model, model.mesh.device, torch.initial_seed(), drawn)
        copies: list[Copy] = []
        values = _values_of(model, self.table)
        for name, tensor in filled.items():
            parameter = values[name]
            spec = shard_spec_of(parameter, model.mesh.tp.rank)
            if isinstance(parameter, nn.Parameter) and parameter.is_meta:
                parameter = materialised(parameter, model.mesh.device)
                path, _, key = name.rpartition(".")
                model.get_submodule(path)._parameters[key] = parameter
            with torch.no_grad():
                is_padded = spec.full_shape and parameter.shape[spec.dim] != spec.local_extent
                if is_padded and name not in drawn:
                    parameter.zero_()
                for box, view in spec.local_views(parameter.data):
                    copies += copies_of(tensor, view, box.offsets, box.sizes, self.reader)
            if (
                tensor.target == WORD_EMBEDDING
                and model.config.tie_embeddings
                and self.family.head in self.reader.names()
            ):
                _check_tied(parameter, self.reader, self.family)
        copy_all(copies, self.reader, shows_progress and model.mesh.rank == 0)


def plan_loading(
    model: GPT | Encoder, reader: RenamedTensors, family: Family, *, may_lack: bool = False
) -> WeightLoading:
    """Check the names and shapes of Hugging Face tensors; do not change the model.

    Args:
        may_lack: Whether tensors of heads may be missing.
    """
    loading = WeightLoading(model, reader, family)
    check_tensors(
        reader, loading.table.values(), family, model.config.tie_embeddings, may_lack=may_lack
    )
    _check_parameters(model, loading.table, family)
    return loading


def full_tensors(
    tensors: TensorReader | Mapping[str, Tensor],
    family: Family,
    config: Any,
    dtype: torch.dtype,
    table: tuple[TensorMap, ...] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors of a model, by name, one after the other.

    Args:
        dtype: Dtype of the result, except for tensors with a fixed dtype.
        table: Table of the full tensors; None means the table of this package's model.
    """
    reader = reader_of(tensors, family)
    table = family.tensors(config) if table is None else table
    check_tensors(reader, table, family, config.tie_embeddings)
    for tensor in table:
        yield tensor.target, tensor.full(reader, tensor.dtype or dtype)


@dataclass(frozen=True)
class RenamedTensors:
    """Reader of tensors by the names of a family's table.

    Args:
        tensors: Reader of each tensor, with its name and rows there, by the name in the table.
    """

    tensors: Mapping[str, tuple[TensorReader, PackedRows]]

    def names(self) -> Collection[str]:
        """List the tensors."""
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor (elements)."""
        reader, rows = self.tensors[name]
        return rows.shape(reader.shape(rows.name))

    def read(self, name: str, slices: Slices) -> Tensor:
        """Return a part of a tensor."""
        reader, rows = self.tensors[name]
        return rows.extract(reader.read(rows.name, rows.slices(slices)))


def reader_of(tensors: TensorReader | Mapping[str, Tensor], family: Family) -> RenamedTensors:
    """Return a reader of the weight tensors by the names of the family's table.

    Earlier names are replaced by the current ones, names of a model without a head get the prefix
    of a model with one, and packed tensors are split.
    """
    reader = TensorsInMemory(tensors) if isinstance(tensors, Mapping) else tensors
    names = {name: family.present_name(name) for name in reader.names()}
    if names and not any(name.startswith(family.base) for name in names.values()):
        names = {
            key: name if name == family.head else f"{family.base}{name}"
            for key, name in names.items()
        }
    renamed: dict[str, tuple[TensorReader, PackedRows]] = {}
    for key, name in names.items():
        if family.ignores(name):
            continue
        for part, rows in packed_rows(name, key, reader, family.packed):
            if renamed.setdefault(part, (reader, rows))[1] != rows:
                raise CheckpointMismatchError(
                    f"a tensor must be present once: {renamed[part][1].name!r} and {key!r} are "
                    f"two names of the same tensor of {family.architecture}. Remove one of them."
                )
    return RenamedTensors(renamed)


def check_tensors(
    reader: RenamedTensors,
    table: Iterable[TensorMap],
    family: Family,
    is_tied: bool,
    may_lack: bool = False,
) -> None:
    """Refuse tensors that differ from a table in names or shapes; ignore heads of other classes.

    Args:
        is_tied: Whether the output head is tied to the embedding; the files may still contain it.
        may_lack: Whether tensors of heads may be missing.
    """
    shapes = {name: shape for tensor in table for name, shape in tensor.source_shapes.items()}
    if is_tied and family.head in reader.tensors:
        shapes[family.head] = shapes[family.embedding]
    missing = shapes.keys() - reader.tensors.keys()
    missing = {name for name in missing if not (may_lack and family.is_head(name))}
    unknown = reader.tensors.keys() - shapes.keys()
    unknown = {name for name in unknown if not family.is_head(name)}
    if missing or unknown:
        parts = [f"{named(missing)} missing"] if missing else []
        parts += [f"{named(unknown)} unexpected"] if unknown else []
        raise CheckpointMismatchError(
            f"the tensors must match a {family.architecture} of this configuration: "
            f"{', and '.join(parts)}. Parameters would keep their initial values, or tensors would "
            "be ignored. Load the weights that belong to the configuration."
        )
    stored: dict[SafetensorsFolder, list[str]] = {}
    for source, rows in reader.tensors.values():
        if isinstance(source, SafetensorsFolder):
            stored.setdefault(source, []).append(rows.name)
    for folder, names in stored.items():
        folder.check_types(names)
    wrong = [
        f"{name!r} {reader.shape(name)} instead of {shape}"
        for name, shape in shapes.items()
        if name in reader.tensors and reader.shape(name) != shape
    ]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise CheckpointMismatchError(
            f"the tensors must have the shapes of this configuration: {wrong[0]}{more}. Load the "
            "weights that belong to the configuration."
        )


def _values_of(model: nn.Module, table: Mapping[str, TensorMap]) -> dict[str, Tensor]:
    """Return the tensors of a model to fill: all parameters, and buffers with a source."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in table}
    return {**dict(model.named_parameters()), **buffers}


def _check_parameters(model: nn.Module, table: Mapping[str, TensorMap], family: Family) -> None:
    targets = {}
    for name, parameter in _values_of(model, table).items():
        spec = shard_spec_of(parameter)
        target = targets[name] = spec.tied_to or name
        if target in table and table[target].shape != spec.full_shape:
            raise CheckpointMismatchError(
                f"a family must give every parameter its shape: {name!r} of a "
                f"{family.architecture} has {spec.full_shape}, its source {table[target].shape}. "
                "Build the model with the configuration that the family makes."
            )
    # If a module is on this rank, all of its parameters are, too.
    parts = set(map(_part, targets))
    unfilled = {name for name, target in targets.items() if target not in table}
    unused = {target for target in table if _part(target) in parts} - set(targets.values())
    if unfilled or unused:
        raise CheckpointMismatchError(
            f"a family must name the source of every parameter: {named(unfilled) or 'none'} of a "
            f"{family.architecture} has none, and {named(unused) or 'none'} of its sources has no "
            "parameter. Add the names of its tensors to the family, and build the model with the "
            "configuration that the family makes."
        )


def _part(name: str) -> str:
    """Return the path of the smallest module whose parameters are all on the same rank."""
    return re.sub(r"(layers\.\d+(\.mlp\.experts\.\d+)?|\w+).*", r"\1", name)


def _check_tied(parameter: Tensor, reader: TensorReader, family: Family) -> None:
    for box in shard_spec_of(parameter).boxes():
        slices = tuple(
            slice(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True)
        )
        head = reader.read(family.head, slices)
        embedding = reader.read(family.embedding, slices)
        if head.data_ptr() != embedding.data_ptr() and not torch.equal(head, embedding):
            raise CheckpointMismatchError(
                f"a tied output head must equal the embedding: {family.head!r} and "
                f"{family.embedding!r} differ in rows {slices[0].start} to {slices[0].stop}. Only "
                "one of them would be loaded. Set tie_word_embeddings to false."
            )


T = TypeVar("T")

#: Number of pieces that are copied at the same time.
_NUM_CONCURRENT = 8
#: Size of a piece (bytes). The copies in flight need memory in addition to the tensors.
PIECE_BYTES = 2**24
#: Delay before a progress bar appears (seconds).
BAR_DELAY = 1.0


@dataclass(frozen=True)
class Copy:
    """Part of a Hugging Face tensor and its destination.

    Args:
        target: Destination, in the orientation of the Hugging Face tensor.
    """

    name: str
    slices: Slices
    target: Tensor

    def run(self, reader: TensorReader) -> int:
        """Fill the target, converted to its dtype, and return its size (bytes)."""
        with torch.no_grad():
            self.target.copy_(reader.read(self.name, self.slices))
        return self.target.nbytes


def copies_of(
    tensor: TensorMap,
    view: Tensor,
    offsets: Sequence[int],
    sizes: Sequence[int],
    reader: TensorReader,
) -> Iterator[Copy]:
    """List the copies that fill a box of a full tensor, with what the reader has of it.

    Shapes: view ``sizes``.
    """
    for read in tensor.reads(offsets, sizes):
        if read.name not in reader.names():
            continue
        rows = view.narrow(0, read.start, read.num_rows)
        rows = rows.t() if read.is_transposed else rows
        first, *rest = read.slices
        # Full rows are mapped into memory, even if only a part of each is needed.
        width = prod(reader.shape(read.name)[1:]) * view.element_size()
        step = max(PIECE_BYTES // max(width, 1), 1)
        for start in range(0, len(rows), step):
            target = rows[start : start + step]
            begin = first.start + start
            yield Copy(read.name, (slice(begin, begin + len(target)), *rest), target)


def copy_all(copies: Sequence[Copy], reader: TensorReader, shows_progress: bool = False) -> None:
    """Run copies, a few at a time in threads.

    Args:
        reader: Reader of the Hugging Face tensors, called from several threads.
        shows_progress: Whether to show a progress bar if the copies take long and standard error is
            a terminal.
    """
    total = sum(copy.target.nbytes for copy in copies)
    is_hidden = None if shows_progress else True
    with (
        tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            desc="Reading weights",
            delay=BAR_DELAY,
            disable=is_hidden,
        ) as bar,
        ThreadPoolExecutor(_NUM_CONCURRENT, "weights", *_on_stream_of(copies)) as pool,
    ):
        # Parts that are far apart in a large model are in different files, which are read in
        # parallel.
        for num_bytes in pool.map(
            lambda copy: copy.run(reader), interleave(copies, _NUM_CONCURRENT)
        ):
            bar.update(num_bytes)


def _on_stream_of(copies: Sequence[Copy]) -> tuple[Callable[..., None] | None, tuple[Any, ...]]:
    """Return the initializer of new threads, which sets the CUDA stream, and its arguments.

    A thread starts with the default stream, which is not synchronized with other streams.
    """
    device = next((copy.target.device for copy in copies if copy.target.is_cuda), None)
    if device is None:
        return None, ()
    return torch.cuda.set_stream, (torch.cuda.current_stream(device),)


def interleave(items: Sequence[T], num_runs: int) -> list[T]:
    """Interleave a sequence: cut it into equal runs, and take one item of each run alternately."""
    length = max(-(-len(items) // num_runs), 1)
    return [item for first in range(length) for item in items[first::length]]
