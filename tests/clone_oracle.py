"""Plan of clones in plain integers, which the operators of torch and the kernel must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_megatron.plan.expert_clones import NO_EXPERT, ExpertPlaces


@dataclass(frozen=True)
class ClonePlan:
    """Clones of one layer and microbatch, and the selections that are sent to them.

    Args:
        amounts: Number of selections that go to every place (selections).
        off: Number of selections that every rank sends to every place, by rank and place
            (selections). Over ranks they add up to the amounts.
        rows: Number of rows that every rank computes, homes and clones (rows).
    """

    layout: ExpertPlaces
    owners: tuple[int, ...]
    amounts: tuple[int, ...]
    off: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]

    def logical(self, physical: int) -> int:
        """Return the expert that a physical expert is, or is a clone of; -1 means none."""
        if physical == NO_EXPERT:
            return NO_EXPERT
        homes = self.layout.homes
        places = self.layout.places
        rank, number = divmod(physical, homes + places)
        if number < homes:
            return rank * homes + number
        return self.owners[rank * places + number - homes]


def plan_clones(counts: Sequence[Sequence[int]], places: int, min_rows: int = 0) -> ClonePlan:
    """Return the clones that balance the rows of ranks.

    Afterwards no rank has more rows than the busiest had before. Selections without a place stay at
    home.

    Args:
        counts: Number of selections of every expert by the tokens of every rank, by rank and expert
            (selections).
        places: Number of places on every rank (places).
        min_rows: Smallest number of selections for which a clone is made (selections).

    Raises:
        ParallelPlanError: If the sizes do not fit together.
    """
    layout = ExpertPlaces(len(counts), len(counts[0]), places)
    totals = [sum(column) for column in zip(*counts, strict=True)]
    by_rank = [
        totals[first : first + layout.homes] for first in range(0, len(totals), layout.homes)
    ]
    load = [sum(totals_of_rank) for totals_of_rank in by_rank]
    mean = sum(load) // layout.num_ranks
    room = [max(0, mean - rank_load) for rank_load in load]
    excess = [
        surplus for totals_of_rank in by_rank for surplus in excess_of_rank(totals_of_rank, mean)
    ]
    assigned = assign_largest_first(excess, room, layout)
    kept = [
        (owner, amount) if amount >= max(min_rows, 1) else (NO_EXPERT, 0)
        for owner, amount in assigned
    ]
    rows = list(load)
    for place, (owner, amount) in enumerate(kept):
        if owner != NO_EXPERT:
            rows[owner // layout.homes] -= amount
            rows[place // layout.places] += amount
    owners, amounts = (tuple(column) for column in zip(*kept, strict=True))
    return ClonePlan(
        layout, owners, amounts, divide_over_ranks(counts, owners, amounts), tuple(rows)
    )


def excess_of_rank(totals: Sequence[int], mean: int) -> list[int]:
    """Return how many selections of each of a rank's experts should leave the rank.

    They add up to what the rank has above the mean. Experts with few selections stay whole, so that
    few clones are needed; of experts with equally many, the one with the lower number.

    Args:
        totals: Number of selections of each of the rank's experts (selections).
        mean: Number of selections per rank, rounded down (selections).
    """
    order = sorted(range(len(totals)), key=lambda expert: totals[expert])
    excess = [0] * len(totals)
    previous = 0
    for expert, until in zip(order, accumulate(totals[expert] for expert in order), strict=True):
        surplus = max(0, until - mean)
        excess[expert] = surplus - previous
        previous = surplus
    return excess


def assign_largest_first(
    excess: Sequence[int], room: Sequence[int], layout: ExpertPlaces
) -> list[tuple[int, int]]:
    """Return the expert and the number of selections of every place, largest first.

    For every place, the rank with the most room among those with a free place takes as many
    selections as fit of the expert with the most left. Of equal ones, the one with the lowest
    number is taken.

    Args:
        excess: Number of selections of every expert that are to leave its rank (selections).
        room: Number of selections that fit on every rank (selections).
    """
    left = list(excess)
    space = list(room)
    experts_of_rank: list[list[tuple[int, int]]] = [[] for _ in room]
    for _ in range(layout.num_places):
        free = [
            rank for rank, experts in enumerate(experts_of_rank) if len(experts) < layout.places
        ]
        rank = max(free, key=lambda rank: space[rank])
        expert = max(range(len(left)), key=lambda expert: left[expert])
        amount = min(left[expert], space[rank])
        left[expert] -= amount
        space[rank] -= amount
        experts_of_rank[rank].append((expert, amount))
    return [place for experts in experts_of_rank for place in experts]


def divide_over_ranks(
    counts: Sequence[Sequence[int]], owners: Sequence[int], amounts: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Return how many selections every rank sends to every place, by rank and place.

    Each rank sends the same fraction of its selections of the owner, rounded down. The remainder,
    less than one selection for each rank, comes from the ranks in order.

    Args:
        counts: Number of selections of every expert by the tokens of every rank, by rank and expert
            (selections).
        amounts: Number of selections that go to every place (selections).
    """
    off = [[0] * len(owners) for _ in counts]
    for owner in sorted(set(owners) - {NO_EXPERT}):
        places = [place for place, expert in enumerate(owners) if expert == owner]
        sent = [row[owner] for row in counts]
        total = max(sum(sent), 1)
        left = list(sent)
        missing = [amounts[place] for place in places]
        for index, place in enumerate(places):
            for rank, number in enumerate(sent):
                share = number * amounts[place] // total
                off[rank][place] = share
                left[rank] -= share
                missing[index] -= share
        for row, more in zip(off, overlaps(left, missing), strict=True):
            for place, number in zip(places, more, strict=True):
                row[place] += number
    return tuple(tuple(row) for row in off)


