"""Tensor-parallel plans: kinds of cuts for blocks, by patterns over module names.

``docs/modules.md`` explains the kinds to users. Under sequence parallelism, ``row`` layers and
modules of the kind ``sequence`` return this rank's part of the positions; ``column`` layers gather
the parts, and so does every module that does not treat each position separately. The first batch
checks that only code that treats every feature separately stands between ``column`` and ``row``.
If the strategy runs the backward pass, the first training step finds ``partial`` modules.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.experts.own_lists import stacks_of
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.stage import PipelinedModule, computed_by
from lightning_megatron.plan.settings import join_or
from lightning_megatron.swap.blocks.rules import BlockRule, rules_of
from lightning_megatron.swap.hugging_face.own_code import is_hugging_face
from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel

#: Kind of a list of experts, and of a module with stacks of them.
EXPERTS = "experts"

#: Kinds of a plan, with the blocks that each applies to.
KINDS: Mapping[str, str] = {
    "auto": "nn.TransformerEncoderLayer, nn.TransformerDecoderLayer and nn.MultiheadAttention, "
    "alone or inside the named module",
    "column": "nn.Linear whose outputs stay cut",
    "column_gather": "nn.Linear whose outputs are gathered",
    "column_full": "nn.Linear whose outputs are cut, while your code sees all of them",
    "qkv": "nn.Linear that computes queries, keys and values; 'qkv(8, 2)' has 8 heads and 2 groups",
    "gate_up": "nn.Linear that computes the gate and the values of an MLP",
    "row": "nn.Linear whose inputs are cut",
    "row_split": "nn.Linear that takes its part of complete inputs, or of those of column_full",
    "vocab": "nn.Embedding, or nn.Linear with a vocabulary of any size as outputs",
    "dropout": "nn.Dropout between a column and a row layer",
    "sequence": "nn.LayerNorm, nn.RMSNorm and nn.Dropout outside of column and row layers",
    "features": (
        "any module between a column and a row layer whose parameters have a row for every feature "
        "or head"
    ),
    "partial": "any module between a column and a row layer that is used with all of its weights "
    "on a part of the heads",
    EXPERTS: "nn.ModuleList of equal experts, or a module with stacks of them, which ep divides",
    "replicate": "any module, which then keeps its own code",
}

#: Kinds of layers whose outputs are cut, while user code sees all of them.
FULL_VIEWS = ("column_full", "qkv", "gate_up")

#: A kind with numbers of heads and groups of keys and values.
_WITH_SIZES = re.compile(r"(qkv)\((\d+), ?(\d+)\)")

#: Attribute of a swapped block with its kind, so that the same plan can be applied again.
SWAPPED_AS = "swapped_as"

#: Kinds that apply to everything inside the module that a pattern names.
_SUBTREE_KINDS = ("auto", "replicate")

#: Blocks that read the weights of their children directly, so that the children cannot be swapped
#: separately.
_INDIVISIBLE_BLOCKS = (nn.TransformerEncoderLayer, nn.MultiheadAttention, PipelinedModule)


@dataclass(frozen=True)
class ModuleSite:
    """Position of a module in its parent.

    Args:
        closed_by: Name of the surrounding block whose children cannot be swapped separately; None
            if there is none.
    """

    name: str
    parent: nn.Module
    key: str
    module: nn.Module
    closed_by: str | None = None
    rules: Mapping[str, BlockRule] = field(default_factory=dict)

    def is_inside(self, names: Iterable[str]) -> bool:
        """Return whether the module is inside one of the named modules."""
        return any(self.name.startswith(f"{name}.") for name in names)


def sites_of(root: nn.Module) -> list[ModuleSite]:
    """List all modules below ``root`` in the order of definition, once for each name."""
    return list(_sites(root, "", None))


def _sites(parent: nn.Module, prefix: str, closed_by: str | None) -> Iterator[ModuleSite]:
    # named_children would omit the second name of a shared module.
    for key, child in parent._modules.items():
        if child is None:
            continue
        name = f"{prefix}{key}"
        yield ModuleSite(name, parent, key, child, closed_by, rules_of(child))
        is_closed = isinstance(child, _INDIVISIBLE_BLOCKS) or computed_by(child) is not None
        inner = name if closed_by is None and is_closed else closed_by
        yield from _sites(child, f"{name}.", inner)


def unique_sites(sites: Sequence[ModuleSite]) -> list[ModuleSite]:
    """Return the sites of modules that can be swapped, once for each module."""
    first: dict[int, ModuleSite] = {}
    for site in sites:
        if site.closed_by is None:
            first.setdefault(id(site.module), site)
    return list(first.values())


def choose_kinds(sites: Sequence[ModuleSite], plan: Mapping[str, str] | None) -> dict[str, str]:
    """Return the kind of every module that the plan matches, by name.

    A pattern must match the full dotted name; ``*`` also matches dots. ``auto`` and ``replicate``
    apply to everything inside the named module as well. If several patterns match, the last one in
    the plan applies. Without a plan every module is ``auto``.
    """
    if plan is None:
        return {site.name: "auto" for site in sites if site.closed_by is None}
    kinds: dict[str, str] = {}
    for pattern, kind in plan.items():
        check_kind(pattern, kind, KINDS, "the plan")
        matching = [site for site in sites if _matches(pattern, kind, site.name)]
        fitting = [site for site in matching if site.closed_by is None and _fits(kind, site)]
        if not fitting:
            raise ParallelPlanError(_nothing_fits(pattern, kind, sites, matching))
        kinds.update((site.name, kind) for site in fitting)
    _check_shared(sites, kinds)
    return kinds


def split_kind(kind: str) -> tuple[str, tuple[int, ...]]:
    """Return the name of a kind, and the numbers of heads and groups that follow it."""
    found = _WITH_SIZES.fullmatch(kind)
    return (found[1], (int(found[2]), int(found[3]))) if found else (kind, ())


def _fits(kind: str, site: ModuleSite) -> bool:
    if kind == EXPERTS:
        return type(site.module) is nn.ModuleList or bool(stacks_of(site.module))
    if kind in ("replicate", "partial") or getattr(site.module, SWAPPED_AS, None) == kind:
        return True
    is_model = isinstance(site.module, (GPT, Encoder, ReplacedModel))
    return split_kind(kind)[0] in site.rules or (kind == "auto" and is_model)


def _matches(pattern: str, kind: str, name: str) -> bool:
    if fnmatchcase(name, pattern):
        return True
    if kind not in _SUBTREE_KINDS:
        return False
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts)))


def check_kind(pattern: str, kind: str, kinds: Collection[str], plan: str) -> None:
    """Refuse a value that is not a kind of a plan."""
    if split_kind(kind)[0] not in kinds:
        raise ParallelPlanError(
            f"{plan} gives {pattern!r} the kind {kind!r}, which does not exist. Use "
            f"{join_or([repr(known) for known in kinds])}."
        )


def _nothing_fits(
    pattern: str, kind: str, sites: Sequence[ModuleSite], matching: Sequence[ModuleSite]
) -> str:
    head = (
        f"every pattern of the plan must match a module that can have the kind {kind!r}: "
        f"{pattern!r} matches "
    )
    if matching and matching[0].closed_by is not None:
        outer = next(site for site in sites if site.name == matching[0].closed_by)
        remedy = f"Use {{{outer.name!r}: 'auto'}}." if _fits("auto", outer) else "Leave it out."
        return (
            f"{head}{matching[0].name!r} inside {outer.name!r}, which reads the weights of its "
            f"parts directly, so that it must be replaced as a whole. {remedy}"
        )
    if matching:
        type_name = type(matching[0].module).__name__
        use = KINDS[split_kind(kind)[0]]
        what = f"{head}{matching[0].name!r} of type {type_name}. {kind!r} is for {use}. "
    else:
        what = f"{head}no module. "
    names = list(
        dict.fromkeys(site.name for site in sites if site.closed_by is None and _fits(kind, site))
    )
    near = get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
    remedy = (
        f"Did you mean {join_or([repr(name) for name in near])}?"
        if near
        else "The module has no such layer."
    )
    return what + remedy


def _check_shared(sites: Sequence[ModuleSite], kinds: Mapping[str, str]) -> None:
    first_names: dict[int, str] = {}
    for site in sites:
        first_name = first_names.setdefault(id(site.module), site.name)
        kind = kinds.get(site.name, "replicate")
        first_kind = kinds.get(first_name, "replicate")
        if kind != first_kind:
            raise ParallelPlanError(
                f"a module with two names must have one kind: {first_name!r} has the kind "
                f"{first_kind!r}, {site.name!r} has {kind!r}. Give both names the same kind."
            )


def originals_of_averages(sites: Sequence[ModuleSite]) -> dict[str, list[str]]:
    """Return the modules that each :class:`~torch.optim.swa_utils.AveragedModel` may have copied.

    They have the class and the values of its copy. Several modules have them if they were
    initialised alike, as norms are.

    Returns:
        Names of the originals by the name of the copy, without copies that have no original.
    """
    originals = {}
    for average in sites:
        if not isinstance(average.module, AveragedModel):
            continue
        found = [
            site.name
            for site in sites
            if not f"{site.name}.".startswith(f"{average.name}.")
            and _is_copy(average.module.module, site.module)
        ]
        if found:
            originals[f"{average.name}.module"] = found
    return originals


def kinds_of_averages(sites: Sequence[ModuleSite], kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the kinds of copies that the plan does not name: those of their originals."""
    return {
        site.name: kinds[original + site.name.removeprefix(copy)]
        for copy, (original, *_) in originals_of_averages(sites).items()
        for site in sites
        if f"{site.name}.".startswith(f"{copy}.")
        and site.name not in kinds
        and original + site.name.removeprefix(copy) in kinds
    }


def _is_copy(copy: nn.Module, module: nn.Module) -> bool:
    if type(copy) is not type(module) or isinstance(copy, PipelinedModule) or is_hugging_face(copy):
        return False
    tensors = list(copy.parameters())
    others = list(module.parameters())
    return len(tensors) == len(others) and all(
        tensor.shape == other.shape and torch.equal(tensor.cpu(), other.cpu())
        for tensor, other in zip(tensors, others, strict=True)
    )


@dataclass(frozen=True)
class SwapRecord:
    """Replaced block, its replacement, and the number of elements on this rank.

    ``str(record)`` is one line for the log.

    Args:
        kind: Kind of the block in the plan, or ``model`` for a GPT that was built in full.
        full_elements: Size of the replaced block's parameters (elements).
        local_elements: Size of the replacement's parameters on this rank, without padding
            (elements).
    """

    name: str
    kind: str
    source: str
    target: str
    full_elements: int
    local_elements: int
    note: str = ""

    def __str__(self) -> str:
        sizes = f"{self.local_elements:,} of {self.full_elements:,} elements here"
        line = f"{self.name}: {self.source} -> {self.target} ({self.kind}, {sizes})"
        return f"{line}. {self.note}" if self.note else line
