"""Optimizers of pipeline stages that hold some or none of the trained parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.checkpoint.optimizer import (
    different_hyperparameters,
    hyperparameters_of,
)
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.remote_tensor import RemoteTensor

_REMEDY = (
    "Build the same groups on every stage in configure_optimizers, empty ones included (one for "
    "each block of the list of blocks, for example, instead of one for each parameter of "
    "named_parameters()), or save only weights by ModelCheckpoint(save_weights_only=True)."
)


@contextmanager
def build_optimizers_of_stage(mesh: ParallelMesh) -> Iterator[None]:
    """Build optimizers inside the block from the parameters of this stage, if there are several.

    Placeholders for parameters of other stages, as in the groups of a loop over all blocks, are
    left out, so that all stages have the same groups. A module that trains only its head has no
    trained parameters on the other stages, and torch refuses optimizers without parameters.
    """
    if mesh.pp.size == 1:
        yield
        return
    original: Any = Optimizer.__init__
    original_add: Any = Optimizer.add_param_group

    def init(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        groups = params if isinstance(params, Sequence) else list(params)
        original(self, groups or [{"params": []}], defaults)

    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        # Torch refuses sets, which have no order.
        if not isinstance(params, (Tensor, set)):
            param_group["params"] = [value for value in params if not _is_absent(value)]
        original_add(self, param_group)

    Optimizer.__init__ = init  # type: ignore[method-assign]
    Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.add_param_group = original_add  # type: ignore[method-assign]
        Optimizer.__init__ = original  # type: ignore[method-assign]


def _is_absent(value: Any) -> bool:
    """Return whether a parameter, or the second item of a named one, is on another stage."""
    tensor = value[1] if isinstance(value, tuple) else value
    return isinstance(tensor, Tensor) and (tensor.is_meta or isinstance(tensor, RemoteTensor))


def check_trained_somewhere(
    optimizers: Sequence[Optimizer], mesh: ParallelMesh, is_saved: bool
) -> None:
    """Refuse optimizers that train nothing on any stage, and groups that cannot be saved.

    If the run saves optimizer states, all stages must have the same number of groups, and groups of
    the same number the same hyperparameters.

    Communication: with several stages, one gather of objects over pp on the CPU.
    """
    if mesh.pp.size == 1:
        return
    stages = all_gather_objects([*map(_groups_of, optimizers)], mesh.pp_cpu)
    for number, groups_of_stages in enumerate(zip(*stages, strict=False)):
        counts = [counts_of_stage for counts_of_stage, _ in groups_of_stages]
        name = type(optimizers[number]).__name__
        if not any(map(sum, counts)):
            raise UnsupportedError(
                f"an optimizer must have parameters on some pipeline stage: number {number} "
                f"({name}) has no parameters on any of {len(stages)} stages. Build it from "
                "parameters of self in configure_optimizers."
            )
        if is_saved and len(set(map(len, counts))) > 1:
            raise UnsupportedError(
                "the optimizers of all pipeline stages must have equally many parameter groups to "
                f"be saved: number {number} ({name}) has {list(map(len, counts))}. A checkpoint "
                f"merges groups by number. {_REMEDY}"
            )
        different = None
        if is_saved:
            different = different_hyperparameters([values for _, values in groups_of_stages])
        if different is not None:
            group, key, values = different
            raise UnsupportedError(
                "a parameter group must have the same hyperparameters on all pipeline stages to be "
                f"saved: {key!r} of group {group} of optimizer {number} ({name}) is {values} by "
                "stage. A checkpoint merges groups and states of schedulers by number, so a "
                f"resumed fit would train all stages with the values of one stage. {_REMEDY}"
            )


def _groups_of(optimizer: Optimizer) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the numbers of parameters of an optimizer's groups, and their hyperparameters."""
    groups = optimizer.param_groups
    return [len(group["params"]) for group in groups], [*map(hyperparameters_of, groups)]
