"""Training of experts by given gradients, which can be saved in one layout and resumed in another."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from tests.experts.dense import draw
from tests.training.runs import Run


class TrainedExperts(Run):
    """Parameters of experts, and their optimizer."""

    def __init__(self, module: nn.Module, mesh: ParallelMesh) -> None:
        self.module = module
        super().__init__(
            dict(module.named_parameters()),
            mesh,
            make=lambda named: torch.optim.AdamW(named, lr=0.1),
        )

    def train(self, number: int) -> None:
        """Take a step by gradients whose sum is the same in every layout."""
        num_parts = self.mesh.edp.size / self.mesh.data.size
        gradients: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            spec = shard_spec_of(parameter)
            gradients[name] = spec.shard(draw(number, name, shape=spec.full_shape)) / num_parts
        self.zero_grad()
        self.backward(gradients)
        self.finish()
        self.step()
