"""Experts that are trained by given gradients, saved in one layout and trained on in another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint import (
    load_metadata,
    load_model,
    load_optimizer,
    model_tensors,
    optimizer_metadata,
    optimizer_tensors,
    save_checkpoint,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from tests.experts.dense import draw
from tests.training.runs import Run


class TrainedExperts:
    """Parameters of experts, and an optimizer that has made some steps."""

    def __init__(self, module: nn.Module, mesh: ParallelMesh) -> None:
        self.module, self.mesh = module, mesh
        self.run = Run(dict(module.named_parameters()), mesh, make=lambda named: torch.optim.AdamW(named, lr=0.1))

    def step(self, number: int) -> None:
        """Train by gradients that add up to the same in every layout."""
        num_parts = self.mesh.edp.size / self.mesh.data.size
        gradients: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            spec = shard_spec_of(parameter)
            gradients[name] = spec.shard(draw(number, name, shape=spec.full_shape)) / num_parts
        self.run.zero_grad()
        self.run.backward(gradients)
        self.run.finish()
        self.run.step()

    def save(self, path: str) -> None:
        """Write parameters and the optimizer's state."""
        optimizer, main = self.run.optimizer, self.run.main
        tensors = {**model_tensors(nn.Module(), main), **optimizer_tensors(0, optimizer, main)}
        save_checkpoint(path, tensors, {"optimizer": optimizer_metadata(optimizer, main, self.mesh)}, {}, self.mesh)

    def load(self, path: str) -> None:
        """Read both, whatever layout wrote them."""
        load_model(path, nn.Module(), self.run.main, self.mesh)
        metadata: Any = load_metadata(path)["optimizer"]
        load_optimizer(path, 0, self.run.optimizer, self.run.main, self.mesh, metadata)
