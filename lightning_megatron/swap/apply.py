"""In-place replacement of a module's blocks by tensor-parallel ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import set_shard_spec, shard_spec_of, whole_spec
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.staged_blocks import StagedBlocks
from lightning_megatron.swap.blocks.build import Site
from lightning_megatron.swap.blocks.rules import BlockRule, rule_for, source_names, swapped
from lightning_megatron.swap.blocks.sequence import take_whole_inputs
from lightning_megatron.swap.blocks.whole_model import NOTE, is_cut, is_foreign, sharded_model
from lightning_megatron.swap.broadcast_values import agree_on_values
from lightning_megatron.swap.decide.checks import check_nothing_is_lost
from lightning_megatron.swap.decide.kinds import Place, choose_kinds, places_of
from lightning_megatron.swap.decide.model_plan import OwnPlan, own_plan, whole_parts
from lightning_megatron.swap.decide.model_stages import find_stages, prepare_call
from lightning_megatron.swap.decide.record import SwapRecord
from lightning_megatron.swap.decide.stages import Stages
from lightning_megatron.swap.families import Family
from lightning_megatron.swap.hugging_face.own_code import is_hugging_face, is_pretrained
from lightning_megatron.swap.hugging_face.peft_model import keep_wrappers
from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from lightning_megatron.swap.hugging_face.save_pretrained import save_from_all_ranks
from lightning_megatron.swap.pretrained.from_pretrained import give_values
from lightning_megatron.swap.pretrained.replace import (
    family_of_module,
    is_part,
    reason_to_keep,
    swapped_model,
)
from lightning_megatron.swap.ties import NewHome, tie

#: Layers below this number belong to models that number their own layers.
_FIRST_LAYER = 1_000_000

#: Attribute of a swapped block that stores its kind, so that the same plan can be applied again.
SWAPPED_AS = "swapped_as"

#: Kinds of blocks whose inputs and outputs are parts of sequences.
_KNOW_PARTS = ("column", "column_gather", "row", "row_split", "sequence")

_Choice = tuple[Place, str, BlockRule]


@dataclass(frozen=True)
class _Swap:
    place: Place
    kind: str
    target: nn.Module
    rule: BlockRule | None = None
    site: Site | None = None
    note: str = ""
    finish: Callable[[], None] | None = None


def parallelize(
    module: nn.Module,
    mesh: ParallelMesh,
    plan: Mapping[str, str] | None = None,
    pipeline_plan: Mapping[str, str] | None = None,
    shows_progress: bool = False,
    needs_tables: bool = False,
) -> list[SwapRecord]:
    """Replace blocks below ``module`` by tensor-parallel ones with this rank's weights.

    Outputs, gradients and training equal those of the original module, and parameters keep their
    names. Blocks outside the plan do not change, and every tensor-parallel rank computes them in
    full. Swapped blocks take and return complete tensors (except between ``column`` and ``row``),
    so gradients outside them are complete and equal on all tensor-parallel ranks. Before the swap,
    every rank gets the values of the first rank. If an error is raised, nothing has been swapped.

    :mod:`lightning_megatron.swap.decide.kinds` explains the kinds of the plan. Patterns
    (``fnmatch`` over dotted names; ``*`` matches dots too) that come later in the plan override
    earlier ones. A GPT or Encoder built whole always becomes one on ``mesh``. With tp=1 nothing
    else is swapped, but the plan is checked. A module swapped in an earlier run must be on
    ``mesh`` already. Exclude modules that use the weight of a layer without calling
    the layer.

    With pp above 1, any other model keeps this rank's part of a list of its blocks. The modules
    before and after the list run on the first and the last stage alone: see
    :func:`~lightning_megatron.swap.decide.stages.plan_stages`.

    Args:
        module: Root module, whose children are replaced in place.
        mesh: Process groups of this rank.
        plan: Kind by name pattern, or None.
        pipeline_plan: ``blocks``, ``first`` or ``last`` by name pattern; None means the stages that
            a Hugging Face model defines.
        shows_progress: Whether rank 0 may show a progress bar for the weights on a terminal.
        needs_tables: Whether an option was set that only models of this package support. Otherwise
            a Hugging Face model with a setting that its family's table refuses is not replaced.

    Returns:
        Records of the swapped blocks, in the order of definition.

    Raises:
        ParallelPlanError: If a pattern or a kind matches no module, a size is not divisible, or a
            shared weight would be sharded in two ways.
        UnsupportedError: If a block has settings, hooks or a layout that a swap cannot keep.

    Communication: a broadcast over all ranks for each parameter and buffer.
    """
    if any(isinstance(part, StagedBlocks) for part in module.modules()):
        # An earlier fit has swapped everything. The plan is not checked again, because its patterns
        # may name modules of other stages.
        return []
    places = places_of(module)
    _check_root(module, mesh)
    kinds = choose_kinds(places, plan, _fits)
    known = list(_known_models(places, kinds))
    kept = [] if needs_tables or mesh.ep.size > 1 else _kept(known)
    left = [place.name for place, _ in kept]
    known = [(place, family) for place, family in known if place.name not in left]
    replaced = [place.name for place, _ in known]
    planned = _with_own_plans(places, replaced, mesh) if plan is None and mesh.tp.size > 1 else []
    for place, own in planned:
        kinds |= {f"{place.name}.{name}": kind for name, kind in own.kinds.items()}
    stages = find_stages(module, places, kinds, pipeline_plan, mesh, replaced)
    swaps = _chosen(places, kinds, mesh, has_stages=stages is not None)
    own_code = list(_with_own_code(places, replaced))
    for model in own_code:
        give_values(model)
    agree_on_values(module, places, mesh)
    built = _built(module, places, known, swaps, stages, mesh, shows_progress)
    records = [_kept_record(*one) for one in kept] + [_record(swap) for swap in built]
    before = [_num_elements(place.module) for place, _ in planned]
    if stages is not None:
        prepare_call(places, stages)
    _install(places, built)
    _mark_partial(module, kinds, mesh, stages)
    if stages is not None:
        records.append(stages.install(module))
    keep_wrappers(module)
    save_from_all_ranks(own_code)
    return records + [_planned_record(*one, num) for one, num in zip(planned, before, strict=True)]


def _built(
    module: nn.Module,
    places: Sequence[Place],
    known: Sequence[tuple[Place, Family]],
    swaps: Sequence[_Choice],
    stages: Stages | None,
    mesh: ParallelMesh,
    shows_progress: bool,
) -> list[_Swap]:
    """Build the replacements of modules in the order of definition, without changing the module."""
    built = [
        _model(place, mesh) for place in _first_names(places) if is_foreign(place.module, mesh)
    ]
    built += [_known_model(place, family, mesh, shows_progress) for place, family in known]
    models = [swap.place.name for swap in built]
    here = [stages is None or stages.is_here(place.name) for place, _, _ in swaps]
    # Every block is numbered, so that its number does not depend on its stage.
    cuts_sequence = any(kind == "sequence" for _, kind, _ in swaps)
    built += [
        _block(number, *choice, mesh, cuts_sequence=cuts_sequence)
        for number, choice in enumerate(swaps)
        if here[number]
    ]
    tie(module, {key: home for swap in built for key, home in _homes(swap).items()}, models, stages)
    for swap in built:
        check_nothing_is_lost(swap.place, swap.target, stays=swap.finish is not None)
    order = {place.name: number for number, place in enumerate(places)}
    return sorted(built, key=lambda swap: order[swap.place.name])


def _fits(kind: str, module: nn.Module) -> bool:
    if kind in ("replicate", "partial") or getattr(module, SWAPPED_AS, None) == kind:
        return True
    return rule_for(kind, module) is not None or (
        kind == "auto" and isinstance(module, (GPT, Encoder, ReplacedModel))
    )


def _check_root(module: nn.Module, mesh: ParallelMesh) -> None:
    if rule_for("auto", module) is not None or is_foreign(module, mesh):
        raise UnsupportedError(
            f"the root ({type(module).__name__}) cannot be swapped in place, because nothing holds "
            "it. Make it a child of another module, such as an attribute of a LightningModule."
        )


def _first_names(places: Sequence[Place]) -> list[Place]:
    """Return the positions of modules that can be swapped, once for each module."""
    first: dict[int, Place] = {}
    for place in places:
        if place.closed_by is None:
            first.setdefault(id(place.module), place)
    return list(first.values())


def _chosen(
    places: Sequence[Place], kinds: Mapping[str, str], mesh: ParallelMesh, *, has_stages: bool
) -> list[_Choice]:
    chosen: list[_Choice] = []
    encoders: list[tuple[Place, nn.TransformerEncoder]] = []
    whole = ""
    for place in _first_names(places):
        kind = kinds.get(place.name, "replicate")
        rule = rule_for(kind, place.module)
        if kind == "sequence" and not mesh.sequence_parallel:
            continue
        if whole and place.name.startswith(whole):
            continue
        if isinstance(place.module, nn.TransformerDecoderLayer) and rule is not None:
            if not all(
                kind == "auto" for name, kind in kinds.items() if name.startswith(f"{place.name}.")
            ):
                # The plan shards the parts of this layer one by one.
                continue
            whole = f"{place.name}."
        if isinstance(place.module, nn.TransformerEncoder):
            encoders.append((place, place.module))
        elif rule is not None:
            chosen.append((place, kind, rule))
    _check_layout(chosen, mesh, has_stages)
    if mesh.tp.size == 1:
        return []
    layers = {id(place.module) for place, _, _ in chosen}
    for place, encoder in encoders:
        # An encoder with a swapped layer is always replaced, because its packing of padded batches
        # does not work with sharded layers.
        if any(id(layer) in layers for layer in encoder.layers):
            chosen.append((place, "auto", _encoder_rule(place)))
    return chosen


def _encoder_rule(place: Place) -> BlockRule:
    rule = rule_for("auto", place.module)
    if rule is None:
        raise UnsupportedError(
            f"the layers of {place.name!r} cannot be cut over tp, because "
            f"{type(place.module).__name__} may read their weights as torch.nn.TransformerEncoder "
            "does. Use that class, or give it the kind 'replicate'."
        )
    return rule


def _check_layout(chosen: Sequence[_Choice], mesh: ParallelMesh, has_stages: bool) -> None:
    for place, kind, _ in chosen:
        if mesh.cp.size > 1 and kind == "auto":
            raise UnsupportedError(
                f"the attention of {place.name!r} sees whole sequences, but cp ({mesh.cp.size}) "
                "cuts them. Use cp 1."
            )
        if mesh.pp.size > 1 and mesh.tp.size > 1 and not has_stages:
            raise UnsupportedError(
                f"the block {place.name!r} can be cut over tp only, because no pipeline stages are "
                f"known of the model: pp is {mesh.pp.size}. Use pp 1, or name its list of blocks "
                "in pipeline_plan."
            )


def _model(place: Place, mesh: ParallelMesh) -> _Swap:
    model = sharded_model(place.name, place.module, mesh)
    return _Swap(place, "model", model, note=NOTE if is_cut(mesh) else "")


def _known_models(
    places: Sequence[Place], kinds: Mapping[str, str]
) -> Iterator[tuple[Place, Family]]:
    """List Hugging Face models with a family, except those that the plan excludes or cuts."""
    around: list[str] = []
    taken: list[str] = []
    for place in _first_names(places):
        if not is_hugging_face(place.module) or _is_inside(place, taken):
            continue
        family = family_of_module(place.module)
        within = _is_inside(place, around)
        around.append(place.name)
        inside = {
            kind
            for name, kind in kinds.items()
            if name == place.name or name.startswith(f"{place.name}.")
        }
        if family is not None and inside <= {"auto"} and not (within and is_part(place.module)):
            taken.append(place.name)
            yield place, family


def _kept(known: Sequence[tuple[Place, Family]]) -> list[tuple[Place, str]]:
    """List the models with a setting that their family's table lacks, each with the reason."""
    return [
        (place, reason)
        for place, family in known
        if (reason := reason_to_keep(place.module, family))
    ]


