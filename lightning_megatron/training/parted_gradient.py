"""A gradient of which ranks hold parts, in the hands of code that takes it for the whole one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import ShardSpec

#: What a reduction of all elements is over the parts of a rank: its value there, and what joins the ranks' values.
_REDUCTIONS: Mapping[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "sum": (torch.sum, "sum"),
    "max": (torch.amax, "max"),
    "min": (torch.amin, "min"),
    "any": (lambda values: values.any().to(torch.uint8), "max"),
    "all": (lambda values: values.all().to(torch.uint8), "min"),
}
_NORMS = ("norm", "linalg_vector_norm")


@dataclass(frozen=True)
class _Place:
    """Say how a gradient lies in the full one, and on which ranks the rest is."""

    spec: ShardSpec
    mesh: ParallelMesh

    def reduce(self, gradient: Tensor, name: str) -> Tensor:
        """Reduce the full tensor to a scalar; a collective over the ranks that hold its parts."""
        of_parts, op = _REDUCTIONS[name]
        local = gradient.as_subclass(Tensor)
        # Padding belongs to no full tensor, and copies count once.
        counted = [view.reshape(-1) for box, view in self.spec.local_views(local) if not box.copy and view.numel()]
        # The first element of a copy changes no maximum.
        values = torch.cat(counted) if counted else local.reshape(-1)[:1]
        result = of_parts(values)
        if not counted and name == "sum":
            result = torch.zeros_like(result)
        axis = self.mesh.etp if self.spec.is_expert else self.mesh.tp
        reduced = all_reduce_(result.clone(), axis, op)
        return reduced.bool() if name in ("any", "all") else reduced

    def norm(self, gradient: Tensor, order: float) -> Tensor:
        """Return the norm of the full tensor."""
        local = gradient.as_subclass(Tensor).abs()
        if order == float("inf"):
            return self.reduce(local, "max")
        return self.reduce(local**order, "sum") ** (1 / order)


class PartedGradient(Tensor):
    """Behave as a rank's part of a gradient element by element, and as the whole gradient where it becomes a number.

    Norms, sums, means, extremes and ``any`` and ``all`` of all elements are those of the full tensor, on every rank.

    Communication: one all-reduce of a scalar over tp (etp for experts) for each such number. All ranks must ask.

    Raises:
        UnsupportedError: If norms are joined over parameters, as ``clip_grad_norm_`` does, where other ranks hold other
            parameters.
    """

    place: _Place | None = None

    @staticmethod
    def of(gradient: Tensor, spec: ShardSpec, mesh: ParallelMesh) -> Tensor:
        """Return the gradient itself, in the same memory, as one that knows how it lies in the full one."""
        if mesh.model.size == 1:
            return gradient
        parted = gradient.as_subclass(PartedGradient)
        parted.place = _Place(spec, mesh)
        return parted

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer reductions of all elements for the full tensor, and run everything else on the part."""
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func is torch._foreach_norm:
            return [torch.linalg.vector_norm(one, *args[1:], **options) for one in args[0]]
        first = args[0] if args else None
        place = first.place if isinstance(first, PartedGradient) else None
        if isinstance(first, PartedGradient) and place is not None and options.get("dim") is None:
            if name in _NORMS and len(args) < 3:
                _check_joined(name, place.mesh)
                order = args[1] if len(args) > 1 else options.get("p", options.get("ord", 2))
                return place.norm(first, 2.0 if order in (None, "fro") else float(order))
            if name in _REDUCTIONS and len(args) == 1:
                return place.reduce(first, name)
            if name == "mean" and len(args) == 1:
                return place.reduce(first, "sum") / torch.Size(place.spec.full_shape).numel()
        result = super().__torch_function__(func, types, args, options)
        if isinstance(result, PartedGradient):
            if not isinstance(first, Tensor) or result.shape != first.shape:
                return result.as_subclass(Tensor)
            result.place = place
        return result


def _check_joined(name: str, mesh: ParallelMesh) -> None:
    if name == "linalg_vector_norm" and (mesh.pp.size > 1 or mesh.ep.size > 1):
        raise UnsupportedError(
            f"torch.nn.utils.clip_grad_norm_ cannot join norms with pp ({mesh.pp.size}) or ep ({mesh.ep.size}) above "
            "1, because other ranks hold other parameters, and each would clip by another norm. Use "
            "self.clip_gradients(optimizer, value, 'norm') or Trainer(gradient_clip_val=...), which count them all."
        )