def overlaps(rows: Sequence[int], columns: Sequence[int]) -> list[list[int]]:
    """Return the overlap of each row with each column, as consecutive intervals on a line."""
    column_ends = list(accumulate(columns))
    shared = []
    for row, row_end in zip(rows, accumulate(rows), strict=True):
        of_row = [
            max(0, min(row_end, column_end) - max(row_end - row, column_end - column))
            for column, column_end in zip(columns, column_ends, strict=True)
        ]
        shared.append(of_row)
    return shared


def physical_home(layout: ExpertPlaces, expert: int) -> int:
    """Return the physical expert that is the home of an expert."""
    rank, home = divmod(expert, layout.homes)
    return rank * (layout.homes + layout.places) + home


def physical_place(layout: ExpertPlaces, place: int) -> int:
    """Return the physical expert that is a place."""
    rank, number = divmod(place, layout.places)
    return rank * (layout.homes + layout.places) + layout.homes + number


def physical_experts(
    selections: Sequence[Sequence[int]], plan: ClonePlan, rank: int
) -> tuple[tuple[int, ...], ...]:
    """Return the physical expert of each selection of a rank's tokens.

    The first selections of an expert, in the order of tokens, are sent to its places in order, as
    many to each as the plan says. The others stay at home.

    Args:
        selections: Experts selected for each of the rank's tokens; -1 means none.
        rank: Number of the rank over ep.
    """
    ways: dict[int, list[int]] = {}
    for place, (owner, number) in enumerate(zip(plan.owners, plan.off[rank], strict=True)):
        ways.setdefault(owner, []).extend([physical_place(plan.layout, place)] * number)
    waiting = {owner: iter(experts) for owner, experts in ways.items()}

    def clone_of(expert: int) -> int:
        if expert == NO_EXPERT:
            return NO_EXPERT
        return next(waiting.get(expert, iter(())), physical_home(plan.layout, expert))

    return tuple(tuple(map(clone_of, token)) for token in selections)
