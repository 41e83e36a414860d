"""The picture `docs/schedules.png`, and the sentence of its page that lists the trained schedules."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any, get_args

from lightning_megatron.cli.command import run_command
from lightning_megatron.cli.schedule import COMMAND, EXAMPLES
from lightning_megatron.plan.schedule import ScheduleName
from tests.docs.blocks import DOCS, read_blocks

PAGE = DOCS / "schedules.md"
PICTURE = DOCS / "schedules.png"
TRAINED = re.compile(r"(?<=<!-- trained schedules -->\n).*?\n(?=\n)", re.DOTALL)
#: Colours of the palette, which makes the file a quarter as large.
NUM_COLOURS = 64


def trained_schedules() -> str:
    """Return the sentences that say which schedules a training runs."""
    names = get_args(ScheduleName)
    return (
        f"A training runs {', '.join(f'`{name}`' for name in names)} (`MegatronStrategy(schedule=...)`).\n"
        "It also runs [a schedule of your own](#a-schedule-of-your-own), from a function.\n"
    )


def write_picture() -> None:
    """Draw the picture with the command of the page, and reduce its colours."""
    from PIL import Image, PngImagePlugin

    (block,) = [block for block in read_blocks() if block.name == "compare schedules"]
    arguments = block.code.split()[2:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / arguments[-1]
        run_command("schedule", COMMAND, [*arguments[:-1], str(path)], EXAMPLES)
        drawn: Any = Image.open(path)
        texts = PngImagePlugin.PngInfo()
        texts.add_text("Description", drawn.text["Description"])
        reduced = drawn.convert("RGB").quantize(NUM_COLOURS)
        reduced.save(PICTURE, optimize=True, pnginfo=texts)


def write_trained_schedules() -> None:
    """Write the sentences about trained schedules into the page again."""
    PAGE.write_text(TRAINED.sub(lambda _: trained_schedules(), PAGE.read_text()))
