"""The page `docs/options.md`, made from the signature and the docstring of `MegatronStrategy`."""

from __future__ import annotations

import inspect
import re
import textwrap
import types
from collections.abc import Callable
from dataclasses import is_dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_megatron.strategy.megatron_strategy import MegatronStrategy
from lightning_megatron.strategy.options.strategy_options import StrategyOptions
from tests.docs.blocks import DOCS

OPTIONS = DOCS / "options.md"
_TYPES = {
    bool: "`True`, `False`",
    str: "a string",
    int: "an integer",
    float: "a number",
    timedelta: "a `timedelta`",
    type(None): "`None`",
    dict: "a mapping",
    list: "a list",
    Callable: "a function",
}
_MOST = 10**8
_INTRODUCTION = """\
# Options

Every argument of `MegatronStrategy`. This page is generated from the code:
`python -m tests.docs.generate` regenerates it, and a test fails if it is outdated. In a recipe, an
option is a key under `trainer.strategy.init_args`; on the command line it is
`--trainer.strategy.NAME VALUE`. What few people change are fields of six records, which Python
takes as `job=JobOptions(timeout=60)` or `job={"timeout": 60}`, a recipe as a mapping `job: {timeout:
60}`, and the command line as `--trainer.strategy.job.timeout 60`.

"""


def _legal(kind: Any) -> list[str]:
    """Return the legal values of an annotation, in words."""
    origin = get_origin(kind)
    if origin in {Union, types.UnionType}:
        return list(dict.fromkeys(word for part in get_args(kind) for word in _legal(part)))
    if origin is Literal:
        return [f"`{value!r}`" for value in get_args(kind)]
    if origin is Annotated:
        base, *bounds = get_args(kind)
        return [f"{word}{_bounds(bounds[0])}" for word in _legal(base)]
    if origin is tuple:
        return [f"a list of {', '.join(_legal(get_args(kind)[0]))}"]
    if origin in _TYPES:
        return [_TYPES[origin]]
    if is_dataclass(kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        return [f"a mapping, or {article} `{kind.__name__}`"]
    return [_TYPES[kind]]


def _bounds(limits: Any) -> str:
    maximum = None if limits.maximum is None or limits.maximum >= _MOST else limits.maximum
    given = {"of at least": limits.minimum, "above": limits.above, "below": limits.below}
    given["of at most"] = maximum
    words = [f"{name} {limit}" for name, limit in given.items() if limit is not None]
    return " " + " and ".join(words) if words else ""


def _explanations(kind: type) -> dict[str, str]:
    """Return the text of every argument in a class docstring's section Args."""
    text = inspect.getdoc(kind) or ""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    assert section is not None, f"the docstring of {kind.__name__} has no section Args"
    entry = r"^    (\w+): ((?:.*\n?)(?:        .*\n?)*)"
    entries = re.findall(entry, section.group(1), re.MULTILINE)
    return {name: re.sub(r"\s+", " ", words).replace("``", "`").strip() for name, words in entries}


def _rows_and_sections(kind: type, declared_by: Any, prefix: str = "") -> tuple[str, str]:
    """Return the rows of the table and the sections of a class's arguments."""
    explanations = _explanations(kind)
    kinds = get_type_hints(
        StrategyOptions if kind is MegatronStrategy else kind, include_extras=True
    )
    declared = get_type_hints(declared_by, include_extras=True)
    rows, sections = "", ""
    for name, parameter in inspect.signature(kind).parameters.items():
        default, record = parameter.default, kinds[name]
        words = _legal(record)
        if "a string" in words:  # the signature may list the strings
            words = _legal(declared[name])
        legal = ", ".join(words)
        text = textwrap.fill(explanations[name], 98, break_long_words=False, break_on_hyphens=False)
        shown, anchor = prefix + name, (prefix + name).replace(".", "")
        if is_dataclass(record) and isinstance(default, record):
            sections += f"\n## `{shown}`\n\n{text}\n"
            more_rows, more = _rows_and_sections(record, record, f"{name}.")
            rows, sections = rows + more_rows, sections + more
            continue
        rows += f"| [`{shown}`](#{anchor}) | `{default!r}` | {legal} |\n"
        level = "###" if prefix else "##"
        sections += f"\n{level} `{shown}`\n\nDefault: `{default!r}`. Legal: {legal}.\n\n{text}\n"
    return rows, sections


def options_page() -> str:
    """Return the text of the page."""
    rows, sections = _rows_and_sections(MegatronStrategy, MegatronStrategy.__init__)
    head = "| option | default | legal values |\n|---|---|---|\n"
    return _INTRODUCTION + head + rows + sections
