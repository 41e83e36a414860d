"""Recipes: those that come with the package, and limits of all YAML files on a command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.option_errors import nearest
from lightning_megatron.strict_json import MAX_DEPTH, read_regular_file

#: Folder of the recipes: in a checkout a link to ``recipes``, in an installed package a copy.
RECIPES = Path(__file__).parent / "recipes"
#: Start of an argument that names a recipe instead of a file.
PREFIX = "recipe:"
#: Limits of a YAML file: its size (bytes), and its number of values with all aliases expanded.
_MAX_BYTES = 1 << 18
_MAX_VALUES = 1 << 16
_MAX_DIGITS = 100
_TAG = "tag:yaml.org,2002:"
_PLAIN = frozenset(
    f"{_TAG}{name}" for name in "bool float int map merge null seq str timestamp value".split()
)
#: Reference to another value, relative if it begins with dots.
_REFERENCE = re.compile(r"\$\{(?:[\w.]+:)?\s*(\.*)([\w.]+)[^{}$]*\}")
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
        name: Name of the recipe, such as ``gpt_speeches_cpu``, with or without ``recipe:`` before
            it and ``.yaml`` behind it.

    Raises:
        UnsupportedError: If no recipe has this name.
    """
    names = list(recipe_summaries())
    stem = name.removeprefix(PREFIX).removesuffix(".yaml")
    if stem not in names:
        raise UnsupportedError(
            f"{PREFIX}{name.removeprefix(PREFIX)} is not a recipe of this package."
            f"{nearest(stem, names)} The recipes are: {', '.join(names)}."
        )
    return RECIPES / f"{stem}.yaml"


def with_recipe_paths(arguments: Sequence[str]) -> list[str]:
    """Return command-line arguments in which ``recipe:NAME`` is replaced by the recipe's path.

    A file that changes another recipe, which ``recipe: NAME`` in it names, follows this one. YAML
    files that no parser could read in reasonable time are refused; other errors of syntax are left
    to the parser.

    Args:
        arguments: Arguments; only values of ``-c`` and ``--config`` may name recipes.

    Raises:
        CorruptDataError: If a file is large, not UTF-8, nested too deeply or without end, or has
            values of other types than JSON.
        UnsupportedError: If no recipe has a given name.
    """
    resolved: list[str] = []
    option = ""
    for argument in arguments:
        if argument.partition("=")[0] == "--recipe":
            raise UnsupportedError(
                f"--recipe is no option: {argument!r} is given. Write -c {PREFIX}NAME."
            )
        flag, equals, value = argument.rpartition("=") if "=" in argument else ("", "", argument)
        if (flag or option) in ("-c", "--config"):
            if value.startswith(PREFIX):
                value = str(recipe_path(value))
            for base in recipes_below(Path(value)):
                resolved += [f"{flag}={base}"] if flag else [str(base), option]
        elif value.endswith((".yaml", ".yml")):
            _read_recipe(Path(value))
        resolved.append(f"{flag}{equals}{value}")
        option = argument
    return resolved


def recipes_below(path: Path) -> list[Path]:
    """Return the recipes that a file changes, the first one at the beginning.

    Args:
        path: YAML file, in which ``recipe: NAME`` names the recipe that it changes.

    Raises:
        CorruptDataError: If no parser could read the file in reasonable time.
        UnsupportedError: If no recipe has the given name.
    """
    below: list[Path] = []
    root = _read_recipe(path)
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value == "recipe" and value.tag == f"{_TAG}str":
            base = recipe_path(value.value)
            below = [*recipes_below(base), base]
    return below


def _read_recipe(path: Path) -> yaml.Node | None:
    """Return the checked content of a file; None if it has none, or errors for the parser."""
    if not path.is_file():
        return None
    try:
        text = read_regular_file(path, _REMEDY, _MAX_BYTES).decode()
        root = yaml.compose(text, yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise CorruptDataError(f"{path}: byte {error.start} is not UTF-8. {_REMEDY}") from None
    except RecursionError:
        raise _refused(path, 1, "it is nested too deeply") from None
    except yaml.YAMLError:
        return None
    if root is not None:
        recipe = _Recipe(path)
        recipe.find_places(root, (), set())
        recipe.count(root, (), [])
    return root


@dataclass(frozen=True)
class _Recipe:
    """Values of a recipe, which are counted with aliases and interpolation expanded.

    Args:
        nodes: First value at each place: keys from the outermost one on.
        counts: Numbers of values in values that were counted, by identity.
    """

    path: Path
    nodes: dict[tuple[str, ...], yaml.Node] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def find_places(self, node: yaml.Node, keys: tuple[str, ...], seen: set[int]) -> None:
        """Note the places of all values in a value."""
        self.nodes.setdefault(keys, node)
        if id(node) in seen or len(keys) == MAX_DEPTH or not isinstance(node, yaml.MappingNode):
            return
        seen.add(id(node))
        for key, value in node.value:
            self.find_places(value, (*keys, str(key.value)), seen)

    def count(self, node: yaml.Node, keys: tuple[str, ...], around: list[yaml.Node]) -> int:
        """Return the number of values in a value, and check each of them once.

        Args:
            keys: Place of the value.
            around: Values that hold it.
        """
        line = node.start_mark.line + 1
        if any(outer is node for outer in around):
            raise _refused(self.path, line, "it holds itself")
        if len(around) == MAX_DEPTH:
            raise _refused(self.path, line, "it is nested too deeply")
        if node.tag not in _PLAIN:
            raise _refused(self.path, line, f"it has the type {node.tag.removeprefix(_TAG)!r}")
        if node.tag == f"{_TAG}int" and len(node.value) > _MAX_DIGITS:
            raise _refused(self.path, line, "it is an integer of too many digits")
        if id(node) not in self.counts:
            inner = [*around, node]
            parts = self._parts(node, keys)
            self.counts[id(node)] = 1 + sum(self.count(part, at, inner) for part, at in parts)
            if self.counts[id(node)] > _MAX_VALUES:
                reason = f"it has more than {_MAX_VALUES} values, counting aliases and ${{...}}"
                raise _refused(self.path, line, reason)
        return self.counts[id(node)]

    def _parts(
        self, node: yaml.Node, keys: tuple[str, ...]
    ) -> Iterator[tuple[yaml.Node, tuple[str, ...]]]:
        """Yield the values in a value, and those that its interpolation refers to."""
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                yield key, keys
                yield value, (*keys, str(key.value))
        elif isinstance(node, yaml.SequenceNode):
            yield from ((value, (*keys, str(at))) for at, value in enumerate(node.value))
        else:
            for dots, name in _REFERENCE.findall(node.value):
                place = (*keys[: len(keys) - len(dots)], *name.split("."))
                place = place if dots else tuple(name.split("."))
                if place in self.nodes:
                    yield self.nodes[place], place


def _refused(path: Path, line: int, reason: str) -> CorruptDataError:
    return CorruptDataError(
        f"{path}:{line}: a value of a recipe must be a number, a text, a list or a mapping of "
        f"reasonable size: {reason}. {_REMEDY}"
    )