def _kept_record(place: Place, reason: str) -> SwapRecord:
    model = type(place.module).__name__
    size = _num_elements(place.module)
    return SwapRecord(
        place.name,
        "Hugging Face's own module",
        model,
        model,
        size,
        size,
        f"It is kept, because {reason}",
    )


def _is_inside(place: Place, names: Sequence[str]) -> bool:
    return any(place.name.startswith(f"{name}.") for name in names)


def _known_model(place: Place, family: Family, mesh: ParallelMesh, shows_progress: bool) -> _Swap:
    model = swapped_model(place.name, place.module, family, mesh, shows_progress)
    return _Swap(place, "model", model.layers, note=model.note, finish=model.finish)


def _with_own_code(places: Sequence[Place], replaced: Sequence[str]) -> Iterator[nn.Module]:
    """List the Hugging Face models that are not replaced, nested ones included."""
    for place in _first_names(places):
        if (
            is_pretrained(place.module)
            and place.name not in replaced
            and not _is_inside(place, replaced)
        ):
            yield place.module


def _with_own_plans(
    places: Sequence[Place], replaced: Sequence[str], mesh: ParallelMesh
) -> list[tuple[Place, OwnPlan]]:
    """List the Hugging Face models that are not replaced, with their own plans."""
    taken = list(replaced)
    found = []
    for place in _first_names(places):
        if (
            is_hugging_face(place.module)
            and place.name not in taken
            and not _is_inside(place, taken)
        ):
            taken.append(place.name)
            found.append((place, own_plan(place.module, mesh.tp.size, place.name)))
    return found


