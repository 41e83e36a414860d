"""Recipes: those that come with the package, and limits of all YAML files on a command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.strict_json import MAX_DEPTH, read_regular_file

#: Folder of the recipes: in a checkout a link to ``recipes``, in an installed package a copy.
RECIPES = Path(__file__).parent / "recipes"
#: Start of an argument that names a recipe instead of a file.
PREFIX = "recipe:"
#: Limits of a YAML file: its size (bytes), and its number of values with aliases expanded.
_MAX_BYTES = 1 << 18
_MAX_VALUES = 1 << 16
_MAX_DIGITS = 100
_TAG = "tag:yaml.org,2002:"
_PLAIN = frozenset(
    f"{_TAG}{name}" for name in "bool float int map merge null seq str timestamp value".split()
)
_REMEDY = "Repair the file."


def recipe_summaries() -> dict[str, str]:
    """Return the first comment line of each recipe, by the recipe's name."""
    summaries = {}
    for path in sorted(RECIPES.glob("*.yaml")):
        with open(path, encoding="utf-8") as file:
            summaries[path.stem] = file.readline().removeprefix("#").strip()
    return summaries


def recipe_path(name: str) -> Path:
    """Return the file of a recipe.

    Args:
        name: Name of the recipe, such as ``gpt_speeches_cpu``, with or without ``.yaml``.

    Raises:
        UnsupportedError: If no recipe has this name.
    """
    names = list(recipe_summaries())
    stem = name.removesuffix(".yaml")
    if stem not in names:
        raise UnsupportedError(
            f"{PREFIX}{name} is not a recipe of this package. The recipes are: {', '.join(names)}."
        )
    return RECIPES / f"{stem}.yaml"


def with_recipe_paths(arguments: Sequence[str]) -> list[str]:
    """Return command-line arguments in which ``recipe:NAME`` is replaced by the recipe's path.

    Args:
        arguments: Arguments; only values of ``-c`` and ``--config`` may name recipes.

    Raises:
        UnsupportedError: If no recipe has a given name.
    """
    resolved = []
    option = ""
    for argument in arguments:
        flag, equals, value = argument.rpartition("=") if "=" in argument else ("", "", argument)
        if (flag or option) in ("-c", "--config") and value.startswith(PREFIX):
            value = str(recipe_path(value.removeprefix(PREFIX)))
        resolved.append(f"{flag}{equals}{value}")
        option = argument
    return resolved


def check_recipes(arguments: Sequence[str]) -> None:
    """Refuse YAML files on a command line that no parser could read, or not in reasonable time.

    Errors of syntax are left to the parser.

    Args:
        arguments: Arguments, with names of recipes replaced by paths.

    Raises:
        CorruptDataError: If a file is large, not UTF-8, nested too deeply or without end, or has
            values of other types than JSON.
    """
    options = ("", *arguments)
    for option, argument in zip(options, arguments, strict=False):
        path = Path(argument.rpartition("=")[2])
        is_config = option in ("-c", "--config") or argument.startswith("--config=")
        if (is_config or path.suffix in (".yaml", ".yml")) and path.is_file():
            _check_recipe(path)


def _check_recipe(path: Path) -> None:
    try:
        text = read_regular_file(path, _REMEDY, _MAX_BYTES).decode()
        root = yaml.compose(text, yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise CorruptDataError(f"{path}: byte {error.start} is not UTF-8. {_REMEDY}") from None
    except RecursionError:
        raise _refused(path, 1, "it is nested too deeply") from None
    except yaml.YAMLError:
        return
    if root is not None:
        _count_values(path, root, [], {})


def _count_values(
    path: Path, node: yaml.Node, around: list[yaml.Node], counts: dict[int, int]
) -> int:
    """Return the number of values in a value with aliases expanded, and check each of them once.

    Args:
        around: Values that hold it.
        counts: Numbers of values in values that were counted, by identity.
    """
    line = node.start_mark.line + 1
    if any(outer is node for outer in around):
        raise _refused(path, line, "it holds itself")
    if len(around) == MAX_DEPTH:
        raise _refused(path, line, "it is nested too deeply")
    if node.tag not in _PLAIN:
        raise _refused(path, line, f"it has the type {node.tag.removeprefix(_TAG)!r}")
    if node.tag == f"{_TAG}int" and len(node.value) > _MAX_DIGITS:
        raise _refused(path, line, "it is an integer of too many digits")
    if id(node) not in counts:
        parts = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        inner = [*around, node]
        counts[id(node)] = 1 + sum(_count_values(path, part, inner, counts) for part in parts)
        if counts[id(node)] > _MAX_VALUES:
            raise _refused(path, line, f"it has more than {_MAX_VALUES} values, counting aliases")
    return counts[id(node)]


def _refused(path: Path, line: int, reason: str) -> CorruptDataError:
    return CorruptDataError(
        f"{path}:{line}: a value of a recipe must be a number, a text, a list or a mapping of "
        f"reasonable size: {reason}. {_REMEDY}"
    )
