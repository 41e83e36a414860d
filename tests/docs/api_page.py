"""The page `docs/api.md`: the public names, read from the stubs that list them."""

from __future__ import annotations

import ast
import re

from tests.docs.blocks import DOCS
from tests.import_graph import PACKAGE, ROOT

API = DOCS / "api.md"
#: Headings by the first part of the home of a name, in the order of the page.
SECTIONS = {
    "strategy": "Strategy, command line and callbacks",
    "plan": "Settings of a layout",
    "forecast": "Description of a cluster",
    "groups": "Process groups",
    "models": "Models and their training",
    "layers": "Layers",
    "data": "Data",
    "generation": "Text generation",
}
#: What the page shows of a class besides its docstring; nothing else by default.
MEMBERS = {
    "GPTConfig": "inherited_members: true",
    "GPT": "members: [forward]",
    "EncoderConfig": "members: [bert]",
    "Encoder": "members: [forward]",
    "DPO": "members: [log_probs]",
    "ParallelLayout": "",
    "ParallelMesh": "",
}
_HEAD = """# API

The public names of `lightning_megatron`, of its modules `errors`, `tasks`, `families` and
`building_blocks`; all others may change. [Options](options.md) describes the arguments of
`MegatronStrategy`. The files `__init__.pyi` and `building_blocks.pyi` of the package list the names,
and `python -m tests.docs.generate` writes this page from them.
"""
_ERRORS = """
## Errors

`lightning_megatron.errors` has them.
"""
_TASKS = """
## Tasks

Each folder of `lightning_megatron.tasks` is a task, which is built from public names alone.
"""
_FAMILIES = """
## Families

`lightning_megatron.families` has the names for [a family of your own](families.md).
"""
_BLOCKS = """
## Building blocks

`lightning_megatron.building_blocks` has what data, modules and metrics of your own may be built
from. The tasks of this package use nothing else.

| name | what it is |
|---|---|
"""


def names_in(stub: str) -> dict[str, str]:
    """Return the home of each name that a file of the package imports, such as a stub."""
    body = ast.parse((PACKAGE / stub).read_text()).body
    imports = [one for one in body if isinstance(one, ast.ImportFrom) and one.module]
    return {alias.name: one.module or "" for one in imports for alias in one.names}


def api_page() -> str:
    """Return the page."""
    public = {
        name: home for name, home in names_in("__init__.pyi").items() if name != "__version__"
    }
    parts = [_HEAD]
    for room, heading in SECTIONS.items():
        parts.append(f"\n## {heading}\n")
        homes = {name: home for name, home in public.items() if home.split(".")[1] == room}
        parts += [_entry(name, homes[name]) for name in sorted(homes)]
        assert homes, f"no public name is of {room}"
    assert sum(part.startswith("\n:::") for part in parts) == len(public), "a section is missing"
    errors = ast.parse((PACKAGE / "errors.py").read_text()).body
    classes = [one.name for one in errors if isinstance(one, ast.ClassDef)]
    parts += [_ERRORS, *(_entry(name, "lightning_megatron.errors") for name in sorted(classes))]
    parts.append(_TASKS)
    for file in sorted(PACKAGE.glob("tasks/*/__init__.py")):
        task = names_in(str(file.relative_to(PACKAGE)))
        parts.append(f"\n### `lightning_megatron.tasks.{file.parent.name}`\n")
        # Constants and types have no docstring to show.
        shown = [name for name in sorted(task) if _definition(name, _text_of(task[name]))]
        parts += [_entry(name, task[name]) for name in shown]
    families = names_in("families.py")
    families.pop("annotations")
    parts += [_FAMILIES, *(_entry(name, families[name]) for name in sorted(families)), _BLOCKS]
    blocks = names_in("building_blocks.pyi")
    parts += [f"| `{name}` | {summary_of(name, blocks[name])} |\n" for name in sorted(blocks)]
    page = "".join(parts)
    assert all(f".{name}\n" in page for name in MEMBERS), "a class has members but no entry"
    return page


def _entry(name: str, home: str) -> str:
    is_class = name[0].isupper()
    options = MEMBERS.get(name, "members: false" if is_class else "")
    return f"\n::: {home}.{name}\n" + (f"    options:\n      {options}\n" if options else "")


def summary_of(name: str, home: str) -> str:
    """Return the first sentence about a name: of its docstring, or of the comment above it."""
    text = _text_of(home)
    node = _definition(name, text)
    if node is not None:
        first = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
        return re.sub(r":\w+:`([^`]*)`", r"`\1`", first.split(". ")[0].rstrip(".")).replace(
            "``", "`"
        )
    comment = re.search(rf"((?:^#: .*\n)+)^{name}\b", text, re.MULTILINE)
    assert comment is not None, f"{home}.{name} needs a docstring, or a comment #: above it"
    return comment.group(1).replace("#: ", "").replace("\n", " ").strip().rstrip(".")


def _text_of(home: str) -> str:
    path = ROOT / home.replace(".", "/")
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    return file.read_text()


def _definition(name: str, text: str) -> ast.FunctionDef | ast.ClassDef | None:
    """Return the class or function of a name; None for a constant or a type."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    return None
