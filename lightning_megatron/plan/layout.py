"""Positions of global ranks on the dense and the expert grid, and the groups along their axes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.placement import Placement, PlacementShape
from lightning_megatron.plan.settings import (
    Count,
    Index,
    coerce_fields,
    divisors,
    join_or,
    shown,
)

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
"""Axes from the fastest, whose neighbours communicate most and share a node, to the slowest."""

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
_ORDER_AXES = ("tp", "cp", "ep", "dp", "pp")
_EXPERT_NAME_IN_ORDER = {"etp": "tp", "ep": "ep", "edp": "dp", "pp": "pp"}
_REPEAT = re.compile(r"\*([0-9]{1,6})(?![0-9])")
#: Longest string after repetition; no pipeline has as many layers and stages (symbols).
_MAX_SYMBOLS = 1_000_000
_EXAMPLE = "Use for example 'Ett|ttt|tL'."


@dataclass(frozen=True)
class Grid:
    """Arrangement of ranks over named axes, the first of which varies fastest.

    Args:
        sizes: Pairs (axis, size) from the fastest axis to the slowest.
        rank_offset: Global rank of the grid's first rank.
    """

    sizes: tuple[tuple[str, int], ...]
    rank_offset: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the names of the axes, fastest first."""
        return tuple(axis for axis, _ in self.sizes)

    def stride(self, axis: str) -> int:
        """Return the distance between neighbours on the axis (ranks)."""
        return prod(size for _, size in self.sizes[: self.axes.index(axis)])

    def groups(self, axes: Iterable[str]) -> list[list[int]]:
        """Return the groups of ranks that differ only in their positions on the given axes.

        The result equals that of Megatron-Core's ``RankGenerator.get_ranks``: the groups are sorted
        by their position on the other axes, the ranks of a group by their position on the given
        axes, both with the fastest axis first.
        """
        inside = set(axes)
        members = self._offsets([axis for axis in self.axes if axis in inside])
        groups = []
        for base in self._offsets([axis for axis in self.axes if axis not in inside]):
            groups.append([self.rank_offset + base + member for member in members])
        return groups

    def group_of(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Return the group of a global rank, one of :meth:`groups`, without the other groups."""
        ordered = [axis for axis in self.axes if axis in set(axes)]
        position = self.coordinates(rank)
        first = rank - sum(position[axis] * self.stride(axis) for axis in ordered)
        return tuple(first + offset for offset in self._offsets(ordered))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a global rank on every axis."""
        rest = rank - self.rank_offset
        num_ranks = prod(size for _, size in self.sizes)
        if not 0 <= rest < num_ranks:
            raise ParallelPlanError(
                f"rank must be a rank of the layout: it is {rank}. Use {self.rank_offset} to "
                f"{self.rank_offset + num_ranks - 1}."
            )
        position = {}
        for axis, size in self.sizes:
            rest, position[axis] = divmod(rest, size)
        return position

    def _offsets(self, axes: list[str]) -> list[int]:
        offsets = [0]
        for axis in axes:
            stride = self.stride(axis)
            size = dict(self.sizes)[axis]
            offsets = [step * stride + offset for step in range(size) for offset in offsets]
        return offsets


@dataclass(frozen=True, init=False)
class ParallelLayout:
    """Division of a job's ranks among the parallel axes of the dense layers and of the experts.

    The dense grid tp x cp x dp x pp and the expert grid etp x ep x edp x pp share the same ranks.
    The sizes ``dp`` and ``edp`` follow from the world size.

    Args:
        world_size: Number of ranks; each rank is a process with one accelerator.
        tp: Number of ranks that divide each matrix product of the dense layers (tensor parallel).
        pp: Number of stages that the layers are divided into (pipeline parallel).
        cp: Number of ranks that divide each sequence (context parallel).
        ep: Number of ranks that divide the experts of one layer (expert parallel).
        etp: Number of ranks that divide each matrix product of an expert (expert tensor parallel);
            None means tp.
        vpp: Number of chunks of layers on every stage (virtual pipeline stages).
        order: Axes joined by dashes, fastest first: neighbours on the first axis are neighbouring
            ranks. In the expert grid ``tp`` and ``dp`` stand for ``etp`` and ``edp``. Axes of size
            1 may be omitted.
        rank_offset: Global rank of the first rank.
        stage_layers: Number of layers of each of the pp x vpp virtual stages, in the order in which
            a microbatch passes them, or a string that
            :func:`~lightning_megatron.plan.layout.read_stage_string` reads, such as
            ``Et*3|(tt|)*29L``; None divides the layers of each model by cost. Only the first and
            the last virtual stage may have none (layers).
        shape: Placement of the chunks on the stages, a property of the schedule.

    Raises:
        ParallelPlanError: For sizes that do not divide the world size, an invalid order, grids
            with different stages, or ``stage_layers`` of other virtual stages.
        UnsupportedError: If ``stage_layers`` has layers that no model has.

    Source: "Efficient Large-Scale Language Model Training on GPU Clusters"
        (https://arxiv.org/abs/2104.04473) and "MoE Parallel Folding"
        (https://arxiv.org/abs/2504.14960).
    """

    world_size: Count
    tp: Count
    pp: Count
    cp: Count
    ep: Count
    etp: Count
    vpp: Count
    order: str
    rank_offset: Index
    stage_layers: tuple[Index, ...] | None
    shape: PlacementShape

    # Not generated by dataclass: `etp=None` is a legal argument but never the value of the field.
    def __init__(
        self,
        world_size: int,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        vpp: int = 1,
        order: str = DEFAULT_ORDER,
        rank_offset: int = 0,
        stage_layers: Sequence[int] | str | None = None,
        shape: PlacementShape = "loop",
    ) -> None:
        values: dict[str, Any] = {"world_size": world_size, "tp": tp, "pp": pp, "cp": cp, "ep": ep}
        values |= {"etp": tp if etp is None else etp, "vpp": vpp, "shape": shape}
        values |= {"order": order, "rank_offset": rank_offset, "stage_layers": stage_layers}
        if isinstance(stage_layers, str):
            values["stage_layers"] = read_stage_string(stage_layers)
        for name, value in values.items():
            object.__setattr__(self, name, value)
        coerce_fields(self)
        self._check()

    @property
    def dp(self) -> int:
        """Return the number of data-parallel copies of the dense layers."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Return the number of data-parallel copies of each expert."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def has_experts(self) -> bool:
        """Return whether the expert grid is in use: ep above 1, or etp other than tp."""
        return self.ep > 1 or self.etp != self.tp

    @cached_property
    def placement(self) -> Placement:
        """Return the stage and the chunk of every virtual stage."""
        return Placement(self.shape, self.pp, self.vpp)

    @property
    def loss_stage(self) -> int:
        """Return the stage that has the last virtual stage, and computes the loss."""
        stage, _ = self.placement.owner(self.placement.num_virtual_stages - 1)
        return stage

    @property
    def dense_grid(self) -> Grid:
        """Return the grid of all layers except experts: axes tp, cp, dp, pp."""
        sizes = {axis: getattr(self, axis) for axis in DENSE_AXES}
        return self._grid(sizes, {axis: axis for axis in DENSE_AXES})

    @property
    def expert_grid(self) -> Grid:
        """Return the grid of the experts: axes etp, ep, edp, pp."""
        return self._grid(
            {axis: getattr(self, axis) for axis in EXPERT_AXES}, _EXPERT_NAME_IN_ORDER
        )

    def groups(self, name: str) -> list[list[int]]:
        """Return the groups of the dense grid over one or several axes, such as "tp" or "dp-cp".

        Args:
            name: Axes of tp, cp, dp, pp joined by dashes; their order does not matter.

        Returns:
            Lists of global ranks, ascending, in the order of Megatron-Core.

        Raises:
            ParallelPlanError: For an axis that the dense grid does not have, or a repeated axis.
        """
        return self.dense_grid.groups(_axes_of(name, DENSE_AXES, {}))

    def expert_groups(self, name: str) -> list[list[int]]:
        """Return the groups of the expert grid over one or several axes, such as "ep" or "etp-ep".

        Args:
            name: Axes of etp, ep, edp, pp joined by dashes, in any order; "tp" and "dp" mean "etp"
                and "edp".

        Returns:
            Lists of global ranks, ascending, in the order of Megatron-Core.

        Raises:
            ParallelPlanError: For an axis that the expert grid does not have, or a repeated axis.
        """
        return self.expert_grid.groups(_axes_of(name, EXPERT_AXES, {"tp": "etp", "dp": "edp"}))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a global rank's positions on the dense axes tp, cp, dp, pp."""
        position = self.dense_grid.coordinates(rank)
        return {axis: position[axis] for axis in DENSE_AXES}

    def expert_coordinates(self, rank: int) -> dict[str, int]:
        """Return a global rank's positions on the expert axes etp, ep, edp, pp."""
        position = self.expert_grid.coordinates(rank)
        return {axis: position[axis] for axis in EXPERT_AXES}

    def embedding_groups(self) -> list[list[int]]:
        """Return the ranks of every pipeline that have the tied embedding.

        They are the first stage and the one that computes the loss, or one stage that is both.
        """
        last = self.loss_stage
        return [[ranks[0], ranks[last]] if last else ranks[:1] for ranks in self.groups("pp")]

    def position_embedding_groups(self) -> list[list[int]]:
        """Return the first stage of every pipeline, which has the position embedding."""
        return [stages[:1] for stages in self.groups("pp")]

    def _grid(self, sizes: Mapping[str, int], name_in_order: Mapping[str, str]) -> Grid:
        axis_named = {name: axis for axis, name in name_in_order.items()}
        order = [axis_named[name] for name in self.order.split("-") if name in axis_named]
        # Omitted axes have size 1, so that their place in the order does not matter.
        order += [axis for axis in sizes if axis not in order]
        return Grid(tuple((axis, sizes[axis]) for axis in order), self.rank_offset)

    def _check(self) -> None:
        self._check_fits(("tp", "cp", "pp"), "every copy of the dense layers takes that many ranks")
        self._check_fits(("etp", "ep", "pp"), "every copy of the experts takes that many ranks")
        if self.vpp > 1 and self.pp == 1:
            raise ParallelPlanError(
                f"vpp ({self.vpp}) needs pp above 1, because chunks shorten the pipeline bubble, "
                "and one stage has no bubble. Use vpp of 1, or pp of "
                f"{join_or(divisors(self.world_size)[1:] or ['2 on more ranks'])}."
            )
        self._check_stage_layers()
        self._check_order()
        dense = self.dense_grid.stride("pp")
        expert = self.expert_grid.stride("pp")
        if self.pp > 1 and dense != expert:
            raise ParallelPlanError(
                "the dense and the expert grid must have the same stages: order is "
                f"{shown(self.order)}, dp is {self.dp}, edp is {self.edp}. Neighbouring stages are "
                f"{dense} ranks apart in the dense grid (tp {self.tp}, cp {self.cp}) and {expert} "
                f"in the expert grid (etp {self.etp}, ep {self.ep}), so the experts of a layer "
                "would be on another stage than the layer. Put pp last in the order, e.g. "
                f"{self._order_with_pp_last()!r}."
            )

    def _check_stage_layers(self) -> None:
        counts = self.stage_layers
        if counts is None:
            return
        num_stages = len(counts)
        expected = self.pp * self.vpp
        if num_stages != expected:
            remedy = f"Name {expected}"
            if num_stages and num_stages % self.pp == 0 and self.pp > 1:
                remedy += f", or use vpp={num_stages // self.pp}"
            raise ParallelPlanError(
                "stage_layers must name the layers of every virtual stage: it names "
                f"{num_stages} of them ({shown(list(counts))}), and pp x vpp is {self.pp} x "
                f"{self.vpp} = {expected}. {remedy}."
            )
        if not all(counts[1:-1]) or not any(counts):
            raise ParallelPlanError(
                "stage_layers must give a layer to every virtual stage except the first and the "
                f"last: it is {shown(list(counts))}. The first one has the embedding and the last "
                "one the head, but the others would be empty. Use numbers of at least 1 between "
                "them, and at least one layer."
            )
        if self.shape == "v" and not counts[0] and not counts[-1]:
            raise ParallelPlanError(
                "stage_layers must give the first stage a layer, because the order of its "
                f"parameters is unknown without one: it is {shown(list(counts))}, and in a V the "
                "first stage has the first and the last virtual stage. Give one of them a layer."
            )

    def _check_fits(self, axes: tuple[str, ...], why: str) -> None:
        sizes = {axis: getattr(self, axis) for axis in axes}
        product = prod(sizes.values())
        if self.world_size % product == 0:
            return
        legal = []
        for axis, size in sizes.items():
            share, rest = divmod(self.world_size, product // size)
            if size > 1 and rest == 0:
                legal.append(f"{axis} of {join_or(divisors(share))}")
        if not legal:
            legal.append(f"sizes whose product is {join_or(divisors(self.world_size))}")
        legal.append(f"a multiple of {product} ranks (devices x num_nodes of the Trainer)")
        named = " x ".join(axes)
        values = " x ".join(str(size) for size in sizes.values())
        raise ParallelPlanError(
            f"world_size ({self.world_size}) must be a multiple of {named} ({values} = {product}), "
            f"because {why}. Use {', or '.join(legal)}."
        )

    def _check_order(self) -> None:
        named = self.order.split("-")
        if not set(named) <= set(_ORDER_AXES) or len(set(named)) < len(named):
            raise ParallelPlanError(
                "order must name parallel axes joined by dashes, each at most once: it is "
                f"{shown(self.order)}. Use each of {join_or(_ORDER_AXES)} at most once."
            )
        sizes = {
            "tp": max(self.tp, self.etp),
            "cp": self.cp,
            "ep": self.ep,
            "dp": max(self.dp, self.edp),
        }
        sizes["pp"] = self.pp
        for axis, size in sizes.items():
            if size > 1 and axis not in named:
                raise ParallelPlanError(
                    f"order must name every axis of size above 1: {shown(self.order)} leaves out "
                    f"{axis} ({size}), so the order of its ranks is undefined. Use for example "
                    f"{DEFAULT_ORDER!r}."
                )

    def _order_with_pp_last(self) -> str:
        return "-".join([axis for axis in self.order.split("-") if axis != "pp"] + ["pp"])


def _axes_of(name: str, legal: tuple[str, ...], aliases: Mapping[str, str]) -> list[str]:
    axes = [aliases.get(axis, axis) for axis in name.split("-")]
    if not set(axes) <= set(legal) or len(set(axes)) < len(axes):
        raise ParallelPlanError(
            f"a group must be named by axes of its grid, each once: {name!r} is no such name. Use "
            f"{join_or(legal)}, joined by dashes."
        )
    return axes


def read_stage_string(text: str) -> tuple[int, ...]:
    """Return the number of layers of each virtual stage that a string describes.

    ``E`` is the embedding, ``t`` a Transformer layer and ``L`` the head with the loss. ``|`` begins
    the next virtual stage. ``*n`` repeats the symbol or the parentheses before it n times. Commas
    and spaces are ignored.

    Args:
        text: String in this notation.

    Raises:
        ParallelPlanError: For an unknown symbol, unbalanced brackets, too many symbols, an
            embedding that is not first and single, or a head that is not last and single.
        UnsupportedError: For ``m``, a layer of multi-token prediction.

    Source: the notation of Megatron-Core's ``--pipeline-model-parallel-layout``.
    """
    signs = _expanded(text)
    _require_end(text, signs, "E", "the embedding", "first", signs.startswith("E"))
    _require_end(text, signs, "L", "the head with the loss", "last", signs.endswith("L"))
    return tuple(stage.count("t") for stage in signs.split("|"))


def _expanded(text: str) -> str:
    """Return a string without repetitions, brackets and ignored symbols."""
    # The last element belongs to the innermost bracket that is open.
    parts = [""]
    position = 0
    while position < len(text):
        sign = text[position]
        position += 1
        if sign in ", ":
            continue
        if sign == "(":
            parts.append("")
            continue
        if sign == ")" and len(parts) > 1:
            item = parts.pop()
        elif sign in "EtL|":
            item = sign
        else:
            raise _refusal(text, sign, position)
        times = _REPEAT.match(text, position)
        number = 1
        if times is not None:
            position = times.end()
            number = int(times[1])
        if len(parts[-1]) + len(item) * number > _MAX_SYMBOLS:
            raise ParallelPlanError(
                f"stage_layers must describe at most {_MAX_SYMBOLS} layers and stages: "
                f"{shown(text)} repeats its parts more often. Use smaller numbers after '*'."
            )
        parts[-1] += item * number
    if len(parts) > 1:
        raise ParallelPlanError(
            f"stage_layers must close every bracket: {shown(text)} leaves {len(parts) - 1} open. "
            "Brackets enclose repeated parts. Add ')*' and a number for each."
        )
    return parts[0]


def _refusal(text: str, sign: str, position: int) -> ParallelPlanError | UnsupportedError:
    where = f"{shown(text)} has {sign!r} at position {position}"
    if sign == "m":
        return UnsupportedError(
            f"stage_layers cannot have layers of multi-token prediction: {where}. No model of this "
            "version has such layers. Leave 'm' out."
        )
    if sign in ")*":
        return ParallelPlanError(
            f"stage_layers must have '(' before ')', and '*' only between a repeated part and a "
            f"number of at most six digits: {where}. Add what is missing, or leave it out."
        )
    return ParallelPlanError(
        f"stage_layers must consist of known symbols: {where}. Use 'E' (embedding), 't' "
        "(layer), 'L' (head with the loss), '|' (next virtual stage), brackets and '*'."
    )


def _require_end(text: str, signs: str, sign: str, part: str, place: str, is_there: bool) -> None:
    number = signs.count(sign)
    if number == 1 and is_there:
        return
    occurrence = f"{number} times" if number != 1 else f"elsewhere, in {shown(signs)}"
    raise ParallelPlanError(
        f"stage_layers must have '{sign}' once and {place}, because a model has {part} {place}: "
        f"{shown(text)} has it {occurrence}. {_EXAMPLE}"
    )
