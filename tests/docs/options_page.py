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
        words = [word for part in get_args(kind) for word in _legal(part)]
        return list(dict.fromkeys(words))
    if origin is Literal:
        return [f"`{value!r}`" for value in get_args(kind)]
    if origin is Annotated:
        base, *bounds = get_args(kind)
        return [f"{word}{_bounds(bounds[0])}" for word in _legal(base)]
    if origin is dict:
        return ["a mapping"]
    if origin is list:
        return ["a list"]
    if origin is Callable:
        return ["a function"]
    if is_dataclass(kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        return [f"a mapping, or {article} `{kind.__name__}`"]
    return [_TYPES[kind]]


def _bounds(limits: Any) -> str:
    words = []
    if limits.minimum is not None:
        words.append(f"of at least {limits.minimum}")
    if limits.above is not None:
        words.append(f"above {limits.above}")
    if limits.below is not None:
        words.append(f"below {limits.below}")
    if limits.maximum is not None and limits.maximum < _MOST:
        words.append(f"of at most {limits.maximum}")
    return " " + " and ".join(words) if words else ""


def _explanations() -> dict[str, str]:
    """Return the text of every argument in the class docstring's section Args."""
    text = inspect.getdoc(MegatronStrategy) or ""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    assert section is not None, "the docstring of MegatronStrategy has no section Args"
    entries = re.findall(
        r"^    (\w+): ((?:.*\n?)(?:        .*\n?)*)", section.group(1), re.MULTILINE
    )
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
        legal = ", ".join(words)
        rows.append(f"| [`{name}`](#{name}) | `{parameter.default!r}` | {legal} |\n")
        text = textwrap.fill(explanations[name], 98, break_long_words=False, break_on_hyphens=False)
        sections.append(
            f"\n## `{name}`\n\nDefault: `{parameter.default!r}`. Legal: {legal}.\n\n{text}\n"
        )
    return _INTRODUCTION + "".join(rows) + "".join(sections)
