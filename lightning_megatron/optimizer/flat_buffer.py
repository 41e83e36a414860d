"""Flat buffers for parameters, gradients and main parameters of one optimizer and dtype."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_

import torch
from torch import Tensor, nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import FlatSlice, Placement, ShardSpec, set_shard_spec
from lightning_megatron.optimizer.sharding import Zero1Sharding
from lightning_megatron.plan.buckets import Slice
from lightning_megatron.shapes import Shaped


def same_objects(left: Sequence[object], right: Sequence[object]) -> bool:
    """Return whether two sequences contain the same objects."""
    return len(left) == len(right) and all(map(is_, left, right))


class UseOrder:
    """Positions of parameters in the order in which the forward pass reads them."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._position = {name: number for number, name in enumerate(names)}

    def first(self, names: Iterable[str]) -> int:
        """Return the position of the first of some parameters to be read."""
        return min(map(self._position.__getitem__, names))

    def sorted(self, names: Iterable[str]) -> list[str]:
        """Return names of parameters in the order of use."""
        return sorted(names, key=self._position.__getitem__)


@dataclass(frozen=True)
class MainSlice:
    """Part of a parameter that this rank's optimizer trains.

    Args:
        main: Tensor that the optimizer trains. It has the parameter's shape if the part is the full
            parameter, and one dimension otherwise.
        gradient: Gradient of the part inside the flat buffer, shaped like ``main``.
        is_exclusive: Whether no other rank of the data-parallel axis has these elements.
        half: View of the part in the model's parameter, shaped like ``main``; None if ``main``
            shares that memory.
    """

    name: str
    placement: Placement
    main: nn.Parameter
    gradient: Shaped[Tensor, "..."]
    is_exclusive: bool
    half: Shaped[Tensor, "..."] | None = None

    @property
    def shown_dtype(self) -> torch.dtype:
        """Return the dtype in which the optimizer gets the gradient."""
        return self.main.grad_dtype or self.gradient.dtype


def slice_state(part_slice: MainSlice, parameter: nn.Parameter, state: object) -> object:
    """Cut and cast a parameter's optimizer state to the shape and dtype of the main parameter."""
    if not isinstance(state, dict):
        return state
    start = getattr(part_slice.placement, "start", 0)

    def cut(value: object) -> object:
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        part = value.flatten()[start : start + part_slice.main.numel()].view(part_slice.main.shape)
        return part.to(part_slice.main.dtype) if value.dtype == parameter.dtype else part.clone()

    return {key: cut(value) for key, value in state.items()}


