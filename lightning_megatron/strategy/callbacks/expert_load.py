"""Logs and plots of the load of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_megatron.errors import MissingExtraError, UnsupportedError
from lightning_megatron.experts.routing.statistics import StepStatistics
from lightning_megatron.experts.transport.rank_rows import StepRows, gather_rows
from lightning_megatron.extras import import_extra
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.settings import coerced_arguments
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy
from lightning_megatron.strategy.private.loops import accumulates, is_logged, logged_step

#: Names of the values that are logged for every layer, and as means over the layers.
_FIGURES = ("max_over_mean", "p50", "p95", "dropped", "entropy", "balance_loss", "z_loss")
#: The same where ranks share the experts.
_RANK_FIGURES = (
    "rank_max_over_mean",
    "rank_max_over_mean_after",
    "moved",
    "clones",
    "rows_needed",
)


class ExpertLoad(Callback):
    """Log the load of experts at each step, and plot it into the logger's folder after ``fit``.

    The following values are logged for every layer with experts (``experts/layer_3/...``), and
    their means over the layers (``experts/...``):

    * ``max_over_mean``: load of the busiest expert divided by the mean load. The best value is 1;
      the worst is the number of experts.
    * ``p50`` and ``p95``: median and 95th percentile of the loads of the layer's experts divided by
      the mean load.
    * ``dropped``: fraction of token assignments that were dropped because experts were full.
    * ``entropy``: mean entropy of the router scores of a token (nats).
    * ``balance_loss`` and ``z_loss``: router losses without their coefficients; 0 if the model has
      none.

    If ranks share the experts (ep above 1), also:

    * ``rank_max_over_mean``: rows of the busiest rank's own experts divided by the mean over ranks.
      All ranks wait for the busiest one. The best value is 1; the worst is ep.
    * ``rank_max_over_mean_after``: the same for the rows that ranks compute after clones have taken
      over some; equal without clones.
    * ``moved``: fraction of the rows that clones compute.
    * ``clones``: mean number of clones of all ranks in a microbatch.
    * ``rows_needed``: largest number of rows that any rank needed in one microbatch (rows). Divided
      by the even share, the tokens of a rank times ``top_k``, it is the smallest ``experts.rows``
      that is sufficient for this step.

    With ``per_expert``, ``experts/layer_3/load/expert_5`` is the fraction of the layer's token
    assignments that went to an expert, including dropped ones. Clones count as the expert that they
    are clones of. Values cover all ranks and microbatches of one optimizer step. They are read from
    the device and logged every ``log_every_n_steps`` steps of the Trainer.

    Args:
        per_expert: Whether the load of each expert is logged.
        filename: Name of the plot in the logger's folder.

    Raises:
        UnsupportedError: If the strategy is not a :class:`MegatronStrategy`, or no model has
            experts.

    Communication: at logged steps, one gather of objects over pp on the CPU, and that of
        :func:`~lightning_megatron.experts.transport.rank_rows.gather_rows`.
    """

    def __init__(self, per_expert: bool = True, filename: str = "expert_load.png") -> None:
        arguments = coerced_arguments(ExpertLoad.__init__, locals())
        self.per_expert: bool = arguments["per_expert"]
        self.filename: str = arguments["filename"]
        #: Values of the plot: all layers at the last logged step, and the load of the busiest
        #: experts at every logged step.
        self._last: dict[int, dict[str, Tensor]] = {}
        self._busiest: dict[int, Tensor] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, MegatronStrategy):
            raise UnsupportedError(
                "ExpertLoad needs MegatronStrategy, which counts the tokens of each expert: the "
                f"strategy is {type(trainer.strategy).__name__}. Use "
                "strategy=MegatronStrategy(...), or leave the callback out."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = {}
        self._busiest = {}
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy), "setup has checked the strategy"
        strategy.run.layers.count_rows()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if accumulates(trainer) or not is_logged(trainer):
            return
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy), "setup has checked the strategy"
        layers = gather_layers(strategy.expert_statistics or {}, strategy.mesh)
        if not layers:
            raise UnsupportedError(
                "ExpertLoad needs a model with experts: no router counted a token in this step. "
                "Leave the callback out."
            )
        self._last = layers
        self._busiest[logged_step(trainer)] = torch.stack(
            [layer["max_over_mean"] for layer in layers.values()]
        )
        pl_module.log_dict(names_of(layers, self.per_expert), on_step=True, on_epoch=False)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        folder = next(
            (logger.log_dir for logger in trainer.loggers if logger.log_dir is not None), None
        )
        if folder is None or not self._last:
            rank_zero_info(
                "No plot of the expert load: no step was logged, or no logger with a folder exists."
            )
            return
        picture = Path(folder) / self.filename
        picture.parent.mkdir(parents=True, exist_ok=True)
        try:
            draw_load(self._last, self._busiest, picture)
        except MissingExtraError as error:
            rank_zero_info(f"No plot of the expert load: {error}")
        else:
            rank_zero_info(f"Plot of the expert load: {picture}")


def gather_layers(
    statistics: Mapping[int, StepStatistics], mesh: ParallelMesh
) -> dict[int, dict[str, Tensor]]:
    """Return the logged values and loads of the layers of all stages, on every rank.

    Args:
        statistics: Statistics of this stage's layers, by layer index.
        mesh: The groups of this rank.

    Communication: one gather of objects over pp on the CPU, and that of
        :func:`~lightning_megatron.experts.transport.rank_rows.gather_rows`.
    """
    counts = {number: step.rows for number, step in statistics.items() if step.rows is not None}
    rows = gather_rows(counts, mesh)
    local_figures = {
        number: figures_of(step) | (rank_figures_of(rows[number]) if number in rows else {})
        for number, step in statistics.items()
    }
    joined = {
        number: figures
        for stage in all_gather_objects(local_figures, mesh.pp_cpu)
        for number, figures in stage.items()
    }
    # With several chunks on a stage, the layers of a stage are not consecutive.
    return dict(sorted(joined.items()))


def figures_of(step: StepStatistics) -> dict[str, Tensor]:
    """Return a layer's values by name, and each expert's share under ``load``, on the CPU."""
    numbers = torch.stack([step.dropped.double(), step.entropy, step.balance_loss, step.z_loss])
    read = torch.cat([numbers, step.load.double()]).cpu()
    load = read[4:]
    total = load.sum().clamp(min=1.0)
    dropped, entropy, balance_loss, z_loss = read[:4].unbind()
    over_mean = load * load.numel() / total
    return {
        "load": load / total,
        "max_over_mean": over_mean.max(),
        "p50": over_mean.quantile(0.5),
        "p95": over_mean.quantile(0.95),
        "dropped": dropped / total,
        "entropy": entropy,
        "balance_loss": balance_loss,
        "z_loss": z_loss,
    }


def rank_figures_of(rows: StepRows) -> dict[str, Tensor]:
    """Return the values of a layer's ranks by name, and their rows over the mean."""
    mean = rows.after.mean().clamp(min=1.0)
    before = rows.before / mean
    after = rows.after / mean
    return {
        "before": before,
        "after": after,
        "rank_max_over_mean": before.max(),
        "rank_max_over_mean_after": after.max(),
        "moved": rows.moved,
        "clones": rows.clones,
        "rows_needed": rows.needed,
    }


def names_of(layers: Mapping[int, Mapping[str, Tensor]], per_expert: bool) -> dict[str, Tensor]:
    """Return all values by the names under which they are logged.

    Args:
        layers: Values of every layer, by layer index.
        per_expert: Whether to include the share of each expert.
    """
    figures = list(_FIGURES + _RANK_FIGURES)
    for layer in layers.values():
        figures = [name for name in figures if name in layer]
    values = {}
    for name in figures:
        values[f"experts/{name}"] = torch.stack([layer[name] for layer in layers.values()]).mean()
    for number, layer in layers.items():
        values.update({f"experts/layer_{number}/{name}": layer[name] for name in figures})
        if per_expert:
            shares = enumerate(layer["load"].unbind())
            values.update(
                {f"experts/layer_{number}/load/expert_{expert}": share for expert, share in shares}
            )
    return values


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
