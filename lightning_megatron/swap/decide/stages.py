"""Pipeline stages of models without a family."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import set_shard_spec, shard_spec_of
from lightning_megatron.models.outer_modules import (
    FirstStageParameter,
    LocalModule,
    RemoteModule,
    meta_copy_of,
)
from lightning_megatron.models.staged_blocks import StagedBlocks
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.partition import LayerCosts, LayerPartition, partition_of
from lightning_megatron.plan.settings import join_or
from lightning_megatron.swap.decide.kinds import (
    ModuleSite,
    SwapRecord,
    check_kind,
    originals_of_averages,
)

#: Kinds of a pipeline plan.
KINDS: Mapping[str, str] = {
    "blocks": "the nn.ModuleList or nn.Sequential whose blocks are divided among the stages",
    "first": "a module that runs before the blocks",
    "last": "a module that runs after the blocks",
}
_NUM_SHOWN = 5


@dataclass(frozen=True)
class OuterModule:
    """Module outside the list of blocks, on the first or the last stage.

    Args:
        is_before: Whether the module runs before the blocks.
        is_explicit: Whether the plan assigns the stage; otherwise the order of definition does.
        is_moved: Whether the module is defined on the other side of the blocks than it runs.
    """

    site: ModuleSite
    is_before: bool
    is_explicit: bool = False
    is_moved: bool = False


@dataclass(frozen=True)
class Stages:
    """Parts of a model that this rank keeps.

    Args:
        ends: Modules outside the list that have parameters.
        outer_owners: Parameters that the modules around the list own directly: owner, name in the
            owner and full name. They belong to the first stage.
        ties: Name of the original parameter on the first stage, by the name of each copy on the
            last stage.
        twins: Copies of the blocks without values, made before layers are sharded over tp.
        end_twins: Copies of the modules outside the list, made in the same way.
        prepare: Function that prepares the calls of a Hugging Face model around the blocks; None
            if there is no such model.
    """

    blocks: ModuleSite
    partition: LayerPartition
    ends: tuple[OuterModule, ...]
    outer_owners: tuple[tuple[nn.Module, str, str], ...]
    ties: Mapping[str, str]
    twins: tuple[nn.Module, ...]
    end_twins: tuple[nn.Module, ...]
    mesh: ParallelMesh
    prepare: Callable[[], None] | None = None

    @property
    def layers(self) -> tuple[tuple[range, ...], ...]:
        """Return the indices of the blocks, as ``layers[stage][chunk]``."""
        return self.partition.by_stage(self.mesh.layout.placement)

    def is_on_stage(self, name: str) -> bool:
        """Return whether this rank has the module or parameter with a name."""
        prefix = f"{self.blocks.name}."
        if name.startswith(prefix):
            index = int(name.removeprefix(prefix).partition(".")[0])
            return any(index in layers for layers in self.layers[self.mesh.pp.rank])
        return not any(
            f"{name}.".startswith(f"{end.site.name}.") for end in self.ends if not self._holds(end)
        )

    def _holds(self, end: OuterModule) -> bool:
        return self.mesh.pp.is_first if end.is_before else self.mesh.has_loss

    def install(self, root: nn.Module) -> SwapRecord:
        """Remove other stages' modules in place; parameters keep their names."""
        if self.prepare is not None:
            self.prepare()
        before = sum(p.numel() for p in self.blocks.module.parameters())
        # The list may have been replaced since planning, so look it up again.
        source: Any = root.get_submodule(self.blocks.name)
        kept = [(root.get_submodule(end.site.name), True) for end in self.ends if self._holds(end)]
        kept += [(owner, False) for owner, _, _ in self.outer_owners if self.mesh.pp.is_first]
        staged = StagedBlocks(self.blocks.name, source, self.twins, self.partition, self.mesh, kept)
        setattr(root.get_submodule(self.blocks.name.rpartition(".")[0]), self.blocks.key, staged)
        staged.plan = {self.blocks.name: "blocks"} | {
            end.site.name: "first" if end.is_before else "last"
            for end in self.ends
            if end.is_explicit
        }
        for end, twin in zip(self.ends, self.end_twins, strict=True):
            remote = RemoteModule(end.site.name, twin, staged, end.is_before)
            site = end.site
            staged.remote_modules.append(remote)
            if self._holds(end):
                staged.outer_parts.append(LocalModule(site.parent, site.key, remote, staged))
            else:
                site.module.to("meta")
                setattr(site.parent, site.key, remote)
        staged.outer_parts += [
            FirstStageParameter(*owner, staged, self.mesh.pp.is_first)
            for owner in self.outer_owners
        ]
        for copy, original in self.ties.items() if self.mesh.has_loss else ():
            parameter = root.get_parameter(copy)
            set_shard_spec(parameter, shard_spec_of(parameter, self.mesh.tp.rank).tied(original))
        return self._record(before, sum(p.numel() for p in staged.parameters()))

    def _record(self, old: int, new: int) -> SwapRecord:
        held = ", ".join(
            f"{layers.start} to {layers.stop - 1}" if layers else "none"
            for layers in self.layers[self.mesh.pp.rank]
        )
        before = ", ".join(end.site.name for end in self.ends if end.is_before)
        after = ", ".join(end.site.name for end in self.ends if not end.is_before)
        num_blocks = len(self.blocks.module)  # type: ignore[arg-type]
        note = (
            f"Blocks {held} of {num_blocks} here; only on the first stage: "
            f"{before or 'nothing else'}; only on the last: {after or 'nothing else'}."
        )
        source = type(self.blocks.module).__name__
        return SwapRecord(self.blocks.name, "blocks", source, StagedBlocks.__name__, old, new, note)


