"""State that layers accumulate during a step and update at its end, and settings of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.experts.routing.attached_loss import LossWeight
from lightning_megatron.experts.routing.statistics import (
    RunningSums,
    StepStatistics,
    clear_statistics_,
    step_statistics,
)
from lightning_megatron.experts.transport.row_limit import LayerRows, RowLimit
from lightning_megatron.groups.collectives import all_gather_objects, is_true_anywhere
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.models.config_checks import check_expert_axes
from lightning_megatron.models.layered import LayeredModule
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.plan.experts import ExpertsConfig, Transport
from lightning_megatron.plan.recomputation import Recomputation, Recompute

_REMEDY = "Train all experts of a layer, or none, or use experts.clones=0."


class LayerStates:
    """State that steps of a run accumulate: routers, and delayed scales for products in 8 bits.

    Routers count tokens, and delayed scales record magnitudes for the scales of later steps.

    Args:
        models: Models that are trained; layer indices run through all of them.
        rows: Limit on the rows of a rank's experts, as a multiple of the even share; None without
            a limit.
        clones: Places for clones of experts; None without clones.
        needs_static: Whether CUDA graphs hold the transport of experts.
    """

    def __init__(
        self,
        models: Sequence[LayeredModule],
        mesh: ParallelMesh,
        transport: Transport,
        rows: float | None = None,
        clones: ExpertClones | None = None,
        needs_static: bool = False,
    ) -> None:
        self._mesh = mesh
        self._transport = transport
        self._layers: dict[int, MixtureOfExperts] = {}
        first = 0
        for model in models:
            self._layers.update({first + index: layer for index, layer in model.mixtures.items()})
            first += model.config.num_layers
        #: Weight that is shared by all layers with router losses, the same on all stages; None if
        #: no model has router losses.
        self.loss_weight: LossWeight | None = None
        configs = [model.config.experts for model in models]
        mixtures = [config for config in configs if config is not None]
        if any(config.has_losses for config in mixtures):
            self.loss_weight = LossWeight()
        #: Limit on the rows of experts' buffers; None without one.
        self.row_limit = None if rows is None else RowLimit(rows, mesh)
        for number, layer in self._layers.items():
            layer.transport = transport
            layer.needs_static = needs_static
            layer.loss_weight = self.loss_weight or LossWeight()
            layer.clones = None if clones is None else clones.on(mesh.device.type)
            layer.row_limit = None
            if self.row_limit is not None:
                layer.row_limit = LayerRows(self.row_limit, number, mesh.ep.size)
        self._has_clones = clones is not None
        self._epoch: int | None = None
        # Whether each expert's weights were trained at the start of the epoch.
        self._were_trained: dict[tuple[int, str], list[bool]] = {}
        clear_statistics_(self.running)
        #: Token counts of this stage's routers in the last step, by layer index.
        self.statistics: Mapping[int, StepStatistics] | None = None
        scales_of_models = [model.delayed_scales for model in models]
        self._scales = [scales for scales in scales_of_models if scales is not None]
        #: Whether any layer of any stage accumulates such state.
        self.is_used = bool(mixtures or self._scales)
        self._was_fresh = self._is_fresh
        self._has_ended = False

    @property
    def _is_fresh(self) -> bool:
        return any(scales.is_fresh for scales in self._scales)

    def warn_of_evaluation(self) -> None:
        """Warn before training that routers in evaluation mode are not balanced."""
        idle = sorted(
            number
            for number, layer in self._layers.items()
            if not layer.training and _is_balanced(layer.config)
        )
        if idle:
            rank_zero_warn(
                "layers with experts are in evaluation mode "
                f"({', '.join(map(str, idle[:5]))}{', ...' if len(idle) > 5 else ''}): their "
                "routers compute no auxiliary losses and do not update their biases. Hugging "
                "Face's from_pretrained returns a model in evaluation mode; call its train() in "
                "configure_model."
            )

    def count_rows(self) -> None:
        """Count the rows of this rank's experts from now on, if several ranks share the experts."""
        for layer in self._layers.values():
            layer.rank_rows.is_on = self._mesh.ep.size > 1

    def check_trained(self, epoch: int) -> None:
        """Refuse layers with clones in which some experts are trained and others are frozen.

        A rank computes gradients for clones of other ranks' experts. If only some ranks froze their
        experts, these ranks would omit gradients for which others wait, or send another dtype.
        Within an epoch, no expert of this rank may be frozen or unfrozen.

        Communication: one gather of objects over ep at the first step of an epoch, if there are
            clones.
        """
        if not self._has_clones:
            return
        local_states: dict[tuple[int, str], list[bool]] = {}
        for number, layer in self._layers.items():
            for name in (layer.experts.first_name, "down"):
                weights = layer.experts.weights(name)
                local_states[number, name] = [weight.requires_grad for weight in weights]
        if epoch == self._epoch and local_states != self._were_trained:
            raise UnsupportedError(
                "with experts.clones experts must be frozen and unfrozen only between epochs, "
                "because ranks compare their trained experts at the beginning of each epoch: a "
                f"change came after the beginning of epoch {epoch}. Set "
                f"requires_grad in on_train_epoch_start or configure_model. {_REMEDY}"
            )
        if epoch == self._epoch:
            return
        self._epoch = epoch
        self._were_trained = local_states
        states_by_rank = all_gather_objects(local_states, self._mesh.ep_cpu)
        for number, name in local_states:
            states = [rank_states[number, name] for rank_states in states_by_rank]
            if len(set().union(*states)) > 1:
                ranks = [rank for rank, state in enumerate(states) if False in state]
                raise UnsupportedError(
                    "with experts.clones the experts of a layer must all be trained or all be "
                    f"frozen: {name} of some experts of layer {number}, on {ranks} of the "
                    f"{len(states)} ranks of ep, is frozen. Ranks would wait for gradients of "
                    f"clones that other ranks do not compute. {_REMEDY}"
                )

    def finish_step(self) -> bool:
        """End the step, unless a graph has already ended it (see :meth:`adopt`).

        The result says whether graphs captured before are stale, because layers now use scales of
        earlier steps; it is the same on all ranks.

        Communication: that of :meth:`end_step`.
        """
        if self.is_used and not self._has_ended:
            self.statistics = self.end_step()
        self._has_ended = False
        was_fresh = self._was_fresh
        self._was_fresh = self._is_fresh
        return was_fresh and not self._was_fresh

    def end_step(self) -> Mapping[int, StepStatistics]:
        """Update routers and scales from this step, and return the token counts by layer index.

        A graph may contain this method, because it only writes tensors that keep their addresses.

        Communication: that of :func:`step_statistics` and of :meth:`DelayedScales.end_step`.
        """
        for scales in self._scales:
            scales.end_step(self._mesh)
        statistics = step_statistics(
            {number: layer.statistics for number, layer in self._layers.items()}, self._mesh
        )
        for number, layer in self._layers.items():
            if layer.router.follows_load:
                layer.router.update_(statistics[number].load)
        by_layer = {
            number: replace(layer_statistics, rows=self._layers[number].rank_rows.counted())
            for number, layer_statistics in statistics.items()
        }
        clear_statistics_(self.running)
        return by_layer

    def adopt(self, statistics: Mapping[int, StepStatistics]) -> None:
        """Copy the result of :meth:`end_step` from a graph, whose next replay overwrites it."""
        self._has_ended = True
        # One kernel copies the sums of all layers.
        sums = torch.stack([one.sums for one in statistics.values()]) if statistics else ()
        self.statistics = {
            number: replace(
                counted, sums=own, rows=None if counted.rows is None else counted.rows.clone()
            )
            for (number, counted), own in zip(statistics.items(), sums, strict=True)
        }

    def resume_step(self) -> None:
        """Reopen a step that a graph has ended (see :meth:`adopt`), because it must run again."""
        self._has_ended = False

    @property
    def step_tensors(self) -> list[Tensor]:
        """Return the tensors of this stage's layers to which steps write."""
        tensors = [running_sums.sums for running_sums in self.running]
        for layer in self._layers.values():
            tensors += layer.router.buffers()
        for scales in self._scales:
            tensors += scales.step_tensors
        return tensors

    @property
    def running(self) -> list[RunningSums]:
        """Return the statistics of this stage's layers, to which the passes of a step add."""
        layers = self._layers.values()
        return [sums for layer in layers for sums in (layer.statistics, layer.rank_rows)]

    @property
    def expert_rows(self) -> float | None:
        """Return the current limit on rows of a buffer, as a multiple of the even share, if any."""
        return None if self.row_limit is None else self.row_limit.factor

    @property
    def clone_places(self) -> int:
        """Return the number of places for clones on every rank; 0 if no layer here has any."""
        settings = [layer.clones for layer in self._layers.values()]
        return max((clones.places for clones in settings if clones is not None), default=0)

    @property
    def transport(self) -> Transport:
        """Return ``one_sided`` if a layer uses it, else the configured transport."""
        is_put = any(
            layer.transport_choice.transport == "one_sided" for layer in self._layers.values()
        )
        return "one_sided" if is_put else self._transport


def _is_balanced(config: ExpertsConfig) -> bool:
    return config.has_losses or bool(config.expert_bias_rate)


def check_experts(
    module: nn.Module,
    models: Sequence[LayeredModule],
    mesh: ParallelMesh,
    recompute: Recompute | Recomputation | None,
) -> None:
    """Refuse expert options if no model has experts.

    Communication: with ep above 1 and no model of this package with experts, one all-reduce of a
    flag over the world, on the CPU.
    """
    if any(model.config.experts is not None for model in models):
        return
    has_experts = any(shard_spec_of(parameter).is_expert for parameter in module.parameters())
    if mesh.ep.size == 1 or not is_true_anywhere(has_experts, mesh.world_cpu):
        check_expert_axes(mesh.layout, None)
    named = {"experts", "expert_inputs"}.intersection(Recomputation.of(recompute).parts)
    if named:
        raise UnsupportedError(
            f"recompute ({named.pop()!r}) needs a model with experts: this one has none. It "
            "recomputes only activations of experts. Use 'selective', 'full' or 'none'."
        )
