"""One rank's parameters, an optimizer and the sums of its gradients, without a strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_megatron.checkpoint import (
    Entry,
    load_metadata,
    load_model,
    load_optimizer,
    model_tensors,
    optimizer_metadata,
    optimizer_tensors,
    save_checkpoint,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.optimizer import DistributedOptimizerConfig, GradientReducer, MainParameters
from lightning_megatron.optimizer.clip import clip_coefficient


def plain_sgd(parameters: Iterable[Any]) -> Optimizer:
    """Return an optimizer that shows gradients in its updates."""
    return SGD(parameters, lr=0.1)


class Run:
    """Train named parameters with gradients that the test supplies."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        mesh: ParallelMesh,
        division: DistributedOptimizerConfig | None = None,
        make: Callable[[Iterable[Any]], Optimizer] = plain_sgd,
    ) -> None:
        self.mesh, self.main = mesh, MainParameters(named, mesh, division)
        self.reducer = GradientReducer(self.main)
        self.optimizer = make(named.values())
        self.reducer.watch(self.main.attach(self.optimizer))

    def backward(self, gradients: Mapping[str, Tensor], *, is_last: bool = True) -> None:
        """Run a backward pass that yields these gradients."""
        if is_last:
            self.reducer.begin_last_backward(0)
        loss = sum(
            (self.main.parameter(name) * gradient).sum() for name, gradient in gradients.items()
        )
        if isinstance(loss, Tensor):
            loss.backward()
        if is_last:
            self.reducer.start_reduction(0)

    def finish(self) -> None:
        """Finish the gradient sums over the ranks."""
        self.reducer.finish(set(self.main.trained))

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self.optimizer.zero_grad()
        self.reducer.clear(set(self.main.trained))

    def step(self) -> None:
        """Update and gather the parameters."""
        self.optimizer.step()
        self.main.publish()

    def clip(self, max_norm: float, names: Collection[str] | None = None) -> float:
        """Clip gradients by their norm, and return it."""
        norm, factor = clip_coefficient(self.main, max_norm, names)
        self.main.scale_gradients_(factor, names)
        return float(norm)

    def tensors(self) -> dict[str, Entry]:
        """Return the tensors that this rank writes to a checkpoint."""
        return {
            **model_tensors(nn.Module(), self.main),
            **optimizer_tensors(0, self.optimizer, self.main),
        }

    def save(self, path: str | Path) -> None:
        """Write parameters, the optimizer's state, and the coordinates of each rank in the layout."""
        metadata = {"optimizer": optimizer_metadata(self.optimizer, self.main, self.mesh)}
        place = self.mesh.layout.coordinates(self.mesh.rank)
        save_checkpoint(path, self.tensors(), metadata, {"place": place}, self.mesh)

    def load(self, path: str | Path) -> None:
        """Read parameters and the optimizer's state, which any layout may have written."""
        load_model(path, nn.Module(), self.main, self.mesh)
        metadata: Any = load_metadata(path)["optimizer"]
        load_optimizer(path, 0, self.optimizer, self.main, self.mesh, metadata)

    def give(self, name: str, gradient: Tensor) -> None:
        """Set the finished gradient of a main parameter."""
        self.main.slices[name].main.grad = gradient


def single(
    named: Mapping[str, nn.Parameter], main_dtype: torch.dtype | None = None, **options: Any
) -> Run:
    """Return a run of one process."""
    return Run(
        named, ParallelMesh.single(), DistributedOptimizerConfig(main_dtype=main_dtype), **options
    )
