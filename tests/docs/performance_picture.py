"""The picture `docs/performance.svg`: bars for the times in the README's table of measurements."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.docs.blocks import DOCS, README
from tests.docs.svg import box, picture_of, text

PICTURE = DOCS / "performance.svg"
MEASURED = re.compile(r"<!-- measured -->\n(?:\|.*\n){2}((?:\|.*\n)+)")
# Words of this size can be read on a phone of 390 px, which shows the picture at 0.58 of its width.
_SIZE, _LETTER = 16, 8.7
_PIXELS_PER_MS = 0.4
_LEFT, _ROW, _TOP = 10, 74, 34


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
    parts, width = [text(_LEFT, 20, "Milliseconds per step, two H200s", _SIZE)], 0.0
    for number, row in enumerate(rows):
        y = _TOP + _ROW * number
        parts.append(text(_LEFT, y + 18, row.name.replace("; ", ": "), _SIZE))
        remark = " (slow host)" if row.is_host_slow else ""
        ours = f"{row.ours:.2f} this project, speed-up {row.speed_up}{remark}"
        bars = (row.ours, "#3949ab", ours), (row.peer, "#bbb", f"{row.peer:.2f} Megatron-Core")
        for top, (time, colour, label) in zip((y + 25, y + 46), bars, strict=True):
            end = _LEFT + round(time * _PIXELS_PER_MS)
            parts.append(box(_LEFT, top, end - _LEFT, 18, colour))
            parts.append(text(end + 6, top + 15, label, _SIZE))
            width = max(width, end + 6 + _LETTER * len(label))
    return picture_of(round(width), _TOP + _ROW * len(rows), parts)
