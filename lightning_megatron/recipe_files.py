"""Recipes that come with the package: their folder, their names and their paths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.errors import UnsupportedError

#: Folder of the recipes: in a checkout a link to ``recipes``, in an installed package a copy.
RECIPES = Path(__file__).parent / "recipes"
#: Start of an argument that names a recipe instead of a file.
PREFIX = "recipe:"


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
