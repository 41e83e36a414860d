"""Code blocks of the README and of the pages in `docs/`, and the maps of rooms there.

The test runs each block as it stands, in one temporary folder where `recipes` and `docs` are the project's:
first the README's blocks, then those of the pages in the order of the site's navigation
(`mkdocs.yml`). A block that stands on several pages runs once. `blocks.yaml` names the blocks that
do not run as they stand, and says how they run. `pip install ... &&` at the start of a bash block
is left out: the package is installed when its tests run.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.forked_script import run_python, run_script
from tests.import_graph import PACKAGE, ROOT
from tests.promises.test_rules import LEAVES, ROOMS, SUB_ROOMS

README = ROOT / "README.md"
DOCS = ROOT / "docs"
#: How single blocks are run, by name.
STEERING: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text()
)
BLOCK = re.compile(r"^```(?P<language>bash|python)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"^```text\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
MAP = re.compile(r"(?<=<!-- rooms -->\n```text\n).*?(?=```)", re.DOTALL)
SUB_ROOM_TABLE = re.compile(r"(?<=<!-- sub-rooms -->\n)(?:\|.*\n)+")


@dataclass(frozen=True)
class Block:
    """A code block of a page and how the test runs it."""

    page: str
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
            assert old in code, (
                f"{self.page}, {self.name} lacks {old!r}, which tests/docs/blocks.yaml replaces"
            )
            code = code.replace(old, new)
        if self.language == "bash":
            code = re.sub(r"^pip install [^&\n]*&& *", "", code)
            return f"{code.rstrip()} {self.append}\n"
        return (ROOT / self.before).read_text() + code if self.before else code


def command_of(block: Block) -> list[str] | None:
    """Return the arguments of a block that is one command of this package and needs no shell, but
    of no block of the README: those run as they stand.
    """
    text = block.program.replace("\\\n", " ").strip()
    words = shlex.split(text) if block.language == "bash" else []
    is_alone = words[:1] == ["lightning-megatron"] and not re.search(r"[\n|&;<>$*#~]", text)
    return words[1:] if is_alone and block.page != README.name else None


def run_block(block: Block, folder: Path) -> str:
    """Run a block in a folder and return what it prints; it must end without an error."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = dict(os.environ, OMP_NUM_THREADS="1", PATH=path)
    command = command_of(block)
    if command is not None:
        run = run_python(["-m", "lightning_megatron", *command], folder, environment, timeout=280)
    elif block.language == "python":
        script = folder / (re.sub(r"\W+", "_", block.name) + ".py")
        script.write_text(block.program)
        run = run_script(script, folder, environment, timeout=280)
    else:
        shell = ["bash", "-euo", "pipefail", "-c", block.program]
        run = subprocess.run(
            shell, cwd=folder, env=environment, capture_output=True, text=True, timeout=280
        )
    assert run.returncode == 0, f"{block.program}\n{run.stdout[-4000:]}\n{run.stderr[-8000:]}"
    return run.stdout


def pages() -> list[Path]:
    """Return the README and the pages of the site, in the order in which their blocks run."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return [README, *(DOCS / path for path in re.findall(r"- ([\w/]+\.md)$", navigation, re.M))]


def read_blocks() -> list[Block]:
    """Return the programs of all pages in order, each once."""
    blocks: dict[str, Block] = {}
    for page in pages():
        for block in _blocks_of(page):
            blocks.setdefault(block.code, block)
    lost = STEERING.keys() - {block.name for block in blocks.values()}
    assert not lost, f"no page of the site has the blocks {lost} of tests/docs/blocks.yaml"
    return list(blocks.values())


def _blocks_of(page: Path) -> Iterator[Block]:
    path = page.relative_to(ROOT).as_posix()
    text = page.read_text()
    names = {_match_of(name, text).start(): name for name in _names_on(path)}
    for number, match in enumerate(BLOCK.finditer(text), 1):
        name = names.get(match.start(), f"{path} {number}")
        options = {**STEERING.get(name, {})}
        known = {"page", "holds", "before", "replace", "append", "run", "prints"}
        assert options.keys() <= known, f"blocks.yaml, {name}: unknown {options.keys() - known}"
        yield Block(
            page=path,
            name=name,
            language=match["language"],
            code=match["code"],
            runs=options.get("run", True),
            before=options.get("before"),
            replacements=tuple((old, new) for old, new in options.get("replace", ())),
            append=options.get("append", ""),
        )


def _names_on(path: str) -> list[str]:
    return [name for name, options in STEERING.items() if options["page"] == path]


def _match_of(name: str, text: str) -> re.Match[str]:
    """Return the one block of a page's text that holds the text of a name."""
    holds = STEERING[name]["holds"]
    found = [match for match in BLOCK.finditer(text) if holds in match["code"]]
    assert len(found) == 1, (
        f"{len(found)} blocks of {STEERING[name]['page']} hold {holds!r}, not one: the block "
        f"{name} of tests/docs/blocks.yaml has moved or changed. Say there which one it is."
    )
    return found[0]


def printed_text() -> dict[str, str]:
    """Return the texts that the pages give as the output of blocks, by name of the block."""
    texts = {}
    for name, options in STEERING.items():
        if options.get("prints"):
            page = (ROOT / options["page"]).read_text()
            printed = PRINTED.search(page, _match_of(name, page).end())
            assert printed is not None, f"{options['page']} lacks the output of {name}"
            texts[name] = printed["text"]
    return texts


def rooms() -> list[str]:
    """Return the rooms that exist, in the order of the map."""
    existing = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    # Those behind the ordered ones have rules of their own.
    known = [*ROOMS, *LEAVES, "tasks", "cli"]
    assert existing <= set(known), f"tests/promises/test_rules.py lacks {existing - set(known)}"
    return [room for room in known if room in existing]


def room_map() -> str:
    """Return one line for each room: its folder and the first sentence of its docstring."""
    width = max(map(len, rooms())) + 3
    lines = [f"  {room + '/':<{width}}{_description_of(room)}\n" for room in rooms()]
    return "".join(["lightning_megatron/\n", *lines])


def _description_of(room: str) -> str:
    """Return the first paragraph of the docstring of a room or sub-room, as one line."""
    tree = ast.parse((PACKAGE / room / "__init__.py").read_text())
    return (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")


def sub_rooms() -> list[str]:
    """Return the sub-rooms of all rooms, such as "swap/decide", in the order of their imports."""
    names: list[str] = []
    for room in rooms():
        folders = {path.parent.name for path in (PACKAGE / room).glob("*/__init__.py")}
        order = SUB_ROOMS.get(room, tuple(sorted(folders)))
        names += [f"{room}/{name}" for name in order if name in folders]
    return names


def sub_room_table() -> str:
    """Return one row for each sub-room: its folder and the first paragraph of its docstring."""
    rows = [f"| `{room}` | {_description_of(room).replace('``', '`')} |\n" for room in sub_rooms()]
    return "".join(["| sub-room | content |\n", "|---|---|\n", *rows])
