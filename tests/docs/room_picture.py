"""The picture `docs/rooms.svg`: which room imports which, read from the syntax trees of the
package.
"""

from __future__ import annotations

from tests.docs.blocks import DOCS, rooms
from tests.import_graph import PACKAGE, files_of

PICTURE = DOCS / "rooms.svg"
_CELL = 30
_LEFT = 110
_TOP = 100
_STYLE = "font-family='sans-serif' font-size='14' fill='#333'"


def imports_of(room: str) -> set[str]:
    """Return the other rooms that the files of a room import."""
    names = [one.name.split(".") for file in files_of(PACKAGE / room) for one in file.imports]
    imported = {name[1] for name in names if name[0] == "lightning_megatron"}
    return imported & set(rooms()) - {room}


def room_picture() -> str:
    """Return the picture as SVG: one row for each room, with a square under every room that it
    imports.
    """
    names = rooms()
    width = _LEFT + _CELL * len(names) + 50
    height = _TOP + _CELL * len(names) + 10
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}'>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
    ]
    for row, room in enumerate(names):
        x, y = _LEFT + _CELL * row, _TOP + _CELL * row
        lines.append(
            f"<text x='{_LEFT - 10}' y='{y + 20}' text-anchor='end' {_STYLE}>{room}</text>"
        )
        lines.append(
            f"<text x='{x + 18}' y='{_TOP - 8}' transform='rotate(-50 {x + 18} {_TOP - 8})' "
            f"{_STYLE}>{room}</text>"
        )
        imported = imports_of(room)
        for column, column_room in enumerate(names):
            if column_room == room:
                color = "#bbb"
            elif column_room in imported:
                color = "#3949ab"
            else:
                color = "#f2f2f2"
            left = _LEFT + _CELL * column
            lines.append(
                f"<rect x='{left}' y='{y}' width='{_CELL - 3}' height='{_CELL - 3}' "
                f"fill='{color}'/>"
            )
    return "\n".join([*lines, "</svg>"]) + "\n"
