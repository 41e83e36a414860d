"""The picture `docs/rooms.svg`: which room imports which, read from the package's syntax trees."""

from __future__ import annotations

from tests.docs.blocks import DOCS, rooms
from tests.docs.svg import box, picture_of, text
from tests.import_graph import PACKAGE, files_of

PICTURE = DOCS / "rooms.svg"
_CELL, _LEFT, _TOP = 30, 110, 100


def imports_of(room: str) -> set[str]:
    """Return the other rooms that the files of a room import."""
    names = [one.name.split(".") for file in files_of(PACKAGE / room) for one in file.imports]
    imported = {name[1] for name in names if name[0] == "lightning_megatron"}
    return imported & set(rooms()) - {room}


def room_picture() -> str:
    """Return the picture: a row for each room, with a square under every room that it imports."""
    names, parts = rooms(), []
    for row, room in enumerate(names):
        x, y = _LEFT + _CELL * row, _TOP + _CELL * row
        parts.append(text(_LEFT - 10, y + 20, room, 14, "text-anchor='end' "))
        turned = f"transform='rotate(-50 {x + 18} {_TOP - 8})' "
        parts.append(text(x + 18, _TOP - 8, room, 14, turned))
        colours = dict.fromkeys(names, "#f2f2f2") | dict.fromkeys(imports_of(room), "#3949ab")
        colours[room] = "#bbb"
        for column, name in enumerate(names):
            parts.append(box(_LEFT + _CELL * column, y, _CELL - 3, _CELL - 3, colours[name]))
    size = _CELL * len(names)
    return picture_of(_LEFT + size + 50, _TOP + size + 10, parts)
