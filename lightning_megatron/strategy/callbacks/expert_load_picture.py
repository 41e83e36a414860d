"""Picture of the load of experts and of the ranks that share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.extras import import_extra


def draw_load(
    layers: Mapping[int, Mapping[str, Tensor]], busiest: Mapping[int, Tensor], picture: Path
) -> None:
    """Plot the load of experts and ranks at the last step, and of the busiest experts over all.

    Shapes: each value of ``busiest`` is ``(layers,)``.

    Args:
        layers: Values of every layer at the last step, by layer index.
        busiest: Load of the busiest expert of every layer divided by the mean load, by step.
        picture: Path of the plot; the file extension selects the format.
    """
    last = list(layers.values())
    ranks = _rank_columns(last)
    figure = import_extra("matplotlib.figure", "plot").Figure(
        figsize=(11 if ranks is None else 15, 4.2), layout="constrained"
    )
    steps = list(busiest)
    experts, *middle, training = figure.subplots(1, 2 if ranks is None else 3)
    now = torch.stack([layer["load"] * layer["load"].numel() for layer in last])
    _draw_around_mean(figure, experts, now, "load over mean")
    experts.set(title=f"step {steps[-1]}", xlabel="expert")
    for axes in middle:
        _draw_ranks(figure, axes, last, ranks)
    over_time = torch.stack(list(busiest.values()), 1)
    width = steps[1] - steps[0] if len(steps) > 1 else 1
    extent = (steps[0] - width / 2, steps[-1] + width / 2, len(layers) - 0.5, -0.5)
    image = training.imshow(
        over_time.numpy(), aspect="auto", interpolation="nearest", vmin=1.0, extent=extent
    )
    figure.colorbar(image, ax=training, label="load of the busiest expert over mean")
    training.set(title="training", xlabel="optimizer step")
    every = -(-len(layers) // 24)
    for axes in (experts, *middle, training):
        axes.set_yticks(range(0, len(layers), every), [str(number) for number in layers][::every])
        axes.set_ylabel("layer")
    for axes in (experts, training):
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(picture, dpi=150)


def _rank_columns(layers: Sequence[Mapping[str, Tensor]]) -> Tensor | None:
    """Return the rows of ranks over the mean, without and with clones if they differ, by layer."""
    if not all("before" in layer for layer in layers):
        return None
    before = torch.stack([layer["before"] for layer in layers])
    after = torch.stack([layer["after"] for layer in layers])
    return before if torch.equal(before, after) else torch.cat([before, after], 1)


def _draw_ranks(
    figure: Any, axes: Any, layers: Sequence[Mapping[str, Tensor]], columns: Tensor | None
) -> None:
    """Draw the rows of every rank; those with clones stand to the right of those without."""
    assert columns is not None, "ranks share the experts"
    _draw_around_mean(figure, axes, columns, "rows over mean")
    num_ranks = layers[0]["before"].numel()
    has_clones = columns.shape[1] > num_ranks
    if has_clones:
        axes.axvline(num_ranks - 0.5, color="black", linewidth=1.5)
    every = -(-columns.shape[1] // 16)
    numbers = [str(column % num_ranks) for column in range(columns.shape[1])]
    axes.set_xticks(range(0, columns.shape[1], every), numbers[::every])
    axes.set(
        title="ranks: without clones | with clones" if has_clones else "ranks", xlabel="rank of ep"
    )


def _draw_around_mean(figure: Any, axes: Any, load: Tensor, label: str) -> None:
    """Draw loads over the mean, which is white."""
    centred = import_extra("matplotlib.colors", "plot").TwoSlopeNorm
    norm = centred(1.0, vmin=0.0, vmax=max(2.0, float(load.max())))
    image = axes.imshow(
        load.numpy(), aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=norm
    )
    figure.colorbar(image, ax=axes, label=label)