def _planned_record(place: Place, own: OwnPlan, before: int) -> SwapRecord:
    model = type(place.module).__name__
    local = _num_elements(place.module)
    return SwapRecord(place.name, str(own), model, model, before, local, whole_parts(place.module))


def _block(
    number: int,
    place: Place,
    kind: str,
    rule: BlockRule,
    mesh: ParallelMesh,
    *,
    cuts_sequence: bool,
) -> _Swap:
    # Inputs and outputs of a plain module are whole sequences, with the batch first or second.
    mesh = replace(mesh, sequence_parallel=False)
    site = Site(
        place.name,
        place.module,
        mesh,
        _FIRST_LAYER + number,
        cuts_sequence and kind in _KNOW_PARTS,
        place.parent,
    )
    return _Swap(place, kind, swapped(rule, site), rule, site)


def _homes(swap: _Swap) -> dict[str, NewHome]:
    if swap.rule is None or swap.site is None:
        return {}
    return {
        key: NewHome(swap.target, name, swap.kind)
        for key, name in source_names(swap.rule, swap.site).items()
    }


def _mark_partial(
    module: nn.Module, kinds: Mapping[str, str], mesh: ParallelMesh, stages: Stages | None
) -> None:
    for name in (name for name, kind in kinds.items() if kind == "partial" and mesh.tp.size > 1):
        if stages is None or stages.is_here(name):
            for parameter in module.get_submodule(name).parameters():
                set_shard_spec(parameter, whole_spec(parameter, mesh.tp.rank, partial=True))


