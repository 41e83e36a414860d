"""User writes between steps: to parameters, and to gradients shown as ``parameter.grad``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import ShardSpec, shard_spec_of
from lightning_megatron.optimizer.flat_buffer import FlatBuffer
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


class UserWrites:
    """Tracking of user writes, so that the next optimizer step starts from them.

    torch's version counter counts in-place operations on a parameter, but not those through
    ``parameter.data``. The code that detects access to that attribute calls :meth:`note`, and the
    values of that parameter are later compared with its main parameter.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Sequence[FlatBuffer],
        wait: Callable[[], None],
    ) -> None:
        self._parameters = parameters
        self._buffers = buffers
        self._wait = wait
        self._names_by_id = {id(parameter): name for name, parameter in parameters.items()}
        self._noted: set[str] = set()

    def note(self, parameter: nn.Parameter) -> None:
        """Record that user code accesses or replaces the memory of a parameter."""
        name = self._names_by_id.get(id(parameter))
        if name is not None:
            # A pending gather would overwrite the written values.
            self._wait()
            self._noted.add(name)

    def adopt_noted(self) -> None:
        """Adopt values written through ``parameter.data``, before the next forward pass.

        Values written in place wait for the optimizer's step: user code may write back the former
        ones until then, and a main parameter that rounds to them keeps its bits.
        """
        if self._noted:
            self.adopt()

    def adopt(self, *, all_values: bool = False) -> None:
        """Adopt written values before parameters are trained further.

        If user code replaced a parameter's memory, the values are copied to the parameter's place
        in the flat buffer.

        Args:
            all_values: Whether to compare all parameters, not only those known to be written.
        """
        noted = self._parameters.keys() if all_values else self._noted
        self._noted = set()
        moved = self._moved(noted)
        for buffer in self._buffers:
            buffer.restore_views([name for name in moved if name in buffer.members])
            buffer.adopt_user_writes(noted)

    def adopt_in_place(self) -> None:
        """Adopt values written in place; values in replaced memory are adopted at the next step.

        User code may still have a reference to the old memory and may restore it until then.
        """
        apart = {name for name in self._noted if self.has_replaced_memory(name)}
        for buffer in self._buffers:
            buffer.adopt_user_writes(self._noted - apart)
        self._noted = apart

    def has_replaced_memory(self, name: str) -> bool:
        """Return whether user code has replaced the memory of a parameter."""
        return name in self._noted and bool(self._moved([name]))

    def _moved(self, names: Collection[str]) -> list[str]:
        """List the parameters that are not views of their places in the buffers, or raise."""
        homes = {name: buffer for buffer in self._buffers for name in buffer.members}
        moved = [name for name in names if name in homes and not homes[name].is_view(name)]
        if not moved:
            return moved
        for name in moved:
            shape = homes[name].gradient_of(name).shape
            new_shape = self._parameters[name].shape
            if new_shape != shape:
                raise UnsupportedError(
                    f"parameters must keep their shapes during a fit: {name!r} was {tuple(shape)} "
                    f"and is {tuple(new_shape)} after an assignment to parameter.data. Its "
                    "gradient, its optimizer state and its part on other ranks have the old shape. "
                    "Change shapes in configure_model or before the fit."
                )
        holders: dict[int, str] = {}
        for name in (name for name in self._parameters if name in homes):
            place = self._parameters[name].data_ptr()
            owner = holders.setdefault(place, name)
            if place and owner != name:
                raise UnsupportedError(
                    f"trained parameters must not share memory: {owner!r} and {name!r} share their "
                    "memory after an assignment to parameter.data. Each has its own gradient and "
                    "optimizer state. Copy values by parameter.data.copy_(other), or use one "
                    "parameter in both places from the beginning."
                )
        return moved


@dataclass(frozen=True)
class _ExposedGradient:
    """Parameter, its gradient in the flat buffer, and the tensor shown as ``parameter.grad``."""

    parameter: nn.Parameter
    gradient: Tensor
    exposed: Tensor


class ExposedGradients:
    """Views of the flat gradient buffers as ``parameter.grad`` between backward passes.

    User code may write into a gradient, replace it or set it to None. :meth:`adopt_user_changes`
    applies such changes to the buffers.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        #: Whether gradients are shown. If so, every data-parallel rank gets full reduced gradients,
        #: instead of its part.
        self.is_on = False
        self._exposed: dict[str, _ExposedGradient] = {}

    def expose(self, name: str, parameter: nn.Parameter, gradient: Shaped[Tensor, "..."]) -> None:
        """Show a gradient as ``parameter.grad``."""
        entry = self._exposed.get(name)
        if entry is None or entry.gradient is not gradient:
            spec = shard_spec_of(parameter, self._mesh.tp.rank)
            exposed = ShardedGradient.of(gradient, spec, self._mesh)
            entry = self._exposed[name] = _ExposedGradient(parameter, gradient, exposed)
        if parameter.grad is not entry.exposed:
            parameter.grad = None
            # The dtype of an accumulated gradient may be wider than that of the parameter, and the
            # dtype of a gradient that user code assigns may be narrower.
            parameter.grad_dtype = None
            parameter.grad = entry.exposed

    def gradients(self, names: Collection[str] | None = None) -> list[Shaped[Tensor, "..."]]:
        """List the shown gradients of the named parameters, or of all."""
        return [
            entry.gradient
            for name, entry in self._exposed.items()
            if names is None or name in names
        ]

    def adopt_user_changes(self) -> set[str]:
        """Copy replaced gradients into the buffers; return the names of those set to None."""
        removed = set()
        for name, entry in self._exposed.items():
            gradient = entry.parameter.grad
            if gradient is None:
                removed.add(name)
            elif gradient is not entry.exposed:
                entry.gradient.copy_(gradient.as_subclass(Tensor))
                entry.parameter.grad = entry.exposed
        self.withdraw(removed)
        return removed

    def withdraw(self, names: Iterable[str] | None = None) -> None:
        """Set ``parameter.grad`` to None, before autograd adds to it."""
        for name in list(self._exposed if names is None else names):
            if name in self._exposed:
                parameter = self._exposed.pop(name).parameter
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype


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
        if self.spec.over_ep:
            reduced = all_reduce_(reduced, self.mesh.ep, op)
        return reduced.bool() if name in ("any", "all") else reduced

    def norm(self, gradient: Tensor, order: float) -> Tensor:
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
        if mesh.model.size == 1 and not spec.over_ep:
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