def plan_stages(
    root: nn.Module,
    sites: Sequence[ModuleSite],
    plan: Mapping[str, str],
    kinds: Mapping[str, str],
    mesh: ParallelMesh,
    whole: Sequence[str] = (),
) -> Stages | None:
    """Assign the parts of a model with a list of blocks to stages; None for a single stage.

    A module with parameters is on the first stage if it is defined before the list, and on the last
    stage if it is defined after the list, unless the plan assigns it. The copy in an
    ``AveragedModel`` is on the stage of the module that it averages. Modules without parameters and
    frozen models beside the list are on all stages.

    Args:
        plan: ``blocks``, ``first`` or ``last`` by name pattern; exactly one module is ``blocks``.
    """
    blocks = _find_blocks(sites, plan)
    layout = mesh.layout
    if layout.pp == 1:
        return None
    costs = LayerCosts.equal(len(blocks.module))  # type: ignore[arg-type]
    partition = partition_of(costs, layout)
    enclosing = _enclosing_modules(root, blocks.name)
    ends = tuple(end for end in _ends(enclosing, blocks, plan) if end.site.name not in whole)
    _check_sides(sites, blocks, ends, plan)
    outer_owners = tuple(
        (module, key, f"{prefix}.{key}" if prefix else key)
        for prefix, module in enclosing
        for key, parameter in module._parameters.items()
        if parameter is not None
    )
    layers = partition.by_stage(layout.placement)
    outer = frozenset(id(module) for _, module in enclosing)
    owners = _Owners(blocks.name, layers, ends, outer, layout.loss_stage)
    ends = tuple(_beside_originals(owners, originals_of_averages(sites)))
    owners = replace(owners, ends=ends)
    _check_moved_ends(ends, partition, layers, layout)
    ties = _ties(root, owners, kinds)
    twins = tuple(meta_copy_of(block) for block in blocks.module.children())
    end_twins = tuple(meta_copy_of(end.site.module) for end in ends)
    return Stages(blocks, partition, ends, outer_owners, ties, twins, end_twins, mesh)


def _find_blocks(sites: Sequence[ModuleSite], plan: Mapping[str, str]) -> ModuleSite:
    names = [site.name for site in sites]
    blocks: list[ModuleSite] = []
    for pattern, kind in plan.items():
        check_kind(pattern, kind, KINDS, "pipeline_plan")
        matching = [site for site in sites if fnmatchcase(site.name, pattern)]
        if not matching:
            near = get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
            raise ParallelPlanError(
                f"every pattern of pipeline_plan must match a module: {pattern!r} matches no "
                f"module. Did you mean {join_or([repr(name) for name in near])}?"
            )
        blocks += matching if kind == "blocks" else []
    lists = [site.name for site in sites if type(site.module) in (nn.ModuleList, nn.Sequential)]
    if len(blocks) != 1 or blocks[0].name not in lists:
        named = (
            ", ".join(f"{site.name!r} ({type(site.module).__name__})" for site in blocks)
            or "nothing"
        )
        raise ParallelPlanError(
            "pipeline_plan must give exactly one nn.ModuleList or nn.Sequential the kind 'blocks', "
            f"because its blocks are divided among the stages: {named} has this kind. Use "
            f"{join_or([repr(name) for name in lists[:_NUM_SHOWN]]) if lists else 'pp=1'}."
        )
    return blocks[0]


