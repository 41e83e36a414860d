"""Check that all ranks train, or all ranks freeze, the experts of a layer with clones."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_objects

_REMEDY = "Train all experts of a layer, or none, or use expert_clones=0."


class TrainedExperts:
    """Check of layers with clones, whose experts must all be trained or all be frozen.

    A rank computes gradients for clones of other ranks' experts. If only some ranks froze their
    experts, these ranks would omit gradients for which others wait, or send another dtype.

    Args:
        layers: The layers with clones, by index in the whole model.
        ep_cpu: Axis of the ranks that share the experts, for Python objects.
    """

    def __init__(self, layers: Mapping[int, MixtureOfExperts], ep_cpu: MeshAxis) -> None:
        self._layers = layers
        self._ep_cpu = ep_cpu
        self._epoch: int | None = None
        self._parameters = [
            parameter for layer in layers.values() for parameter in layer.experts.parameters()
        ]
        # Whether each parameter was trained at the start of the epoch.
        self._was_trained: list[bool] = []

    def check(self, epoch: int) -> None:
        """Compare which experts the ranks train, at the first step of each epoch.

        Args:
            epoch: Index of the epoch (epochs).

        Raises:
            UnsupportedError: If some experts of a layer are trained and others are frozen, or if
                an expert of this rank was frozen or unfrozen within the epoch.

        Communication: one gather of objects over ep at the first step of an epoch, if there are
            clones.
        """
        if not self._layers:
            return
        trained = [parameter.requires_grad for parameter in self._parameters]
        if epoch == self._epoch and trained != self._was_trained:
            raise UnsupportedError(
                "with expert_clones experts must be frozen and unfrozen only between epochs, "
                "because ranks compare their trained experts at the beginning of each epoch: a "
                f"change came after the beginning of epoch {epoch}. Set "
                "requires_grad in on_train_epoch_start or configure_model. " + _REMEDY
            )
        if epoch != self._epoch:
            self._epoch = epoch
            self._was_trained = trained
            self._compare()

    def _compare(self) -> None:
        local_states = {
            (number, name): {weight.requires_grad for weight in layer.experts.weights(name)}
            for number, layer in self._layers.items()
            for name in (layer.experts.first_name, "down")
        }
        states_by_rank = all_gather_objects(local_states, self._ep_cpu)
        for number, name in local_states:
            states = [rank_states[number, name] for rank_states in states_by_rank]
            if len(set.union(*states)) > 1:
                ranks = [rank for rank, state in enumerate(states) if False in state]
                raise UnsupportedError(
                    "with expert_clones the experts of a layer must all be trained or all be "
                    f"frozen: {name} of some experts of layer {number}, on {ranks} of the "
                    f"{len(states)} ranks of ep, is frozen. Ranks would wait for gradients of "
                    "clones that other ranks do not compute. " + _REMEDY
                )