def _record(swap: _Swap) -> SwapRecord:
    source, target = swap.place.module, swap.target
    full, local = _num_elements(source), _num_elements(target)
    ours = (
        type(target).__bases__[0]
        if swap.finish is not None and isinstance(target, GPT)
        else type(target)
    )
    return SwapRecord(
        swap.place.name, swap.kind, type(source).__name__, ours.__name__, full, local, swap.note
    )


def _num_elements(module: nn.Module) -> int:
    """Count elements, excluding the padding of vocabularies."""
    return sum(prod(box.sizes) for p in module.parameters() for box in shard_spec_of(p).boxes())


def _install(places: Sequence[Place], built: Sequence[_Swap]) -> None:
    targets = {id(swap.place.module): swap.target for swap in built if swap.finish is None}
    cuts_sequence = any(swap.kind == "sequence" for swap in built)
    for swap in built:
        if swap.finish is not None:
            # The model is changed in place and stays the same object.
            swap.finish()
            continue
        setattr(swap.target, SWAPPED_AS, swap.kind)
        if cuts_sequence and swap.kind not in (*_KNOW_PARTS, "model"):
            take_whole_inputs(swap.target)
    for place in places:
        if place.closed_by is None and id(place.module) in targets:
            setattr(place.parent, place.key, targets[id(place.module)])
