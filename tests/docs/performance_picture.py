"""The picture `docs/performance.svg`: bars for the times in the README's table of measurements."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.docs.blocks import DOCS, README
from tests.docs.svg import box, picture_of, text

PICTURE = DOCS / "performance.svg"
MEASURED = re.compile(r"<!-- measured -->\n(?:\|.*\n){2}((?:\|.*\n)+)")
_PIXELS_PER_MS = 1.2
_LEFT, _ROW, _TOP = 230, 58, 34


@dataclass(frozen=True)
class Measurement:
    """A row of the table: times of a step in milliseconds, and whether a slow host limited them."""

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
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        ours, peer = (float(cell.removesuffix(" ms")) for cell in cells[2:4])
        name, speed_up, host = f"{cells[0]}; {cells[1]}", *cells[4:]
        rows.append(Measurement(name, ours, peer, speed_up, host.startswith("yes")))
    return rows


def performance_picture() -> str:
    """Return the picture: two bars for each row, ours above that of Megatron-Core."""
    rows = measurements()
    parts = [text(10, 20, "Milliseconds per step, two H200s (shorter is faster)")]
    for number, row in enumerate(rows):
        y = _TOP + _ROW * number
        model, layout = row.name.split("; ")
        parts += [text(10, y + 16, model), text(10, y + 36, layout)]
        remark = " (slow host)" if row.is_host_slow else ""
        label = f"{row.ours} this project, speed-up {row.speed_up}{remark}"
        parts += _bar(y, row.ours, "#3949ab", label)
        parts += _bar(y + 21, row.peer, "#bbb", f"{row.peer} Megatron-Core")
    width = _LEFT + round(max(row.peer for row in rows) * _PIXELS_PER_MS) + 170
    return picture_of(width, _TOP + _ROW * len(rows), parts)


def _bar(y: int, time: float, colour: str, label: str) -> list[str]:
    length = round(time * _PIXELS_PER_MS)
    return [box(_LEFT, y, length, 18, colour), text(_LEFT + length + 6, y + 14, label)]
