"""Read the README's code blocks, and the map of the rooms that it shows.

A block is run as it stands, in one temporary folder where `recipes` is the project's. A comment before a block names
it and may say how the test runs it on a small machine:

    <!-- block: NAME
    before: tests/FILE.py       python: this file's text comes first (names that are the reader's own)
    replace: OLD => NEW         this text is replaced
    append: ARGUMENTS           bash: these arguments are added to the last line
    run: no                     the block is not run: the reason stands in the README or in test_readme.py
    -->

A block ```text after <!-- prints: NAME --> is what the block NAME prints. `pip install ... &&` at the start of a bash
block is left out: the package is installed when its tests run.
Run as a program (`python -m tests.readme_blocks`), it writes the map of the rooms into the README again.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(
    r"(?:<!-- block: (?P<header>(?:(?!-->).)*)-->\s*)?^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
PRINTS = re.compile(r"<!-- prints: (?P<name>[^>]*?) -->\s*^```text\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
MAP = re.compile(r"(?<=<!-- rooms -->\n```text\n).*?(?=```)", re.DOTALL)
ROOMS = "plan groups layers experts models swap training pipeline checkpoint data strategy"
ROOM_WIDTH = 14


@dataclass(frozen=True)
class Block:
    """A code block of the README and how the test runs it."""

    name: str
    language: str
    code: str
    runs: bool = True
    before: str | None = None
    replacements: tuple[tuple[str, str], ...] = field(default=())
    append: str = ""

    @property
    def program(self) -> str:
        """The text that the test runs."""
        code = self.code
        for old, new in self.replacements:
            assert old in code, f"README block {self.name}: {old!r}, which its comment replaces, is not in it"
            code = code.replace(old, new)
        if self.language == "bash":
            code = re.sub(r"^pip install [^&\n]*&& *", "", code)
            return f"{code.rstrip()} {self.append}\n"
        return (ROOT / self.before).read_text() + code if self.before else code


def read_blocks() -> list[Block]:
    """Return the blocks of the README that are programs, in order."""
    blocks = []
    for number, match in enumerate(BLOCK.finditer(README.read_text()), 1):
        if match["language"] not in {"bash", "python"}:
            continue
        name, *lines = (match["header"] or f"block {number}").strip().splitlines()
        options = [tuple(part.strip() for part in line.split(":", 1)) for line in lines]
        single = {key: value for key, value in options if key != "replace"}
        unknown = single.keys() - {"before", "append", "run"}
        assert not unknown, f"README block {name}: unknown options {unknown}"
        blocks.append(
            Block(
                name=name,
                language=match["language"],
                code=match["code"],
                runs=single.get("run") != "no",
                before=single.get("before"),
                replacements=tuple(tuple(v.split(" => ")) for key, v in options if key == "replace"),  # type: ignore[misc]
                append=single.get("append", ""),
            )
        )
    return blocks


def printed_text() -> dict[str, str]:
    """Return what the README says that blocks print, by name of the block."""
    return {match["name"]: match["text"] for match in PRINTS.finditer(README.read_text())}


def room_map() -> str:
    """Return one line for each room: its folder and the first sentence of its docstring."""
    lines = ["lightning_megatron/\n"]
    for room in ROOMS.split():
        tree = ast.parse((ROOT / "lightning_megatron" / room / "__init__.py").read_text())
        sentence = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
        lines.append(f"  {room + '/':<{ROOM_WIDTH}}{sentence}\n")
    return "".join(lines)


if __name__ == "__main__":
    README.write_text(MAP.sub(lambda _: room_map(), README.read_text()))
