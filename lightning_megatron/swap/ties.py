"""Weights that several modules share, before and after a swap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.swap.decide.stages import Stages


@dataclass(frozen=True)
class NewHome:
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


def tie(
    root: nn.Module,
    homes: Mapping[str, NewHome],
    closed: Sequence[str] = (),
    stages: Stages | None = None,
) -> None:
    """Share parameters of the targets in the same way as their sources; do not change ``root``.

    Args:
        root: Module before the swap.
        homes: New home of each swapped parameter, by its full name in ``root``.
        closed: Names of whole models that are replaced, which may share weights within themselves
            only.
        stages: Parts of a staged model that this rank keeps.

    Raises:
        ParallelPlanError: If a shared weight is sharded differently in two places, or only in one.
    """
    names: dict[int, list[str]] = {}
    for path, owner in root.named_modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None and (stages is None or stages.is_here(f"{path}.{key}")):
                names.setdefault(id(parameter), []).append(f"{path}.{key}" if path else key)
    for shared in names.values():
        if len(shared) > 1:
            _check_models(shared, closed)
            _tie_one(shared, homes)


def _check_models(shared: Sequence[str], closed: Sequence[str]) -> None:
    models = {next((name for name in closed if key.startswith(f"{name}.")), "") for key in shared}
    if len(models) > 1:
        raise ParallelPlanError(
            f"{' and '.join(repr(key) for key in shared)} share one weight across the border of a "
            "model that is cut as a whole. The shared weight would fall apart. Use "
            "GPTConfig(tie_embeddings=True) or separate weights."
        )


def _tie_one(shared: Sequence[str], homes: Mapping[str, NewHome]) -> None:
    moved = [homes[key] for key in shared if key in homes]
    if not moved:
        return
    first = moved[0].parameter
    same = all(
        shard_spec_of(home.parameter) == shard_spec_of(first)
        and home.parameter.shape == first.shape
        for home in moved
    )
    if len(moved) < len(shared) or not same:
        kinds = ", ".join(
            f"{key!r} is {homes[key].kind if key in homes else 'replicate'!r}" for key in shared
        )
        raise ParallelPlanError(
            f"modules that share one weight must cut it alike: {kinds}. Cut differently, the "
            "weights would drift apart. Give all of them the kind 'replicate', or 'vocab' where an "
            "embedding and an output layer share a weight."
        )
    for home in moved[1:]:
        home.adopt(first)
