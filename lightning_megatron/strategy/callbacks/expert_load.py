"""Logs and plots of the load of experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_megatron.errors import MissingExtraError, UnsupportedError
from lightning_megatron.experts.routing.statistics import StepStatistics
from lightning_megatron.extras import import_extra
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.plan.settings import coerced_arguments
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy
from lightning_megatron.strategy.private.loops import accumulates, is_logged, logged_step

#: Names of the values that are logged for every layer, and as means over the layers.
_FIGURES = ("max_over_mean", "dropped", "entropy", "balance_loss", "z_loss")


class ExpertLoad(Callback):
    """Log the load of experts at each step, and plot it into the logger's folder after ``fit``.

    The following values are logged for every layer with experts (``experts/layer_3/...``), and
    their means over the layers (``experts/...``):

    * ``max_over_mean``: load of the busiest expert divided by the mean load. The best value is 1;
      the worst is the number of experts.
    * ``dropped``: fraction of token assignments that were dropped because experts were full.
    * ``entropy``: mean entropy of the router scores of a token (nats).
    * ``balance_loss`` and ``z_loss``: router losses without their coefficients; 0 if the model has
      none.

    With ``per_expert``, ``experts/layer_3/load/expert_5`` is the fraction of the layer's token
    assignments that went to an expert, including dropped ones. Values cover all ranks and
    microbatches of one optimizer step. They are read from the device and logged every
    ``log_every_n_steps`` steps of the Trainer.

    Args:
        per_expert: Whether the load of each expert is logged.
        filename: Name of the plot in the logger's folder.

    Raises:
        UnsupportedError: If the strategy is not a :class:`MegatronStrategy`, or no model has
            experts.

    Communication: at logged steps, one gather of objects over pp on the CPU.
    """

    def __init__(self, per_expert: bool = True, filename: str = "expert_load.png") -> None:
        given = coerced_arguments(ExpertLoad.__init__, locals())
        self.per_expert: bool = given["per_expert"]
        self.filename: str = given["filename"]
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

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if accumulates(trainer) or not is_logged(trainer):
            return
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy), "setup has checked the strategy"
        layers = gather_layers(strategy.expert_statistics or {}, strategy.mesh.pp_cpu)
        if not layers:
            raise UnsupportedError(
                "ExpertLoad needs a model with experts: no router has counted a token in this "
                "step. Leave the callback out."
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
            why = (
                "this Trainer has no logger with a folder"
                if folder is None
                else "no step was logged"
            )
            rank_zero_info(f"No picture of the experts' load: {why}.")
            return
        picture = Path(folder) / self.filename
        picture.parent.mkdir(parents=True, exist_ok=True)
        try:
            draw_load(self._last, self._busiest, picture)
        except MissingExtraError as error:
            rank_zero_info(f"No picture of the experts' load: {error}")
        else:
            rank_zero_info(f"Load of experts: {picture}")


def gather_layers(
    statistics: Mapping[int, StepStatistics], pp: MeshAxis
) -> dict[int, dict[str, Tensor]]:
    """Return the logged figures and expert loads of the layers of all stages, on every rank.

    Args:
        statistics: Statistics of this stage's layers, by layer index.
        pp: The pp axis whose group runs on the CPU.

    Communication: one gather of objects over pp on the CPU.
    """
    here = {number: figures_of(step) for number, step in statistics.items()}
    joined = {
        number: figures
        for stage in all_gather_objects(here, pp)
        for number, figures in stage.items()
    }
    # With several chunks on a stage, the layers of a stage are not consecutive.
    return dict(sorted(joined.items()))


def figures_of(step: StepStatistics) -> dict[str, Tensor]:
    """Return a layer's figures by name, and each expert's share under ``load``, on the CPU."""
    numbers = torch.stack([step.dropped.double(), step.entropy, step.balance_loss, step.z_loss])
    read = torch.cat([numbers, step.load.double()]).cpu()
    load = read[4:]
    total = load.sum().clamp(min=1.0)
    dropped, entropy, balance_loss, z_loss = read[:4].unbind()
    return {
        "load": load / total,
        "max_over_mean": load.max() * load.numel() / total,
        "dropped": dropped / total,
        "entropy": entropy,
        "balance_loss": balance_loss,
        "z_loss": z_loss,
    }


def names_of(layers: Mapping[int, Mapping[str, Tensor]], per_expert: bool) -> dict[str, Tensor]:
    """Return all values by the names under which they are logged.

    Args:
        layers: Figures of every layer, by layer index.
        per_expert: Whether to include the share of each expert.
    """
    values = {
        f"experts/{name}": torch.stack([layer[name] for layer in layers.values()]).mean()
        for name in _FIGURES
    }
    for number, layer in layers.items():
        values.update({f"experts/layer_{number}/{name}": layer[name] for name in _FIGURES})
        if per_expert:
            shares = enumerate(layer["load"].unbind())
            values.update(
                {f"experts/layer_{number}/load/expert_{expert}": share for expert, share in shares}
            )
    return values


def draw_load(
    layers: Mapping[int, Mapping[str, Tensor]], busiest: Mapping[int, Tensor], picture: Path
) -> None:
    """Plot each expert's load at the last step, and the busiest experts' load over all steps.

    Shapes: each value of ``busiest`` is ``(layers,)``.

    Args:
        layers: Figures of every layer at the last step, by layer index.
        busiest: Load of the busiest expert of every layer divided by the mean load, by step.
        picture: Path of the plot; the file extension selects the format.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    figure = import_extra("matplotlib.figure", "plot").Figure(
        figsize=(11, 4.2), layout="constrained"
    )
    centred = import_extra("matplotlib.colors", "plot").TwoSlopeNorm
    steps = list(busiest)
    now = torch.stack([layer["load"] * layer["load"].numel() for layer in layers.values()])
    experts, training = figure.subplots(1, 2)
    # The mean load is white.
    norm = centred(1.0, vmin=0.0, vmax=max(2.0, float(now.max())))
    image = experts.imshow(
        now.numpy(), aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=norm
    )
    figure.colorbar(image, ax=experts, label="load over mean")
    experts.set(title=f"step {steps[-1]}", xlabel="expert")
    over_time = torch.stack(list(busiest.values()), 1)
    width = steps[1] - steps[0] if len(steps) > 1 else 1
    extent = (steps[0] - width / 2, steps[-1] + width / 2, len(layers) - 0.5, -0.5)
    image = training.imshow(
        over_time.numpy(), aspect="auto", interpolation="nearest", vmin=1.0, extent=extent
    )
    figure.colorbar(image, ax=training, label="load of the busiest expert over mean")
    training.set(title="training", xlabel="optimizer step")
    every = -(-len(layers) // 24)
    for axes in (experts, training):
        axes.set_yticks(range(0, len(layers), every), [str(number) for number in layers][::every])
        axes.set_ylabel("layer")
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(picture, dpi=150)
