"""The command ``lightning-megatron recipes``: the recipes that come with the package."""

from __future__ import annotations

from lightning_megatron.recipe_files import recipe_summaries

EXAMPLES = "example:\n  lightning-megatron fit -c recipe:gpt_speeches_cpu"


def list_recipes() -> None:
    """List the recipes of this package."""
    summaries = recipe_summaries()
    width = max(map(len, summaries)) + 2
    for name, summary in summaries.items():
        print(f"{name:<{width}}{summary}")
    print("\nTrain one from any folder: lightning-megatron fit -c recipe:NAME")


COMMAND = list_recipes
