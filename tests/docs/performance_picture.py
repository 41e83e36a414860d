"""The picture `docs/performance.svg`: bars for the times in the README's table of measurements."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.docs.blocks import DOCS, README

PICTURE = DOCS / "performance.svg"
MEASURED = re.compile(r"<!-- measured -->\n(?:\|.*\n){2}((?:\|.*\n)+)")
_STYLE = "font-family='sans-serif' font-size='13' fill='#333'"
_PIXELS_PER_MS = 1.2
_LEFT = 230
_ROW = 58
_TOP = 34


@dataclass(frozen=True)
class Measurement:
    """A row of the table: times of a step in milliseconds, their quotient, and whether a slow host limited them."""

    name: str
    ours: float
    peer: float
    speed_up: str
    is_host_slow: bool


def measurements() -> list[Measurement]:
    """Return the rows of the README's table."""
    table = MEASURED.search(README.read_text())
    assert table is not None, "README.md has no table after <!-- measured -->"
    rows = []
    for line in table.group(1).splitlines():
        cells = (cell.strip() for cell in line.strip("|").split("|"))
        model, layout, ours, peer, speed_up, host = cells
        name = f"{model}; {layout}"
        is_slow = host.startswith("yes")
        rows.append(Measurement(name, _number(ours), _number(peer), speed_up, is_slow))
    return rows


def _number(cell: str) -> float:
    return float(cell.removesuffix(" ms"))


def performance_picture() -> str:
    """Return the picture as SVG: two bars for each row, ours above that of Megatron-Core."""
    rows = measurements()
    width = _LEFT + round(max(row.peer for row in rows) * _PIXELS_PER_MS) + 170
    height = _TOP + _ROW * len(rows)
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}'>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        f"<text x='10' y='20' {_STYLE}>Milliseconds per step, two H200s (shorter is faster)</text>",
    ]
    for number, row in enumerate(rows):
        y = _TOP + _ROW * number
        model, layout = row.name.split("; ")
        lines.append(f"<text x='10' y='{y + 16}' {_STYLE}>{model}</text>")
        lines.append(f"<text x='10' y='{y + 36}' {_STYLE}>{layout}</text>")
        remark = " (slow host)" if row.is_host_slow else ""
        label = f"{row.ours} this project, speed-up {row.speed_up}{remark}"
        lines += _bar(y, row.ours, "#3949ab", label)
        lines += _bar(y + 21, row.peer, "#bbb", f"{row.peer} Megatron-Core")
    return "\n".join([*lines, "</svg>"]) + "\n"


def _bar(y: int, time: float, color: str, label: str) -> list[str]:
    length = round(time * _PIXELS_PER_MS)
    return [
        f"<rect x='{_LEFT}' y='{y}' width='{length}' height='18' fill='{color}'/>",
        f"<text x='{_LEFT + length + 6}' y='{y + 14}' {_STYLE}>{label}</text>",
    ]