def _enclosing_modules(root: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """List the modules around the blocks, from the root inwards."""
    parents = accumulate(name.split(".")[:-1], "{}.{}".format)
    return [(parent, root.get_submodule(parent)) for parent in ("", *parents)]


def _ends(
    enclosing: Sequence[tuple[str, nn.Module]], blocks: ModuleSite, plan: Mapping[str, str]
) -> Iterator[OuterModule]:
    for prefix, module in enclosing:
        is_before = True
        for key, child in module._modules.items():
            name = f"{prefix}.{key}" if prefix else key
            if child is None:
                continue
            if blocks.name == name or blocks.name.startswith(f"{name}."):
                is_before = False
            elif next(child.parameters(), None) is not None:
                # Every stage has an AveragedModel and its count, and one stage has the copy in it.
                site = (
                    ModuleSite(f"{name}.module", child, "module", child.module)
                    if isinstance(child, AveragedModel)
                    else ModuleSite(name, module, key, child)
                )
                explicit = [
                    kind for pattern, kind in plan.items() if fnmatchcase(site.name, pattern)
                ]
                runs_before = explicit[-1] == "first" if explicit else is_before
                yield OuterModule(site, runs_before, bool(explicit), runs_before != is_before)


def _beside_originals(
    owners: _Owners, originals: Mapping[str, Sequence[str]]
) -> Iterator[OuterModule]:
    """Yield the outer modules, with copies of an ``AveragedModel`` on the stages of originals."""
    for end in owners.ends:
        names = originals.get(end.site.name, ())
        stages = {owners.stage_of(name, end.site.module) for name in names}
        here = 0 if end.is_before else owners.loss_stage
        if not stages or here in stages:
            yield end
        elif 0 in stages and not end.is_explicit:
            yield replace(end, is_before=True, is_moved=not end.is_moved)
        elif owners.loss_stage in stages and not end.is_explicit:
            yield replace(end, is_before=False, is_moved=not end.is_moved)
        else:
            average = end.site.name.removesuffix(".module")
            reason = (
                f"its blocks {owners.blocks!r} are divided among the stages"
                if None in stages
                else "only another stage has it"
            )
            raise UnsupportedError(
                f"the AveragedModel {average!r} cannot average {names[0]!r} with pp above 1: "
                f"{reason}. Leave {average!r} out of pipeline_plan if it is there, use Lightning's "
                "EMAWeightAveraging callback, which averages the whole module, or use pp=1."
            )


def _check_sides(
    sites: Sequence[ModuleSite],
    blocks: ModuleSite,
    ends: Sequence[OuterModule],
    plan: Mapping[str, str],
) -> None:
    known = [end.site.name for end in ends]
    without_parameters = {
        site.name for site in sites if next(site.module.parameters(), None) is None
    }
    for pattern, kind in plan.items():
        matching = [site.name for site in sites if fnmatchcase(site.name, pattern)]
        # A module without parameters runs on every stage, so a plan cannot assign it.
        if kind != "blocks" and not any(
            name in known or name in without_parameters for name in matching
        ):
            raise ParallelPlanError(
                f"pipeline_plan can give the kind {kind!r} only to a whole module outside of "
                f"{blocks.name!r}: {matching[0]!r} is not one. Use "
                f"{join_or([repr(name) for name in known])}."
            )


def _check_moved_ends(
    ends: Sequence[OuterModule],
    partition: LayerPartition,
    layers: Sequence[Sequence[range]],
    layout: ParallelLayout,
) -> None:
    """Raise if the order of a stage's parameters is not known, because a module is moved."""
    for end in ends:
        stage = 0 if end.is_before else layout.loss_stage
        if end.is_moved and not any(layers[stage]):
            raise ParallelPlanError(
                f"the stage of {end.site.name!r} must have a block, because pipeline_plan runs it "
                "on the other side of the blocks than it is defined, and without a block the order "
                f"of the stage's parameters is not known: stage_layers is {partition}. Give stage "
                f"{stage} a block, or define the module on the side where it runs."
            )


@dataclass(frozen=True)
class _Owners:
    """Lookup of the stage that owns a parameter.

    Args:
        enclosing: Identities of the modules around the list, whose own parameters belong to the
            first stage.
        loss_stage: Stage that computes the loss, and has the modules after the list.
    """

    blocks: str
    layers: Sequence[Sequence[range]]
    ends: Sequence[OuterModule]
    enclosing: frozenset[int]
    loss_stage: int

    def stage_of(self, path: str, owner: nn.Module) -> int | None:
        """Return the stage of a module's direct parameters; None outside the model."""
        if path.startswith(f"{self.blocks}."):
            index = int(path.removeprefix(f"{self.blocks}.").partition(".")[0])
            return next(
                stage
                for stage, chunks in enumerate(self.layers)
                for layers in chunks
                if index in layers
            )
        end = self.end_of(path)
        if end is not None:
            return 0 if end.is_before else self.loss_stage
        return 0 if id(owner) in self.enclosing else None

    def end_of(self, path: str) -> OuterModule | None:
        """Return the outer module that is or contains a module; None if there is none."""
        return next((end for end in self.ends if f"{path}.".startswith(f"{end.site.name}.")), None)


def _ties(root: nn.Module, owners: _Owners, kinds: Mapping[str, str]) -> dict[str, str]:
    uses: dict[int, list[tuple[str, str, int | None]]] = {}
    for path, owner in root.named_modules(remove_duplicate=False):
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                uses.setdefault(id(parameter), []).append(
                    (f"{path}.{key}", path, owners.stage_of(path, owner))
                )
    ties: dict[str, str] = {}
    last = owners.loss_stage
    for shared in uses.values():
        stages = {stage for _, _, stage in shared}
        if len(stages) == 1:
            continue
        at_ends = stages == {0, last} and all(owners.end_of(path) for _, path, _ in shared)
        if not at_ends or len({kinds.get(path, "replicate") for _, path, _ in shared}) > 1:
            raise UnsupportedError(
                f"{' and '.join(repr(name) for name, _, _ in shared)} share one weight across "
                "pipeline stages. Only an embedding and an output layer that are cut alike over tp "
                "can share a weight. Use separate weights, or pp=1."
            )
        original = next(name for name, _, stage in shared if stage == 0)
        ties[next(name for name, _, stage in shared if stage == last)] = original
    return ties
