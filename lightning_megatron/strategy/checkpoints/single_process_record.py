"""Record of the model as a single process has it, for exporting a checkpoint without the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.layered import WORD_EMBEDDING, LayeredModule
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.plan.shards import padded_vocab_size
from lightning_megatron.strategy.checkpoints.name_order import (
    gather_parts,
    merge_orders,
    order_groups,
)
from lightning_megatron.swap.hugging_face.class_tensors import ClassTensors, in_class_order

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
