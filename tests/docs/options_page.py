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
`--trainer.strategy.NAME VALUE`.

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


def _explanations() -> dict[str, str]:
    """Return the text of every argument in the class docstring's section Args."""
    text = inspect.getdoc(MegatronStrategy) or ""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    assert section is not None, "the docstring of MegatronStrategy has no section Args"
    entry = r"^    (\w+): ((?:.*\n?)(?:        .*\n?)*)"
    entries = re.findall(entry, section.group(1), re.MULTILINE)
    return {name: re.sub(r"\s+", " ", words).replace("``", "`").strip() for name, words in entries}


def options_page() -> str:
    """Return the text of the page."""
    explanations = _explanations()
    kinds = get_type_hints(StrategyOptions, include_extras=True)
    declared = get_type_hints(MegatronStrategy.__init__, include_extras=True)
    parameters = inspect.signature(MegatronStrategy.__init__).parameters
    rows = ["| option | default | legal values |\n|---|---|---|\n"]
    sections = []
    for name, parameter in parameters.items():
        if name == "self":
            continue
        words = _legal(kinds[name])
        if "a string" in words:  # the signature may list the strings
            words = _legal(declared[name])
        legal, default = ", ".join(words), f"`{parameter.default!r}`"
        rows.append(f"| [`{name}`](#{name}) | {default} | {legal} |\n")
        text = textwrap.fill(explanations[name], 98, break_long_words=False, break_on_hyphens=False)
        sections.append(f"\n## `{name}`\n\nDefault: {default}. Legal: {legal}.\n\n{text}\n")
    return _INTRODUCTION + "".join(rows) + "".join(sections)
