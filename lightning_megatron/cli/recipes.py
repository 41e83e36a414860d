"""The command ``lightning-megatron recipes``: the recipes that come with the package."""

from __future__ import annotations

from pathlib import Path

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.recipe_files import PREFIX, recipe_path, recipe_summaries, recipes_below

EXAMPLES = """examples:
  lightning-megatron recipes
  lightning-megatron recipes show sft_hf
  lightning-megatron recipes copy sft_hf my_training.yaml
  lightning-megatron fit -c my_training.yaml"""


def list_recipes() -> None:
    """List the recipes of this package."""
    summaries = recipe_summaries()
    width = max(map(len, summaries)) + 2
    for name, summary in summaries.items():
        print(f"{name:<{width}}{summary}")
    print(
        "\nTrain one from any folder: lightning-megatron fit -c recipe:NAME\n"
        "Read one: lightning-megatron recipes show NAME\n"
        "Change one: lightning-megatron recipes copy NAME FILE"
    )


def show_recipe(name: str) -> None:
    """Print a recipe, and behind it those that it changes.

    Args:
        name: Name of the recipe, as the list has it.
    """
    path = recipe_path(name)
    print(path.read_text(encoding="utf-8"), end="")
    for base in reversed(recipes_below(path)):
        print(f"\n# The values that stand above change those of {PREFIX}{base.stem}:")
        print(base.read_text(encoding="utf-8"), end="")


def copy_recipe(name: str, file: str) -> None:
    """Copy a recipe into a file of your own, which a text editor changes and fit -c FILE trains.

    Args:
        name: Name of the recipe, as the list has it.
        file: New file, or folder for it.
    """
    path = recipe_path(name)
    target = Path(file) / path.name if Path(file).is_dir() else Path(file)
    text = path.read_text(encoding="utf-8").replace(f"{PREFIX}{path.stem} ", f"{target} ")
    try:
        with open(target, "x", encoding="utf-8") as copied:
            copied.write(text.replace(f"{PREFIX}{path.stem}\n", f"{target}\n"))
    except OSError as error:
        raise UnsupportedError(
            f"the recipe cannot be written to {target}: {error.strerror}. Name a file that does "
            "not exist, in a folder that does."
        ) from error
    print(f"Train it: lightning-megatron fit -c {target}")


COMMAND = {"": list_recipes, "show": show_recipe, "copy": copy_recipe}
