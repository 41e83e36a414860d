"""Tensor-parallel gradient shards whose reductions equal those of the full gradient."""

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
from lightning_megatron.shapes import Shaped

#: Reductions of all elements: the local function, and the operation that combines the ranks'
#: values.
_REDUCTIONS: Mapping[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "sum": (torch.sum, "sum"),
    "max": (torch.amax, "max"),
    "min": (torch.amin, "min"),
    "any": (lambda values: values.any().to(torch.uint8), "max"),
    "all": (lambda values: values.all().to(torch.uint8), "min"),
}
_NORMS = ("norm", "linalg_vector_norm")


@dataclass(frozen=True)
class _ShardPlacement:
    """Placement of a gradient shard in the full gradient."""

    spec: ShardSpec
    mesh: ParallelMesh

    def reduce(self, gradient: Tensor, name: str) -> Tensor:
        """Reduce the full tensor to a scalar; a collective over the ranks that have its shards."""
        reduce_local, op = _REDUCTIONS[name]
        local = gradient.as_subclass(Tensor)
        # Padding is not a part of the full tensor, and replicated elements count once.
        counted = [
            view.reshape(-1)
            for box, view in self.spec.local_views(local)
            if not box.copy and view.numel()
        ]
        # A rank without counted elements contributes a replicated one, which changes neither a
        # maximum nor a minimum.
        values = torch.cat(counted) if counted else local.reshape(-1)[:1]
        result = reduce_local(values)
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


class ShardedGradient(Tensor):
    """Gradient shard that is local element by element and global in reductions to a scalar.

    Norms, sums, means, maxima, minima, ``any`` and ``all`` over all elements equal those of the
    full tensor, on every rank.

    Communication: One all-reduce of a scalar over tp (etp for experts) for each such reduction. All
    ranks must call it.

    Raises:
        UnsupportedError: If the norms of several parameters are combined, as in
            ``torch.nn.utils.clip_grad_norm_``, while other ranks hold other parameters.
    """

    placement: _ShardPlacement | None = None

    @staticmethod
    def of(
        gradient: Shaped[Tensor, "*shape"], spec: ShardSpec, mesh: ParallelMesh
    ) -> Shaped[Tensor, "*shape"]:
        """Return a view of the gradient that knows its placement in the full gradient."""
        if mesh.model.size == 1:
            return gradient
        sharded = gradient.as_subclass(ShardedGradient)
        sharded.placement = _ShardPlacement(spec, mesh)
        return sharded

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run reductions of all elements on the full tensor, and all other operations locally."""
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is torch._foreach_norm:
            return [
                torch.linalg.vector_norm(gradient, *args[1:], **options) for gradient in args[0]
            ]
        first = args[0] if args else None
        placement = first.placement if isinstance(first, ShardedGradient) else None
        if (
            isinstance(first, ShardedGradient)
            and placement is not None
            and options.get("dim") is None
        ):
            if name in _NORMS and len(args) < 3:
                _check_joined(name, placement.mesh)
                order = args[1] if len(args) > 1 else options.get("p", options.get("ord", 2))
                return placement.norm(first, 2.0 if order in (None, "fro") else float(order))
            if name in _REDUCTIONS and len(args) == 1:
                return placement.reduce(first, name)
            if name == "mean" and len(args) == 1:
                return (
                    placement.reduce(first, "sum") / torch.Size(placement.spec.full_shape).numel()
                )
        result = super().__torch_function__(func, types, args, options)
        if isinstance(result, ShardedGradient):
            if not isinstance(first, Tensor) or result.shape != first.shape:
                return result.as_subclass(Tensor)
            result.placement = placement
        return result


def _check_joined(name: str, mesh: ParallelMesh) -> None:
    if name == "linalg_vector_norm" and (mesh.pp.size > 1 or mesh.ep.size > 1):
        raise UnsupportedError(
            f"torch.nn.utils.clip_grad_norm_ cannot be used with pp ({mesh.pp.size}) or ep "
            f"({mesh.ep.size}) above 1, because it computes the norm of this rank's parameters "
            "only. Use self.clip_gradients(optimizer, value, 'norm') or "
            "Trainer(gradient_clip_val=...), which compute the norm over all ranks."
        )
