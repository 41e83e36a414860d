"""Which global rank stands where on the dense and the expert grid, and which ranks form a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.legal_values import divisors, one_of, require_index
from lightning_megatron.plan.settings import Count, Index, settle, shown

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
"""Axes from the fastest, whose neighbours talk most and share a node, to the slowest."""

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
_ORDER_AXES = ("tp", "cp", "ep", "dp", "pp")
_EXPERT_NAME_IN_ORDER = {"etp": "tp", "ep": "ep", "edp": "dp", "pp": "pp"}


@dataclass(frozen=True)
class Grid:
    """Lay ranks out over named axes, the first of which varies fastest.

    Args:
        sizes: (axis, size) from the fastest axis to the slowest.
        rank_offset: global rank of the grid's first rank.
    """

    sizes: tuple[tuple[str, int], ...]
    rank_offset: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes' names, fastest first."""
        return tuple(axis for axis, _ in self.sizes)

    def stride(self, axis: str) -> int:
        """Return how many ranks apart neighbours on the axis are."""
        return prod(size for _, size in self.sizes[: self.axes.index(axis)])

    def groups(self, axes: Iterable[str]) -> list[list[int]]:
        """Return the groups of ranks that differ only in their positions on the given axes.

        Equal to Megatron-Core's `RankGenerator.get_ranks`: groups are listed by their position on the other axes, the
        ranks of a group by their position on the given axes, fastest axis first in both cases.
        """
        inside = set(axes)
        members = self._offsets([axis for axis in self.axes if axis in inside])
        bases = self._offsets([axis for axis in self.axes if axis not in inside])
        return [[self.rank_offset + base + member for member in members] for base in bases]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a global rank on every axis."""
        rest = rank - self.rank_offset
        require_index("rank - rank_offset", rest, "world_size", prod(size for _, size in self.sizes))
        position = {}
        for axis, size in self.sizes:
            rest, position[axis] = divmod(rest, size)
        return position

    def _offsets(self, axes: list[str]) -> list[int]:
        offsets = [0]
        for axis in axes:
            stride, size = self.stride(axis), dict(self.sizes)[axis]
            offsets = [step * stride + offset for step in range(size) for offset in offsets]
        return offsets


@dataclass(frozen=True, init=False)
class ParallelLayout:
    """Divide the ranks of a job among the parallel axes of its dense layers and of its experts.

    The dense grid tp x cp x dp x pp and the expert grid etp x ep x edp x pp share the same ranks; `dp` and `edp` follow
    from the world size.

    Args:
        world_size: number of ranks (processes, one accelerator each).
        tp: ranks that share each matrix product of the dense layers (tensor parallel).
        pp: stages that the layers are cut into (pipeline parallel).
        cp: ranks that share one sequence (context parallel).
        ep: ranks that share the experts of one layer (expert parallel).
        etp: ranks that share each expert's matrix products; None means tp.
        vpp: chunks of layers that every stage holds (virtual pipeline stages).
        order: axes joined by dashes, fastest first: neighbours on the first axis are neighbouring ranks. `tp` and `dp`
            stand for `etp` and `edp` in the expert grid. Axes of size 1 may be left out.
        rank_offset: global rank of the first rank.

    Raises:
        ParallelPlanError: for sizes that do not fit the world, an impossible order, or grids that disagree on stages.

    Source: "Efficient Large-Scale Language Model Training on GPU Clusters" (https://arxiv.org/abs/2104.04473) and
        "MoE Parallel Folding" (https://arxiv.org/abs/2504.14960).
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

    # Written out, because `etp=None` is a legal argument but never the value of the field.
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
    ) -> None:
        values = {"world_size": world_size, "tp": tp, "pp": pp, "cp": cp, "ep": ep}
        values |= {"etp": tp if etp is None else etp, "vpp": vpp}
        for name, value in {**values, "order": order, "rank_offset": rank_offset}.items():
            object.__setattr__(self, name, value)
        settle(self)
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
        """Return whether the expert grid was asked for: ep above 1, or etp other than tp."""
        return self.ep > 1 or self.etp != self.tp

    @property
    def dense_grid(self) -> Grid:
        """Return the grid of everything but experts: axes tp, cp, dp, pp."""
        sizes = {axis: getattr(self, axis) for axis in DENSE_AXES}
        return self._grid(sizes, {axis: axis for axis in DENSE_AXES})

    @property
    def expert_grid(self) -> Grid:
        """Return the grid of the experts: axes etp, ep, edp, pp."""
        return self._grid({axis: getattr(self, axis) for axis in EXPERT_AXES}, _EXPERT_NAME_IN_ORDER)

    def groups(self, name: str) -> list[list[int]]:
        """Return the groups of the dense grid over one axis or several, such as "tp" or "dp-cp".

        Args:
            name: axes of tp, cp, dp, pp joined by dashes, in any order (which changes nothing).

        Returns:
            lists of global ranks, ascending, as Megatron-Core lists them.

        Raises:
            ParallelPlanError: for an axis that the dense grid does not have, or one named twice.
        """
        return self.dense_grid.groups(_axes_of(name, DENSE_AXES, {}))

    def expert_groups(self, name: str) -> list[list[int]]:
        """Return the groups of the expert grid over one axis or several, such as "ep" or "etp-ep".

        Args:
            name: axes of etp, ep, edp, pp joined by dashes, in any order; "tp" and "dp" mean "etp" and "edp".

        Returns:
            lists of global ranks, ascending, as Megatron-Core lists them.

        Raises:
            ParallelPlanError: for an axis that the expert grid does not have, or one named twice.
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
        """Return, per pipeline, the ranks that hold the tied embedding: first and last stage, or the only one."""
        return [[stages[0], stages[-1]] if len(stages) > 1 else stages for stages in self.groups("pp")]

    def position_embedding_groups(self) -> list[list[int]]:
        """Return, per pipeline, the rank that holds the position embedding: the first stage."""
        return [stages[:1] for stages in self.groups("pp")]

    def _grid(self, sizes: Mapping[str, int], name_in_order: Mapping[str, str]) -> Grid:
        axis_named = {name: axis for axis, name in name_in_order.items()}
        order = [axis_named[name] for name in self.order.split("-") if name in axis_named]
        order += [axis for axis in sizes if axis not in order]  # all of size 1, so that their place does not matter
        return Grid(tuple((axis, sizes[axis]) for axis in order), self.rank_offset)

    def _check(self) -> None:
        self._check_fits(("tp", "cp", "pp"), "every copy of the dense layers takes that many ranks")
        self._check_fits(("etp", "ep", "pp"), "every copy of the experts takes that many ranks")
        if self.vpp > 1 and self.pp == 1:
            raise ParallelPlanError(
                f"vpp ({self.vpp}) needs pp above 1, because chunks shorten the bubble between stages and one stage "
                f"has none. Use vpp of 1, or pp of {one_of(divisors(self.world_size)[1:] or ['2 on more ranks'])}."
            )
        self._check_order()
        dense, expert = self.dense_grid.stride("pp"), self.expert_grid.stride("pp")
        if self.pp > 1 and dense != expert:
            raise ParallelPlanError(
                f"the dense and the expert grid must agree on the stages: order is {shown(self.order)}, dp is "
                f"{self.dp}, edp is {self.edp}. Neighbouring stages are {dense} ranks apart in the dense grid (tp "
                f"{self.tp}, cp {self.cp}) and {expert} in the expert grid (etp {self.etp}, ep {self.ep}), so a "
                f"layer's experts would live on another stage. Put pp last in the order, e.g. "
                f"{self._order_with_pp_last()!r}."
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
                legal.append(f"{axis} of {one_of(divisors(share))}")
        remedy = f"Use {', or '.join(legal)}." if legal else ""
        remedy = remedy or f"Use sizes whose product is {one_of(divisors(self.world_size))}."
        named = " x ".join(axes)
        values = " x ".join(str(size) for size in sizes.values())
        raise ParallelPlanError(
            f"world_size ({self.world_size}) must be a multiple of {named} ({values} = {product}), because {why}. "
            f"{remedy}"
        )

    def _check_order(self) -> None:
        named = self.order.split("-")
        for axis in named:
            if axis not in _ORDER_AXES:
                raise ParallelPlanError(
                    f"order must name parallel axes joined by dashes: {shown(self.order)} names {shown(axis)}. "
                    f"Use each of {one_of(_ORDER_AXES)} at most once."
                )
            if named.count(axis) > 1:
                raise ParallelPlanError(
                    f"order must name every axis at most once: {shown(self.order)} names {axis} {named.count(axis)} "
                    f"times, which leaves its place open. Use for example {'-'.join(dict.fromkeys(named))!r}."
                )
        sizes = {"tp": max(self.tp, self.etp), "cp": self.cp, "ep": self.ep, "dp": max(self.dp, self.edp)}
        sizes["pp"] = self.pp
        for axis, size in sizes.items():
            if size > 1 and axis not in named:
                raise ParallelPlanError(
                    f"order must name every axis of size above 1: {shown(self.order)} leaves out {axis} ({size}), "
                    f"whose ranks would have no place. Use for example {DEFAULT_ORDER!r}."
                )

    def _order_with_pp_last(self) -> str:
        return "-".join([axis for axis in self.order.split("-") if axis != "pp"] + ["pp"])


def _axes_of(name: str, legal: tuple[str, ...], aliases: Mapping[str, str]) -> list[str]:
    axes = [aliases.get(axis, axis) for axis in name.split("-")]
    for axis in axes:
        if axis not in legal:
            grid = "expert" if "ep" in legal else "dense"
            other = "dense" if "ep" in legal else "expert"
            known = axis in (*DENSE_AXES, *EXPERT_AXES)
            why = f"it is an axis of the {other} grid" if known else "there is no such axis"
            raise ParallelPlanError(
                f"a group of the {grid} grid is named by its axes: {name!r} has {axis!r}, but {why}. "
                f"Use {one_of(legal)}, joined by dashes."
            )
        if axes.count(axis) > 1:
            raise ParallelPlanError(
                f"a group's name holds an axis at most once: {name!r} has {axis} {axes.count(axis)} times. "
                f"Use {'-'.join(dict.fromkeys(axes))!r}."
            )
    return axes
