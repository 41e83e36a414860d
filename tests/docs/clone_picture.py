"""The picture `docs/clones.svg`, and the table of its page: rows of ranks under plans of clones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from benchmarks.routing import Popularity
from benchmarks.shapes import SHAPES
from benchmarks.train_shapes import CLONE_COST
from lightning_megatron.plan.cloning import plan_clones
from tests.docs.blocks import DOCS

PAGE = DOCS / "experts.md"
PICTURE = DOCS / "clones.svg"
TABLE = re.compile(r"(?<=<!-- planned clones -->\n)(?:\|.*\n)+")
#: Number of ranks, tokens per rank, and layers; every layer routes its own tokens.
RANKS, TOKENS, DRAWS = 4, 4096, 12
PLACES = (0, 1, 2)
#: Names of popularities in the table, the exponent 1.0 or 0.6, and whether busy experts are neighbours.
POPULARITIES = {
    "(1 + index)^-1.0, a new random order of experts in each layer": Popularity(
        1.0, is_ordered=False
    ),
    "(1 + index)^-0.6, experts in the order of their popularity": Popularity(0.6, is_ordered=True),
}
_STYLE = "font-family='sans-serif' font-size='13' fill='#333'"
_COLOURS = ("#c0504d", "#f0ad4e", "#4f81bd")
_UNIT, _BAR, _TOP = 70, 14, 62


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
    """Plan clones for Qwen3-30B-A3B's shape under a popularity; 0 places give no clones."""
    experts = SHAPES["qwen3_12"].experts
    assert experts is not None
    plans = []
    for layer in range(DRAWS):
        counts = _counts(name, layer)
        homes = len(counts[0]) // RANKS
        totals = [sum(column) for column in zip(*counts, strict=True)]
        before = [sum(totals[rank * homes : (rank + 1) * homes]) for rank in range(RANKS)]
        mean = sum(before) / RANKS
        plan = plan_clones(counts, max(places, 1), CLONE_COST.min_rows if places else sum(before))
        away = max(sum(owner // homes == rank for owner in plan.owners) for rank in range(RANKS))
        parameters = 3 * SHAPES["qwen3_12"].hidden_size * experts.ffn_hidden_size
        saved = CLONE_COST.seconds_saved(max(before) - max(plan.rows), away, parameters)
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
    experts = SHAPES["qwen3_12"].experts
    assert experts is not None
    sizes = TOKENS, experts.top_k, experts.num_experts
    return [
        POPULARITIES[name]
        .choices(*sizes, layer, rank, "cpu")
        .flatten()
        .bincount(minlength=experts.num_experts)
        .tolist()
        for rank in range(RANKS)
    ]


def table() -> str:
    """Return the table of the page."""
    lines = [
        "| popularity of experts | places per rank | rows of the busiest rank over the mean | rows "
        "moved | clones | predicted gain per layer |",
        "|---|---|---|---|---|---|",
    ]
    for name in POPULARITIES:
        for places in PLACES:
            plan = planned(name, places)
            cells = [name, str(places), f"{plan.max_over_mean:.2f}", "", "", ""]
            if places:
                cells[3:] = f"{plan.moved:.1%}", f"{plan.clones:.1f}", f"{plan.saved_ms:.2f} ms"
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def picture() -> str:
    """Return the picture as SVG: bars for the rows of every rank, by popularity and places."""
    width = 760
    height = _TOP + len(POPULARITIES) * (2 * _UNIT + 60)
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}'>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        f"<text x='10' y='20' {_STYLE}>Rows of each of four ranks over the mean, in one layer of "
        "Qwen3-30B-A3B's shape (plan)</text>",
    ]
    for place, colour in zip(PLACES, _COLOURS, strict=True):
        label = "without clones" if not place else f"{place} place{'s' * (place > 1)} per rank"
        x = 10 + 170 * place
        lines.append(f"<rect x='{x}' y='32' width='12' height='12' fill='{colour}'/>")
        lines.append(f"<text x='{x + 18}' y='43' {_STYLE}>{label}</text>")
    for number, name in enumerate(POPULARITIES):
        floor = _TOP + (number + 1) * (2 * _UNIT + 60) - 30
        lines.append(f"<text x='10' y='{floor + 34}' {_STYLE}>popularity {name}</text>")
        lines.append(
            f"<path d='M10 {floor - _UNIT}H{width - 10}' stroke='#333' stroke-dasharray='4 3'/>"
        )
        for rank in range(RANKS):
            lines.append(
                f"<text x='{44 + 175 * rank}' y='{floor + 16}' {_STYLE}>rank {rank}</text>"
            )
        for group, places in enumerate(PLACES):
            for rank, rows in enumerate(planned(name, places).rows):
                x = 40 + 175 * rank + (_BAR + 4) * group
                tall = round(rows * _UNIT)
                bar = f"x='{x}' y='{floor - tall}' width='{_BAR}' height='{tall}'"
                lines.append(f"<rect {bar} fill='{_COLOURS[group]}'/>")
        lines.append(f"<path d='M10 {floor}H{width - 10}' stroke='#333'/>")
    return "\n".join([*lines, "</svg>"]) + "\n"


def numbers_of(text: str) -> list[float]:
    """Return all numbers of a text."""
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text)]


def write() -> None:
    """Draw the picture and write the table of the page again."""
    PICTURE.write_text(picture())
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
