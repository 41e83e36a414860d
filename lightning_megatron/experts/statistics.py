"""How the routers of a stage spread the tokens of a step: counted on the device, added up over ranks at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.experts.balance import add_over_tokens_
from lightning_megatron.experts.router import Routing
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.experts import ExpertsConfig


class RouterStatistics:
    """Add up what a layer's router does with the microbatches of a step on this rank.

    Tensors stay where they are and are changed in place, and nothing is read back from the device, so that a captured
    graph can count. It is no module: whatever it holds belongs to a step, and neither moves with the weights of a layer
    nor is saved with them.

    Args:
        config: What the mixture is.
        device: Where the routings are. A later move of the model is followed when the next one comes.
    """

    #: Choices that each expert had, dropped ones included. Shape ``(E,)``, int64.
    load: Tensor
    #: Choices that were dropped. A number, int64.
    dropped: Tensor
    #: Entropies of the tokens, added up (nats). A number, float64, as are the losses.
    entropy: Tensor
    #: This rank's parts of the losses, coefficients included, added up over microbatches.
    balance_loss: Tensor
    z_loss: Tensor
    #: A number, int64.
    num_microbatches: Tensor

    def __init__(self, config: ExpertsConfig, device: torch.device) -> None:
        self.config = config
        # On a device by name: a model may be built on meta.
        for name in ("dropped", "num_microbatches"):
            setattr(self, name, torch.zeros((), dtype=torch.int64, device=device))
        for name in ("entropy", "balance_loss", "z_loss"):
            setattr(self, name, torch.zeros((), dtype=torch.float64, device=device))
        self.load = torch.zeros(config.num_experts, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add_(self, routing: Routing) -> None:
        """Count a microbatch; once, also where its forward pass runs again for the activations.

        Args:
            routing: Where its tokens go.
        """
        if self.load.device != routing.load.device:
            for name, tensor in self._tensors().items():
                setattr(self, name, tensor.to(routing.load.device))
        self.load.add_(routing.load)
        self.entropy.add_(routing.entropy, alpha=routing.experts.shape[0])
        for name in ("dropped", "balance_loss", "z_loss"):
            value = getattr(routing, name)
            if value is not None:
                getattr(self, name).add_(value)
        self.num_microbatches.add_(1)

    def clear_(self) -> None:
        """Begin another step."""
        for tensor in self._tensors().values():
            tensor.zero_()

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def stacked(self) -> Tensor:
        """Return all numbers in one vector, first those beside the load, as ``StepStatistics.of_sums`` reads them.

        Shapes: output ``(5 + E)`` float64, which has every integer below 2 to the power of 53.
        """
        beside = (self.dropped, self.entropy, self.balance_loss, self.z_loss, self.num_microbatches)
        return torch.cat([torch.stack([number.double() for number in beside]), self.load.double()])


@dataclass(frozen=True, eq=False)
class StepStatistics:
    """Say how a layer's router spread the tokens of a step over all ranks. Everything is on the device.

    Args:
        load: Choices that each expert had, dropped ones included. Shape ``(E,)``, int64.
        dropped: Choices that were dropped. A number, int64.
        entropy: Mean entropy of a token's scores: the logarithm of E where experts are alike (nats). A number, float64,
            as are the losses.
        balance_loss: Mean over microbatches of the auxiliary loss, without its coefficient: 1 where experts are alike;
            0 where the model has none.
        z_loss: The same of the loss of logits.
    """

    load: Tensor
    dropped: Tensor
    entropy: Tensor
    balance_loss: Tensor
    z_loss: Tensor

    @classmethod
    def of_sums(cls, sums: Tensor, config: ExpertsConfig, num_parts: int) -> StepStatistics:
        """Make means of the sums over all microbatches and ranks.

        Args:
            sums: What :meth:`RouterStatistics.stacked` returns, added up.
            config: What the mixture is.
            num_parts: Ranks that had the tokens of a microbatch between them, and each counted it.
        """
        dropped, entropy, balance_loss, z_loss, num_microbatches = sums[:5].unbind()
        load = sums[5:]
        num_tokens = load.sum().clamp(min=1.0) / config.top_k
        num_microbatches = num_microbatches.clamp(min=1.0) / num_parts
        return cls(
            load=load.long(),
            dropped=dropped.long(),
            entropy=entropy / num_tokens,
            balance_loss=balance_loss / (num_microbatches * (config.aux_loss or 1.0)),
            z_loss=z_loss / (num_microbatches * (config.z_loss or 1.0)),
        )


@torch.no_grad()
def step_statistics(layers: Mapping[int, RouterStatistics], mesh: ParallelMesh) -> Mapping[int, StepStatistics]:
    """Add up what the routers of this stage did in a step over all ranks that have other tokens.

    Nothing is read back from the device.

    Args:
        layers: What every layer with experts of this stage counted, by the layer's number in the model.
        mesh: The groups of this rank.

    Returns:
        One record for every layer, the same on all ranks of the stage.

    Communication: for all layers together one all-reduce over tp under sequence parallelism, and one over the data
        group.
    """
    if not layers:
        return {}
    sums = add_over_tokens_(torch.stack([layer.stacked() for layer in layers.values()]), mesh)
    num_parts = mesh.tp.size if mesh.sequence_parallel else 1
    return {
        number: StepStatistics.of_sums(of_layer, layer.config, num_parts)
        for (number, layer), of_layer in zip(layers.items(), sums, strict=True)
    }
