"""The command ``lightning-megatron recipes``: the recipes that come with the package."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_megatron.recipe_files import recipe_summaries


def main(args: Sequence[str]) -> None:
    """Print the name and the first comment line of each recipe."""
    parser = argparse.ArgumentParser(
        prog="lightning-megatron recipes",
        description="List the recipes of this package. Train one from any folder with: "
        "lightning-megatron fit -c recipe:NAME",
    )
    parser.parse_args(args)
    summaries = recipe_summaries()
    width = max(map(len, summaries)) + 2
    for name, summary in summaries.items():
        print(f"{name:<{width}}{summary}")
    print("\nTrain one from any folder: lightning-megatron fit -c recipe:NAME")
