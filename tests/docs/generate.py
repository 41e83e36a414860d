"""Write the generated parts of `docs/` again: ``python -m tests.docs.generate``.

These are the map of the rooms in `docs/architecture.md`, the table of their
sub-rooms, the pages of the API and of options, the help of commands, the tables of kept bytes and of planned clones, the list of trained
schedules, and the pictures of rooms, measured times, schedules and clones.
"""

from __future__ import annotations

from pathlib import Path

from lightning_megatron.cli.main import HELP
from tests.docs import clone_picture, kept_table, performance_picture, schedule_picture
from tests.docs.api_page import API, api_page
from tests.docs.blocks import DOCS, MAP, SUB_ROOM_TABLE, room_map, sub_room_table
from tests.docs.help_texts import help_texts
from tests.docs.options_page import OPTIONS, options_page
from tests.docs.room_picture import PICTURE, room_picture


def write_map(page: Path) -> None:
    """Write the map of the rooms into a page again, and the table of sub-rooms if it has one."""
    text = MAP.sub(lambda _: room_map(), page.read_text())
    page.write_text(SUB_ROOM_TABLE.sub(lambda _: sub_room_table(), text))


if __name__ == "__main__":
    write_map(DOCS / "architecture.md")
    API.write_text(api_page())
    OPTIONS.write_text(options_page())
    HELP.write_text(help_texts())
    PICTURE.write_text(room_picture())
    performance_picture.PICTURE.write_text(performance_picture.performance_picture())
    schedule_picture.write_picture()
    schedule_picture.write_trained_schedules()
    clone_picture.write()
    kept_table.write()
