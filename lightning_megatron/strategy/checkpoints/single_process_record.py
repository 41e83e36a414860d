"""Record of the model as a single process has it, for exporting a checkpoint without the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.layered import WORD_EMBEDDING, LayeredModule
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.plan.shards import padded_vocab_size
from lightning_megatron.swap.hugging_face.class_tensors import ClassTensors, in_class_order

T = TypeVar("T")

#: Name of the container whose numbered parts come in descending order: see
#: ``experts.compute.grouped_mlp``.
_DESCENDING = "experts"


def gather_parts(part: T, mesh: ParallelMesh) -> list[T]:
    """Return one value per pipeline stage and expert shard, from the ranks with distinct names.

    Args:
        part: Value of this rank; the same on all ranks with the same stage and expert shard.

    Communication: one gather of objects over ep, and one over pp.
    """
    shards = all_gather_objects(part, mesh.ep_cpu)
    return list(chain.from_iterable(all_gather_objects(shards, mesh.pp_cpu)))


def merge_orders(stages: Sequence[Sequence[str]], descends: bool = False) -> list[str]:
    """Merge names from all stages and expert-parallel ranks into the whole model's order.

    Numbered parts are sorted by number: layers in ascending order, experts in descending order.
    Other parts keep the order of their stage. A part that only a later stage has follows the part
    that precedes it on that stage. Without such a part it stands right before the part that follows
    it there, and after all parts of earlier stages if that stage has none of them.

    Args:
        stages: Names on each stage, first to last, in module order, such as
            ``layers.3.mlp.weight``.
    """
    if len(stages) == 1:
        return list(dict.fromkeys(stages[0]))
    parts = []
    for names in stages:
        parts.append(list(dict.fromkeys(name.partition(".")[0] for name in names)))
    merged = []
    for head in _merge_parts(parts, descends):
        if any(head in names for names in stages):
            merged.append(head)
            continue
        rests = []
        for names in stages:
            inner = [name for name in names if name.startswith(f"{head}.")]
            if inner:
                rests.append([name.removeprefix(f"{head}.") for name in inner])
        merged += [
            f"{head}.{rest}" for rest in merge_orders(rests, descends or head == _DESCENDING)
        ]
    return merged


def _merge_parts(stages: Sequence[Sequence[str]], descends: bool) -> list[str]:
    names = {part for parts in stages for part in parts}
    if all(part.isdecimal() for part in names):
        return sorted(names, key=int, reverse=descends)
    merged: list[str] = []
    for parts in stages:
        for number, part in enumerate(parts):
            if part in merged:
                continue
            place = len(merged)
            if number:
                place = merged.index(parts[number - 1]) + 1
            elif known := [earlier for earlier in parts if earlier in merged]:
                place = merged.index(known[0])
            merged.insert(place, part)
    return merged


def order_groups(
    stages: Sequence[Sequence[Sequence[str]]], order: Iterable[str]
) -> list[list[str]]:
    """Return the parameters of each optimizer group in the order of a single process.

    Args:
        stages: Names in each optimizer group, in the optimizer's order, for each stage and each
            expert shard.
    """
    if len(stages) == 1:
        return [list(names) for names in stages[0]]
    place = {name: number for number, name in enumerate(order)}
    for groups in stages:
        for number, names in enumerate(groups):
            places = [place.get(name, -1) for name in names]
            if places != sorted(places) or -1 in places:
                raise CheckpointMismatchError(
                    "parameters of an optimizer group must be in the model's order to be numbered "
                    f"as in one process: the parameters of group {number} on one of {len(stages)} "
                    "stages are not. Build the group from self.named_parameters() without sorting "
                    "it, or use pp=1."
                )
    merged: list[set[str]] = [set() for _ in range(max(map(len, stages)))]
    for stage_groups in stages:
        for names_of_group, names in zip(merged, stage_groups, strict=False):
            names_of_group.update(names)
    return [sorted(names, key=place.__getitem__) for names in merged]


def named_numbers(group: Mapping[str, object], names: Sequence[str]) -> list[str]:
    """Return the names of the parameters of a saved optimizer group, number by number.

    Args:
        names: Current parameter names of the group, in the order of a single process.
    """
    numbers = group["params"]
    assert isinstance(numbers, Sequence), "torch lists the parameters of a group by number"
    written = group.get("param_names")
    if isinstance(written, Sequence) and set(written) == set(names):
        return [str(name) for name in written]
    if len(numbers) != len(names):
        raise CheckpointMismatchError(
            f"an optimizer group must have the parameters that were saved: {len(numbers)} were "
            f"saved, the group has {len(names)} ({', '.join(names[:3])}, ...). torch numbers the "
            "parameters, so states would be loaded into the wrong parameters. Restore "
            "configure_optimizers as it was, or load only the weights."
        )
    return list(names)


#: Tensors of a GPT or an Encoder that have one row per token of the vocabulary.
_VOCABULARY = (WORD_EMBEDDING, "head.weight", "head.bias")


def single_process_record(
    module: nn.Module, optimizers: Sequence[Optimizer], main: MainParameters, mesh: ParallelMesh
) -> dict[str, Any]:
    """Collect names and order of the tensors in a single process.

    Returns:
        A dictionary with these keys:

        - ``order``: Names of the state dict, in order.
        - ``aliases``: Names that share a tensor, each with the name that owns it.
        - ``padded_rows``: Row counts of the tables that have padding rows in one process (rows).
        - ``empty``: Shapes of the tensors without elements.
        - ``numbering``: Names in each group of each optimizer, or the reason why they are unknown.

    Communication: that of :func:`gather_parts`.
    """
    first_name: dict[int, str] = {}
    names: list[str] = []
    aliases: dict[str, str] = {}
    empty: dict[str, list[int]] = {}
    own = [path for path, part in module.named_modules() if isinstance(part, LayeredModule)]
    own_prefixes = tuple(f"{path}." if path else "" for path in own)
    for name, tensor in module.state_dict(keep_vars=True).items():
        tied_to = main.spec(name).tied_to if main.holds(name) else None
        # In a single process a model of this package has one name for tied tensors, and any other
        # module has both.
        if not isinstance(tensor, Tensor) or (
            tied_to is not None and name.startswith(own_prefixes)
        ):
            continue
        names.append(name)
        shape = main.spec(name).full_shape if main.holds(name) else tuple(tensor.shape)
        if 0 in shape:
            empty[name] = list(shape)
        if tied_to is not None:
            aliases[name] = tied_to
            continue
        original = first_name.setdefault(id(tensor), name)
        if original != name:
            aliases[name] = original
    groups: list[list[list[str]]] = [[] for _ in optimizers]
    for of_optimizer, optimizer in zip(groups, optimizers, strict=True):
        for group in main.names_of(optimizer):
            of_optimizer.append([name for name in group if main.spec(name).tied_to is None])
    stages = gather_parts((names, aliases, padded_rows(module), groups, empty), mesh)
    orders, all_aliases, rows, all_groups, all_empty = zip(*stages, strict=True)
    order = in_class_order(ClassTensors.of_module(module), merge_orders(orders))
    return {
        "order": order,
        "aliases": _merged(all_aliases),
        "padded_rows": _merged(rows),
        "empty": _merged(all_empty),
        "numbering": [_numbering(parts, order) for parts in zip(*all_groups, strict=True)],
    }


def padded_rows(module: nn.Module) -> dict[str, int]:
    """Return the padded row counts of vocabulary tables in a single process (rows)."""
    rows: dict[str, int] = {}
    for prefix, part in module.named_modules():
        if isinstance(part, (GPT, Encoder)):
            size = padded_vocab_size(part.config.vocab_size, 1, part.config.vocab_multiple)
            if size > part.config.vocab_size:
                held = dict(part.named_parameters())
                rows |= {
                    f"{prefix}.{name}" if prefix else name: size
                    for name in _VOCABULARY
                    if name in held
                }
    return rows


def _numbering(
    stages: Sequence[Sequence[Sequence[str]]], order: Sequence[str]
) -> list[list[str]] | str:
    try:
        return order_groups(stages, order)
    except CheckpointMismatchError as error:
        return str(error)


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}
