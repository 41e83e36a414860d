"""Counts and selections of tokens of several ranks, drawn for the plans of clones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

KINDS = ("skewed", "even", "empty experts", "unequal ranks")
KINDS += ("one expert", "nowhere", "large", "few")


@dataclass(frozen=True)
class DrawnCounts:
    """Counts by rank and expert, the places for clones of a rank, and the fewest rows of a clone."""

    counts: list[list[int]]
    places: int
    min_rows: int


def drawn_counts(number: int) -> Iterator[DrawnCounts]:
    """Draw counts of every kind for 2 to 8 ranks with 1 to 4 places, also with one expert a rank."""
    for seed in range(number):
        draw = Random(seed)
        ranks = draw.randint(2, 8)
        homes = 1 if seed % 5 == 0 else draw.randint(1, 6)
        experts = ranks * homes
        places = min(draw.randint(1, 4), experts - homes)
        kind = KINDS[seed % len(KINDS)]
        counts = [numbers_of(draw, kind, experts, seed) for _ in range(ranks)]
        yield DrawnCounts(counts, places, draw.choice((0, 0, 1, 5, 40)))


def numbers_of(draw: Random, kind: str, experts: int, seed: int) -> list[int]:
    """Draw one rank's number of selections of every expert."""
    if kind == "nowhere":
        return [0] * experts
    if kind == "one expert":
        return [draw.randint(0, 99) * (expert == seed % experts) for expert in range(experts)]
    top = {"few": 3, "large": 2**20}.get(kind, 100)
    if kind == "unequal ranks":
        top = draw.choice((0, 5, 500))
    numbers = [draw.randint(0, top) for _ in range(experts)]
    if kind == "empty experts":
        return [number * (draw.random() < 0.4) for number in numbers]
    if kind == "skewed":
        return [number // (1 + expert) for expert, number in enumerate(numbers)]
    return numbers


@dataclass(frozen=True)
class DrawnSelections:
    """Selections of every rank's tokens; -1 means none."""

    selections: list[list[list[int]]]
    experts: int
    places: int

    @property
    def counts(self) -> list[list[int]]:
        """Count the selections by rank and expert."""
        flat = [[expert for token in rank for expert in token] for rank in self.selections]
        return [[one.count(expert) for expert in range(self.experts)] for one in flat]


def selected(draw: Random, weights: list[float], top_k: int, share_nowhere: float) -> list[int]:
    """Draw the selections of a token without replacement."""
    order = sorted(range(len(weights)), key=lambda e: -(draw.random() ** (1 / weights[e])))
    return [-1 if draw.random() < share_nowhere else choice for choice in order[:top_k]]


def drawn_selections(number: int) -> Iterator[DrawnSelections]:
    """Draw selections of a few tokens; popular experts are neighbours, some tokens select none."""
    for seed in range(number):
        draw = Random(seed)
        ranks, homes = draw.randint(2, 4), draw.randint(1, 4)
        experts = ranks * homes
        weights = [1.0 / (1 + expert) ** draw.choice((0.0, 1.0, 2.0)) for expert in range(experts)]
        top_k = draw.randint(1, min(3, experts))
        share_nowhere = draw.choice((0.0, 0.3, 1.0 if seed % 10 == 0 else 0.0))
        tokens = range(draw.randint(1, 30))
        selections = [
            [selected(draw, weights, top_k, share_nowhere) for _ in tokens] for _ in range(ranks)
        ]
        yield DrawnSelections(selections, experts, min(draw.randint(1, 3), experts - homes))