class FlatBuffer:
    """Contiguous memory for parameters, their gradients and this rank's main parameters.

    The model's parameters become views of the buffer. The gradients have the same layout, so that
    one bucket of gradients is one message. If the main parameters have another dtype than the
    model's, only this rank's part of them exists; otherwise they share the model's memory.

    Shapes: Parameters and gradients are ``(plan.size,)``; main parameters are
    ``(plan.shard_size,)``.

    Args:
        specs: Shard specs by name; either all or none belong to experts.
    """

    def __init__(
        self,
        members: Mapping[str, nn.Parameter],
        specs: Mapping[str, ShardSpec],
        sharding: Zero1Sharding,
        main_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
    ) -> None:
        self.members = dict(members)
        #: What this rank trains of the buffer.
        self.sharding = sharding
        #: Layout of the buffer.
        self.plan = plan = sharding.plan
        first = next(iter(members.values()))
        make = partial(torch.zeros, device=first.device)
        stored_dtype = self._stored_dtype(first.dtype)
        self.parameters = make(plan.size, dtype=stored_dtype)
        self.gradients = make(plan.size, dtype=gradient_dtype)
        self.main_parameters = (
            make(plan.shard_size, dtype=main_dtype) if main_dtype != stored_dtype else None
        )
        self._shapes = {name: parameter.shape for name, parameter in members.items()}
        self._take_members()
        self.slices = {
            part_slice.name: self._slice(part_slice, specs[part_slice.name])
            for part_slice in sharding.slices()
        }
        self._homes = {name: entry.main.detach() for name, entry in self.slices.items()}
        self.load_main_parameters()
        self._own_members = [members[name] for name in self.slices]
        self._versions = self._count_writes()

    @property
    def is_stored_by_update(self) -> bool:
        """Return whether the fused update can write this rank's part of the parameters."""
        return True

    def gradient_of(self, name: str) -> Shaped[Tensor, "..."]:
        """Return the gradient of a whole local parameter, in the parameter's shape."""
        place = self.plan.place(name)
        return self.gradients[place.start : place.stop].view(self._shapes[name])

    @torch.no_grad()
    def load_main_parameters(self) -> None:
        """Copy this rank's part of the model's parameters into the main parameters."""
        for part, main in self._local_parts():
            main.copy_(part)

    @torch.no_grad()
    def store_main_parameters(self, mesh: ParallelMesh) -> None:
        """Round the main parameters into this rank's part of the model's parameters."""
        for name, home in self._homes.items():
            trained = self.slices[name].main
            if trained.data_ptr() != home.data_ptr():
                # An optimizer has assigned other memory to `parameter.data`.
                home.copy_(trained)
                trained.data = home
        for part, main in self._local_parts():
            part.copy_(main)

    @torch.no_grad()
    def adopt_user_writes(self, names: Collection[str] = ()) -> None:
        """Copy values that user code wrote into the model's parameters to the main parameters.

        Examples are loaded or scaled weights. Elements of a main parameter that still round to the
        model's values do not change. A parameter counts as written if its torch version counter has
        changed since the last call; the training step itself does not change the counter.
        Parameters in ``names`` are compared anyway, because the counter may have missed a write.
        """
        if self.main_parameters is None:
            return
        versions = self._count_writes()
        if versions == self._versions and not names:
            return
        for main_slice, version, known in zip(
            self.slices.values(), versions, self._versions, strict=True
        ):
            if main_slice.half is not None and (main_slice.name in names or version != known):
                is_main = main_slice.main.to(main_slice.half.dtype) == main_slice.half
                main_slice.main.copy_(
                    torch.where(is_main, main_slice.main, main_slice.half.to(main_slice.main.dtype))
                )
        self._versions = versions

    @torch.no_grad()
    def restore_views(self, names: Iterable[str]) -> None:
        """Copy values from replaced memory into the buffer, and restore the parameters' views."""
        # Copy all values before the first write: two parameters may have swapped their memory.
        values = {name: self.members[name].detach().clone() for name in names}
        for name, value in values.items():
            view = self._view(name)
            view.copy_(value)
            self.members[name].data = view

    def is_view(self, name: str) -> bool:
        """Return whether a parameter is a view of its place in this buffer."""
        start = self.parameters.data_ptr()
        itemsize = self.parameters.element_size()
        return self.members[name].data_ptr() == start + self.plan.place(name).start * itemsize

    @property
    def still_holds(self) -> bool:
        """Return whether all parameters are views of this buffer; ``module.to`` may change that."""
        return all(map(self.is_view, self.members))

    def _count_writes(self) -> list[int]:
        """List torch's version counters of the parameters of which this rank has a part."""
        return [member._version for member in self._own_members]

    def _local_parts(self) -> list[tuple[Tensor, Tensor]]:
        """Pair this rank's part of every bucket with its main parameters.

        The list is empty if both share their memory.
        """
        if self.main_parameters is None:
            return []
        pairs = []
        done = 0
        for bucket in range(len(self.plan.buckets)):
            part = self.sharding.own_part(self.parameters, bucket)
            pairs.append((part, self.main_parameters[done : done + part.numel()]))
            done += part.numel()
        return pairs

    def _stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def _take_members(self) -> None:
        for name, parameter in self.members.items():
            view = self._view(name)
            view.copy_(parameter.detach())
            parameter.data = view

    def _view(self, name: str) -> Shaped[Tensor, "..."]:
        place = self.plan.place(name)
        return self.parameters[place.start : place.stop].view(self._shapes[name])

    def _half(self, part_slice: Slice, form: torch.Size) -> Shaped[Tensor, "..."] | None:
        """Return a slice's view in :attr:`parameters`; None if it is the main parameter itself."""
        if self.main_parameters is None:
            return None
        return self.parameters[
            part_slice.buffer_start : part_slice.buffer_start + part_slice.size
        ].view(form)

    def _slice(self, part_slice: Slice, spec: ShardSpec) -> MainSlice:
        size = part_slice.size
        shape = self._shapes[part_slice.name]
        is_whole = size == shape.numel()
        if self.main_parameters is None:
            flat = self.parameters
            start = part_slice.buffer_start
        else:
            flat = self.main_parameters
            start = part_slice.shard_start
        # A full parameter keeps its shape, because some optimizers depend on the shape.
        form = shape if is_whole else torch.Size((size,))
        placement: Placement = (
            spec if is_whole else FlatSlice(spec, tuple(shape), part_slice.start, part_slice.stop)
        )
        main = nn.Parameter(flat[start : start + size].view(form))
        elements = slice(part_slice.buffer_start, part_slice.buffer_start + size)
        gradient = self.gradients[elements].view(form)
        half = self._half(part_slice, form)
        if is_whole:
            set_shard_spec(main, spec)
        return MainSlice(
            part_slice.name, placement, main, gradient, self.sharding.is_exclusive, half
        )


def counted_pieces(entries: Iterable[MainSlice], mesh: ParallelMesh) -> list[Shaped[Tensor, "..."]]:
    """List the pieces of gradients that this rank counts in a norm, adjacent pieces joined.

    If several ranks have the same gradients, only the first one counts them. Tied copies, further
    copies of a range and padding do not count.
    """
    pieces: list[Tensor] = []
    for entry in entries:
        gradient = entry.main.grad
        placement = entry.placement
        is_counted = entry.is_exclusive or mesh.replica_axis(placement.is_expert).is_first
        if gradient is not None and is_counted and placement.tied_to is None:
            pieces += [view for box, view in placement.local_views(gradient) if box.copy == 0]
    return _joined(pieces)


def _joined(pieces: list[Tensor]) -> list[Tensor]:
    """Join adjacent pieces of a flat buffer, because norms of few long tensors are cheaper."""
    firsts: list[Tensor] = []
    sizes: list[int] = []
    stop = -1
    memory = -1
    for piece in pieces:
        start = piece.data_ptr()
        numel = piece.numel()
        # Another buffer may begin at the address where this one ends.
        if (
            start == stop
            and piece.dtype == firsts[-1].dtype
            and piece.untyped_storage().data_ptr() == memory
        ):
            sizes[-1] += numel
        else:
            firsts.append(piece)
            sizes.append(numel)
            memory = piece.untyped_storage().data_ptr()
        stop = start + numel * piece.element_size() if piece.is_contiguous() else -1
    runs = zip(firsts, sizes, strict=True)
    return [
        first if size == first.numel() else first.as_strided((size,), (1,)) for first, size in runs
    ]
