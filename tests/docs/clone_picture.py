"""The picture `docs/clones.svg`, and the table of its page: rows of ranks under plans of clones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from benchmarks.routing import WORKLOADS, Workload
from benchmarks.shapes import SHAPES
from lightning_megatron.plan.expert_clones import (
    BANDWIDTH,
    BYTES_OF_PARAMETER,
    MIN_ROWS_ON_GPUS,
    OPERATIONS,
    PRODUCTS,
)
from tests.clone_oracle import plan_clones
from tests.docs.blocks import DOCS
from tests.docs.svg import box, picture_of, text

PAGE = DOCS / "experts.md"
PICTURE = DOCS / "clones.svg"
TABLE = re.compile(r"(?<=<!-- planned clones -->\n)(?:\|.*\n)+")
#: Number of ranks, tokens per rank, and layers; every layer routes its own tokens.
RANKS, TOKENS, DRAWS = 4, 4096, 12
PLACES = (0, 1, 2)
#: Workloads of the table, by their names there.
LOADS = {
    f"{name}, {WORKLOADS[name]}: {num_hot} of 128 experts": Workload(name, num_hot)
    for num_hot in (8, 32)
    for name in ("W1", "W2")
}
HEAD = """\
| workload | places per rank | rows of the busiest rank over the mean | rows \
moved | clones | predicted gain per layer |
|---|---|---|---|---|---|
"""
TITLE = "Rows of each of four ranks over the mean, in one layer of Qwen3-30B-A3B's shape (plan)"
_COLOURS = ("#c0504d", "#f0ad4e", "#4f81bd")
_UNIT, _BAR, _TOP = 40, 14, 62
SHAPE = SHAPES["qwen3_12"]


@dataclass(frozen=True)
class Planned:
    """Rows of ranks over the mean in the first layer, and means over all layers."""

    rows: tuple[float, ...]
    max_over_mean: float
    moved: float
    clones: float
    saved_ms: float


@cache
def planned(name: str, places: int) -> Planned:
    """Plan clones for Qwen3-30B-A3B's shape under a workload; 0 places give no clones."""
    experts, plans = SHAPE.experts, []
    assert experts is not None, "the shape has experts"
    for layer in range(DRAWS):
        counts = _counts(name, layer)
        homes = len(counts[0]) // RANKS
        totals = [sum(column) for column in zip(*counts, strict=True)]
        before = [sum(totals[rank * homes : (rank + 1) * homes]) for rank in range(RANKS)]
        mean = sum(before) / RANKS
        plan = plan_clones(counts, max(places, 1), MIN_ROWS_ON_GPUS if places else sum(before))
        away = max(sum(owner // homes == rank for owner in plan.owners) for rank in range(RANKS))
        parameters = 3 * SHAPE.hidden_size * experts.ffn_hidden_size
        saved = OPERATIONS * (max(before) - max(plan.rows)) * parameters / PRODUCTS
        saved -= away * BYTES_OF_PARAMETER * parameters / BANDWIDTH
        rows = tuple(number / mean for number in plan.rows)
        clones = sum(owner >= 0 for owner in plan.owners)
        plans.append(Planned(rows, max(rows), sum(plan.amounts) / sum(before), clones, saved * 1e3))
    means = {
        figure: sum(getattr(layer_plan, figure) for layer_plan in plans) / DRAWS
        for figure in ("max_over_mean", "moved", "clones", "saved_ms")
    }
    return Planned(plans[0].rows, **means)


@cache
def _counts(name: str, layer: int) -> list[list[int]]:
    experts = SHAPE.experts
    assert experts is not None, "the shape has experts"
    sizes = TOKENS * RANKS, experts.top_k, experts.num_experts
    choices = LOADS[name].choices(*sizes, seed=layer, step=0, device="cpu")
    parts = choices.chunk(RANKS)
    return [part.flatten().bincount(minlength=experts.num_experts).tolist() for part in parts]


def table() -> str:
    """Return the table of the page."""
    lines = []
    for name in LOADS:
        for places in PLACES:
            plan = planned(name, places)
            cells = [name, str(places), f"{plan.max_over_mean:.2f}", "", "", ""]
            if places:
                cells[3:] = f"{plan.moved:.1%}", f"{plan.clones:.1f}", f"{plan.saved_ms:.2f} ms"
            lines.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(lines)


def picture() -> str:
    """Return the picture: bars for the rows of every rank, by workload and places."""
    width, parts = 760, [text(10, 20, TITLE)]
    for place, colour in zip(PLACES, _COLOURS, strict=True):
        label = f"{place} place{'s' * (place > 1)} per rank" if place else "without clones"
        x = 10 + 170 * place
        parts += [box(x, 32, 12, 12, colour), text(x + 18, 43, label)]
    for number, name in enumerate(LOADS):
        floor = _TOP + (number + 1) * (2 * _UNIT + 60) - 30
        mean = f"M10 {floor - _UNIT}H{width - 10}"
        parts.append(text(10, floor + 34, name))
        parts.append(f"<path d='{mean}' stroke='#333' stroke-dasharray='4 3'/>")
        parts += [text(44 + 175 * rank, floor + 16, f"rank {rank}") for rank in range(RANKS)]
        for group, places in enumerate(PLACES):
            for rank, rows in enumerate(planned(name, places).rows):
                x, tall = 40 + 175 * rank + (_BAR + 4) * group, round(rows * _UNIT)
                parts.append(box(x, floor - tall, _BAR, tall, _COLOURS[group]))
        parts.append(f"<path d='M10 {floor}H{width - 10}' stroke='#333'/>")
    return picture_of(width, _TOP + len(LOADS) * (2 * _UNIT + 60), parts)


def numbers_of(text: str) -> list[float]:
    """Return all numbers of a text."""
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text)]


def write() -> None:
    """Draw the picture and write the table of the page again."""
    PICTURE.write_text(picture())
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
