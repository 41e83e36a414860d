"""Decisions to replace single modules, each of which builds its replacement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.swap.blocks.builders import BlockRequest
from lightning_megatron.swap.blocks.rules import (
    BlockRule,
    build_target,
    fill_target,
    source_names,
)
from lightning_megatron.swap.blocks.whole_model import NOTE, build_model, fill_model, is_cut
from lightning_megatron.swap.decide.kinds import ModuleSite
from lightning_megatron.swap.families import Family
from lightning_megatron.swap.pretrained.replace import build_swapped_model

#: Kind of a module that is replaced as a whole model.
WHOLE_MODEL = "model"


@dataclass(frozen=True)
class Swap:
    """Replacement of one module, built without values and not yet installed.

    Args:
        site: Module that is replaced, with its position.
        kind: Kind of the block in the plan, or ``model``.
        target: Replacement.
        fill: Function that gives the replacement this rank's part of the module's values, and
            returns a text for the log.
        install: Function that puts the replacement into the module, which stays the same object;
            None if the replacement takes the module's place in its parent.
        sources: Names of the target's parameters, by full names of the parameters whose values they
            take over.
    """

    site: ModuleSite
    kind: str
    target: nn.Module
    fill: Callable[[], str]
    install: Callable[[], None] | None = None
    sources: Mapping[str, str] = field(default_factory=dict)


class Replacement(Protocol):
    """Decision to replace one module."""

    @property
    def site(self) -> ModuleSite:
        """Return the module with its position."""

    @property
    def kind(self) -> str:
        """Return the kind of the block in the plan, or ``model``."""

    def build(self) -> Swap:
        """Build the replacement without values; do not change the module."""


@dataclass(frozen=True)
class BlockReplacement:
    """Decision to replace a torch.nn block by a tensor-parallel one.

    Args:
        site: Block with its position.
        kind: Kind of the block in the plan.
        rule: Rule for its replacement.
        request: Arguments of the rule's builder.
    """

    site: ModuleSite
    kind: str
    rule: BlockRule
    request: BlockRequest

    def build(self) -> Swap:
        """Build the replacement without values."""
        target = build_target(self.rule, self.request)

        def fill() -> str:
            fill_target(self.rule, self.request, target)
            return ""

        sources = source_names(self.rule, self.request)
        return Swap(self.site, self.kind, target, fill, sources=sources)


@dataclass(frozen=True)
class WholeModelReplacement:
    """Decision to replace a GPT or an Encoder that was built whole by this rank's part.

    Args:
        site: Model with its position.
        mesh: Process groups of this rank.
    """

    site: ModuleSite
    mesh: ParallelMesh
    kind: str = WHOLE_MODEL

    def build(self) -> Swap:
        """Build the replacement without values."""
        target = build_model(self.site.name, self.site.module, self.mesh)

        def fill() -> str:
            fill_model(target, self.site.module, self.mesh.device)
            return NOTE if is_cut(self.mesh) else ""

        return Swap(self.site, self.kind, target, fill)


@dataclass(frozen=True)
class FamilyReplacement:
    """Decision to replace the computation of a Hugging Face model of a known family.

    Args:
        site: Model with its position.
        family: Family of the model.
        mesh: Process groups of this rank.
        shows_progress: Whether rank 0 may show a progress bar while it reads a folder.
    """

    site: ModuleSite
    family: Family
    mesh: ParallelMesh
    shows_progress: bool
    kind: str = WHOLE_MODEL

    def build(self) -> Swap:
        """Build the replacement without values."""
        model = build_swapped_model(
            self.site.name, self.site.module, self.family, self.mesh, self.shows_progress
        )
        return Swap(self.site, self.kind, model.layers, model.fill, model.install)
