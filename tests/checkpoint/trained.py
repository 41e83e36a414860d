"""A model and its optimizer under a layout that tests train, save, load and compare with full
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.training import DistributedOptimizerConfig
from tests.training.runs import Run
from tests.training.synthetic import HEAD, WORD, parameters, set_gradients

LAYOUTS: dict[str, dict[str, int]] = {
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp4": {"tp": 4},
    "pp4": {"pp": 4},
    "dp4": {},
    "dp4 whole parameters": {},
    "dp4 zero0": {},
    "dp2 tp2": {"tp": 2},
    "dp2 pp2 zero0": {"pp": 2},
}
# Buckets are small, so that slices end anywhere inside of parameters.
DIVISIONS = {
    "whole parameters": DistributedOptimizerConfig(slices="parameters"),
    "zero0": DistributedOptimizerConfig(zero=0, bucket_size=40),
    "elements": DistributedOptimizerConfig(slices="elements", bucket_size=40),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
}
STEPS = 2


class Trained(Run):
    """The part of a model and its optimizer that this rank holds, with the mesh."""

    def __init__(self, mesh: ParallelMesh, optimizer: str, layout: str = "") -> None:
        self.named = parameters(mesh)
        super().__init__(
            self.named,
            mesh,
            division_of(layout),
            lambda _: OPTIMIZERS[optimizer](groups_of(self.named)),
        )

    def train(self) -> None:
        for _ in range(STEPS):
            source = parameters(self.mesh)
            set_gradients(source, self.mesh)
            self.zero_grad()
            gradients = {name: p.grad for name, p in source.items() if p.grad is not None}
            self.backward(gradients, is_last=self.mesh.pp.size == 1)
            self.finish()
            self.step()
        self.optimizer.param_groups[1]["lr"] = 0.125


def groups_of(named: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in named.values() if parameter.ndim == 2]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {
            "params": [parameter for parameter in named.values() if parameter.ndim < 2],
            "weight_decay": 0.0,
        },
    ]


def difference(full: Mapping[str, Tensor], trained: Trained) -> list[str]:
    """List the local tensors that are not bitwise equal to their part of the full tensor, padding
    and tied copies included.
    """
    wrong = []
    for name, entry in trained.tensors().items():
        source = full[name.replace(HEAD, WORD)]
        for box, view in entry.placement.local_views(entry.tensor):
            part = source
            for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, start, size)
            if not torch.equal(view, part):
                wrong.append(name)
    for name, parameter in trained.named.items():
        # The parameters of the model, which every data rank holds in full.
        spec = shard_spec_of(parameter)
        local = parameter.narrow(spec.dim, 0, spec.local_extent) if spec.full_shape else parameter
        if not torch.equal(local, spec.shard(full[f"state_dict.{name.replace(HEAD, WORD)}"])):
            wrong.append(f"the model's {name}")
        if name in (WORD, HEAD) and not (parameter[spec.local_extent :] == 1000).all():
            wrong.append(f"padding of {name}")
    return wrong


def mesh_of(layout: str, size: int) -> ParallelMesh:
    return ParallelMesh.create(ParallelLayout(size, **LAYOUTS[layout]))


def division_of(layout: str) -> DistributedOptimizerConfig:
    return next(
        (division for name, division in DIVISIONS.items() if name in layout), DIVISIONS["elements"]
    )
