"""Weights that several modules share, before and after a swap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torch import nn

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.shard_spec import shard_spec_of


@dataclass(frozen=True)
class TargetParameter:
    """Parameter that takes over the values of a source parameter.

    Args:
        block: Target block.
        name: Dotted name of the parameter in it.
        kind: Kind of the block in the plan, for errors.
    """

    block: nn.Module
    name: str
    kind: str

    @property
    def parameter(self) -> nn.Parameter:
        """Return the parameter."""
        return self.block.get_parameter(self.name)

    def adopt(self, parameter: nn.Parameter) -> None:
        """Replace the parameter by another one."""
        path, _, key = self.name.rpartition(".")
        setattr(self.block.get_submodule(path), key, parameter)


def share_weights(
    root: nn.Module,
    targets: Mapping[str, TargetParameter],
    models: Sequence[str],
    here: Set[str],
) -> None:
    """Share parameters of the targets in the same way as their sources; do not change ``root``.

    Args:
        root: Module before the swap.
        targets: Target of each swapped parameter, by its full name in ``root``.
        models: Names of whole models that are replaced, which may share weights within themselves
            only.
        here: Names of the modules of this rank's stage.

    Raises:
        ParallelPlanError: If a shared weight is sharded differently in two places, or only in one.
    """
    names: dict[int, list[str]] = {}
    for path, owner in root.named_modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None and (not path or path in here):
                names.setdefault(id(parameter), []).append(f"{path}.{key}" if path else key)
    for shared in names.values():
        if len(shared) > 1:
            _check_models(shared, models)
            _share(shared, targets)


def _check_models(shared: Sequence[str], models: Sequence[str]) -> None:
    around = {next((name for name in models if key.startswith(f"{name}.")), "") for key in shared}
    if len(around) > 1:
        raise ParallelPlanError(
            f"{' and '.join(repr(key) for key in shared)} share one weight across the border of a "
            "model that is replaced as a whole. They would become separate weights. Use "
            "GPTConfig(tie_embeddings=True) or separate weights."
        )


def _share(shared: Sequence[str], targets: Mapping[str, TargetParameter]) -> None:
    moved = [targets[key] for key in shared if key in targets]
    if not moved:
        return
    first = moved[0].parameter
    same = all(
        shard_spec_of(target.parameter) == shard_spec_of(first)
        and target.parameter.shape == first.shape
        for target in moved
    )
    if len(moved) < len(shared) or not same:
        kinds = ", ".join(
            f"{key!r} is {targets[key].kind if key in targets else 'replicate'!r}" for key in shared
        )
        raise ParallelPlanError(
            f"modules that share one weight must cut it alike: {kinds}. Otherwise their parts "
            "would not be equal. Give all of them the kind 'replicate', or 'vocab' where an "
            "embedding and an output layer share a weight."
        )
    for target in moved[1:]:
        target.adopt(first)
