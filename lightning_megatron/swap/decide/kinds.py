"""Tensor-parallel plans: kinds of cuts for blocks, by patterns over module names.

Kinds of the plan:

* ``auto``: nn.TransformerEncoderLayer, nn.TransformerDecoderLayer and nn.MultiheadAttention, alone
  or anywhere inside the named module. Without a plan all of them are swapped.
* ``column``: nn.Linear whose outputs stay cut. Only code that treats every feature or head
  separately, and then a ``row`` layer, may follow; the first batch checks this.
* ``column_gather``: nn.Linear whose outputs are gathered.
* ``row``: nn.Linear that takes cut inputs and sums over the ranks.
* ``row_split``: nn.Linear that takes complete inputs. Each rank multiplies its part of them, and
the
  results are summed.
* ``vocab``: nn.Embedding cut over its vocabulary, or nn.Linear with any number of outputs, which
are
  gathered. The two may share their weight.
* ``dropout``: nn.Dropout between ``column`` and ``row``, where masks must differ by rank.
* ``sequence``: nn.LayerNorm, nn.RMSNorm or nn.Dropout outside of ``column`` and ``row``, on
  activations ``(..., S, D)``. Under sequence parallelism each rank has its part of the positions
  there. ``row`` layers of the plan return such parts. ``column`` layers gather them, and so does
  every module that does not treat each position separately.
* ``features``: module between ``column`` and ``row`` whose parameters have one row per feature or
  head, such as nn.PReLU(num_parameters). The rows are cut with the features.
* ``partial``: module between ``column`` and ``row`` that uses all of its weights on every part of
  the features, such as a norm of heads. Each rank's gradient is a part of the sum. If the strategy
  runs the backward pass, the first training step finds such modules by itself.
* ``replicate``: any module, which is not changed, nor is any module inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.models.stage import PipelinedModule, computed_by
from lightning_megatron.plan.legal_values import join_or

#: Kinds of a plan, with the blocks that each applies to.
KINDS: Mapping[str, str] = {
    "auto": "nn.TransformerEncoderLayer, nn.TransformerDecoderLayer and nn.MultiheadAttention, "
    "alone or inside the "
    "named module",
    "column": "nn.Linear whose outputs stay cut",
    "column_gather": "nn.Linear whose outputs are gathered",
    "row": "nn.Linear whose inputs are cut",
    "row_split": "nn.Linear that takes its part of complete inputs",
    "vocab": "nn.Embedding, or nn.Linear with a vocabulary of any size as outputs",
    "dropout": "nn.Dropout between a column and a row layer",
    "sequence": "nn.LayerNorm, nn.RMSNorm and nn.Dropout outside of column and row layers",
    "features": (
        "any module between a column and a row layer whose parameters have a row for every feature "
        "or head"
    ),
    "partial": "any module between a column and a row layer that is used with all of its weights "
    "on a part of the "
    "heads",
    "replicate": "any module, which then stays as it is",
}

#: Kinds that apply to everything inside the module that a pattern names.
_FOR_WHOLE_TREES = ("auto", "replicate")

#: Blocks that read the weights of their children directly, so that only the whole block can be
#: swapped.
_CLOSED = (nn.TransformerEncoderLayer, nn.MultiheadAttention, PipelinedModule)


@dataclass(frozen=True)
class Place:
    """Position of a module in its parent.

    Args:
        name: Dotted name from the root.
        parent: Module that contains it.
        key: Name in the parent.
        module: Module itself.
        closed_by: Name of the surrounding block that must be swapped whole; None if there is none.
    """

    name: str
    parent: nn.Module
    key: str
    module: nn.Module
    closed_by: str | None = None


def places_of(root: nn.Module) -> list[Place]:
    """List every module below ``root`` in the order of definition, once for each name."""
    return list(_places(root, "", None))


def _places(parent: nn.Module, prefix: str, closed_by: str | None) -> Iterator[Place]:
    for key, child in _children(parent):
        name = f"{prefix}{key}"
        yield Place(name, parent, key, child, closed_by)
        is_closed = isinstance(child, _CLOSED) or computed_by(child) is not None
        inner = name if closed_by is None and is_closed else closed_by
        yield from _places(child, f"{name}.", inner)


def _children(parent: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    # named_children leaves the second name of a shared module out.
    return ((key, child) for key, child in parent._modules.items() if child is not None)


def choose_kinds(
    places: Sequence[Place], plan: Mapping[str, str] | None, fits: Callable[[str, nn.Module], bool]
) -> dict[str, str]:
    """Return the kind of every module that the plan matches, by name.

    A pattern matches whole dotted names; ``*`` also matches dots. ``auto`` and ``replicate`` apply
    to everything inside the named module as well. If several patterns match, the last one in the
    plan applies. Without a plan every module is ``auto``.

    Args:
        places: All modules with their positions.
        plan: Kind by name pattern, or None.
        fits: Function that returns whether a module's type fits a kind.

    Raises:
        ParallelPlanError: For an unknown kind, a pattern that matches no module of its kind, or a
            module with two names and two kinds.
    """
    if plan is None:
        return {place.name: "auto" for place in places if place.closed_by is None}
    kinds: dict[str, str] = {}
    for pattern, kind in plan.items():
        check_kind(pattern, kind, KINDS, "the plan")
        matching = [place for place in places if _matches(pattern, kind, place.name)]
        fitting = [
            place for place in matching if place.closed_by is None and fits(kind, place.module)
        ]
        if not fitting:
            raise ParallelPlanError(_nothing_fits(pattern, kind, places, matching, fits))
        kinds.update((place.name, kind) for place in fitting)
    _check_shared(places, kinds)
    return kinds


def _matches(pattern: str, kind: str, name: str) -> bool:
    if fnmatchcase(name, pattern):
        return True
    if kind not in _FOR_WHOLE_TREES:
        return False
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts)))


def check_kind(pattern: str, kind: str, kinds: Collection[str], plan: str) -> None:
    """Refuse a value that is no kind of a plan.

    Args:
        pattern: Pattern that is given the kind.
        kind: Kind to check.
        kinds: Known kinds.
        plan: Name of the plan, for errors.

    Raises:
        ParallelPlanError: For an unknown kind.
    """
    if kind not in kinds:
        raise ParallelPlanError(
            f"a kind of {plan} must be one of those that exist: {pattern!r} is given {kind!r}. Use "
            f"{join_or([repr(known) for known in kinds])}."
        )


def _nothing_fits(
    pattern: str,
    kind: str,
    places: Sequence[Place],
    matching: Sequence[Place],
    fits: Callable[[str, nn.Module], bool],
) -> str:
    head = (
        f"every pattern of the plan must match a module that {kind!r} is for: {pattern!r} matches "
    )
    if matching and matching[0].closed_by is not None:
        outer = next(place for place in places if place.name == matching[0].closed_by)
        remedy = (
            f"Use {{{outer.name!r}: 'auto'}}." if fits("auto", outer.module) else "Leave it out."
        )
        return (
            f"{head}{matching[0].name!r} inside {outer.name!r}, which reads the weights of its "
            f"parts directly and is swapped whole or not at all. {remedy}"
        )
    if matching:
        found = type(matching[0].module).__name__
        what = f"{head}{matching[0].name!r} of type {found}. {kind!r} is for {KINDS[kind]}. "
    else:
        what = f"{head}nothing. A misspelt name would leave a layer whole. "
    names = list(
        dict.fromkeys(
            place.name for place in places if place.closed_by is None and fits(kind, place.module)
        )
    )
    near = get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
    remedy = (
        f"Did you mean {join_or([repr(name) for name in near])}?"
        if near
        else "The module has no such layer."
    )
    return what + remedy


def _check_shared(places: Sequence[Place], kinds: Mapping[str, str]) -> None:
    first: dict[int, str] = {}
    for place in places:
        other = first.setdefault(id(place.module), place.name)
        mine, theirs = kinds.get(place.name, "replicate"), kinds.get(other, "replicate")
        if mine != theirs:
            raise ParallelPlanError(
                f"a module with two names must have one kind: {other!r} is {theirs!r}, "
                f"{place.name!r} is {mine!r}. Both are the same module. Give both names the same "
                "kind."
            )
