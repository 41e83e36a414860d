"""Parameters, gradients and main parameters of one optimizer and dtype, each in one flat tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lightning_megatron.groups.shard_spec import FlatSlice, Placement, ShardSpec, set_shard_spec
from lightning_megatron.plan.buckets import BufferPlan, Slice


@dataclass(frozen=True)
class MainSlice:
    """Hold the part of a parameter that this rank's optimizer trains.

    Args:
        name: The parameter.
        placement: Where the part lies in the full tensor.
        main: What the optimizer trains: of the parameter's shape where it is whole, else one-dimensional.
        gradient: The part's gradient inside the flat buffer, shaped like ``main``.
        is_exclusive: Whether no other rank of its data-parallel axis holds these elements.
        counted: The views of ``gradient`` that only this rank of its model-parallel group counts in a norm.
        half: The part in the model's own parameter, shaped like ``main``; None where that is the main itself.
    """

    name: str
    placement: Placement
    main: nn.Parameter
    gradient: Tensor
    is_exclusive: bool
    counted: tuple[Tensor, ...] = ()
    half: Tensor | None = None

    def counted_in(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """List the counted pieces of a finished gradient: not tied copies, other copies or padding."""
        if gradient.data_ptr() == self.gradient.data_ptr():
            return self.counted
        return counted_views(self.placement, gradient)


def counted_views(placement: Placement, tensor: Tensor) -> tuple[Tensor, ...]:
    """List the pieces of a local tensor that are counted once in the full one."""
    if placement.tied_to is not None:
        return ()
    return tuple(view for box, view in placement.local_views(tensor) if box.copy == 0)


class FlatBuffer:
    """Lay parameters out one after the other, and let the model's parameters be views of the result.

    The gradients have the same layout, so that a bucket of them is one message. Of the main parameters only the part of
    this rank exists, where they are of another dtype than the model's; otherwise they are the model's memory.

    Shapes: parameters and gradients ``(plan.size,)``; mains ``(plan.shard_size,)``.

    Args:
        members: The model's parameters by name, all of one dtype and device.
        specs: How each lies in its full tensor; all are experts' or none.
        plan: Where each parameter goes, and which part this rank trains.
        part: Index of this rank's part; 0 where the plan has only one.
        main_dtype: Dtype of the mains.
        gradient_dtype: Dtype of the gradients.
    """

    def __init__(
        self,
        members: Mapping[str, nn.Parameter],
        specs: Mapping[str, ShardSpec],
        plan: BufferPlan,
        part: int,
        main_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
    ) -> None:
        self.members, self.plan, self.part = dict(members), plan, part
        #: Whether the parameters are experts', which other ranks hold copies of.
        self.is_expert = any(spec.is_expert for spec in specs.values())
        first = next(iter(members.values()))
        make = partial(torch.zeros, device=first.device)
        self.parameters = make(plan.size, dtype=first.dtype)
        self.gradients = make(plan.size, dtype=gradient_dtype)
        self.mains = make(plan.shard_size, dtype=main_dtype) if main_dtype != first.dtype else None
        self._shapes = {name: parameter.shape for name, parameter in members.items()}
        for name, parameter in members.items():
            place = plan.place(name)
            view = self.parameters[place.start : place.stop].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        self.slices = {one.name: self._slice(one, specs[one.name]) for one in plan.slices(part)}
        self.load_mains()
        self._own_members = [members[name] for name in self.slices]
        self._versions = self._count_writes()

    def gradient_of(self, name: str) -> Tensor:
        """Return the gradient of a whole local parameter, of its shape."""
        place = self.plan.place(name)
        return self.gradients[place.start : place.stop].view(self._shapes[name])

    def own_part(self, flat: Tensor, bucket: int) -> Tensor:
        """Return this rank's part of a bucket of ``parameters`` or ``gradients``."""
        start, stop = self.plan.buckets[bucket].part(self.part, self.plan.num_parts)
        return flat[start:stop]

    @torch.no_grad()
    def load_mains(self) -> None:
        """Take this rank's part of the mains from the model's parameters."""
        for own, main in self._own_parts():
            main.copy_(own)

    @torch.no_grad()
    def store_mains(self) -> None:
        """Round the mains into this rank's part of the model's parameters."""
        for own, main in self._own_parts():
            own.copy_(main)

    @torch.no_grad()
    def take_written(self, names: Collection[str] = ()) -> None:
        """Take over what others have written into the model's parameters, such as loaded or scaled weights.

        Elements that are their rounded mains stay as they are. A parameter counts as written if torch has seen an
        operation in place on it since the last call; nothing in a training step is one.

        Args:
            names: Parameters to compare in any case, which torch may have seen nothing of.
        """
        if self.mains is None:
            return
        versions = self._count_writes()
        if versions == self._versions and not names:
            return
        for one, version, known in zip(self.slices.values(), versions, self._versions, strict=True):
            if one.half is not None and (one.name in names or version != known):
                is_main = one.main.to(one.half.dtype) == one.half
                one.main.copy_(torch.where(is_main, one.main, one.half.to(one.main.dtype)))
        self._versions = versions

    @torch.no_grad()
    def bring_back(self, names: Iterable[str]) -> None:
        """Copy the values of parameters whose memory was replaced, and let these be views of the buffer again."""
        # All values are kept before any is written: two parameters may have exchanged their memory.
        values = {name: self.members[name].detach().clone() for name in names}
        for name, value in values.items():
            place = self.plan.place(name)
            view = self.parameters[place.start : place.stop].view(self._shapes[name])
            view.copy_(value)
            self.members[name].data = view

    def has_in_place(self, name: str) -> bool:
        """Return whether a parameter is a view of this buffer, at its place."""
        start, itemsize = self.parameters.data_ptr(), self.parameters.element_size()
        return self.members[name].data_ptr() == start + self.plan.place(name).start * itemsize

    @property
    def still_holds(self) -> bool:
        """Tell whether the model's parameters are views of this buffer: moving a module to a device ends that."""
        return all(map(self.has_in_place, self.members))

    def _count_writes(self) -> list[int]:
        """List how often torch has written in place into each parameter of which this rank has a part."""
        return [member._version for member in self._own_members]

    def _own_parts(self) -> list[tuple[Tensor, Tensor]]:
        """Pair this rank's part of every bucket with the mains of it, where they are apart."""
        if self.mains is None:
            return []
        pairs, done = [], 0
        for bucket in range(len(self.plan.buckets)):
            own = self.own_part(self.parameters, bucket)
            pairs.append((own, self.mains[done : done + own.numel()]))
            done += own.numel()
        return pairs

    def _slice(self, one: Slice, spec: ShardSpec) -> MainSlice:
        size, shape = one.stop - one.start, self._shapes[one.name]
        is_whole = size == shape.numel()
        flat, start = (self.mains, one.shard_start) if self.mains is not None else (self.parameters, one.buffer_start)
        # A whole parameter keeps its shape, for optimizers that look at it.
        form = shape if is_whole else torch.Size((size,))
        placement: Placement = spec if is_whole else FlatSlice(spec, tuple(shape), one.start, one.stop)
        main = nn.Parameter(flat[start : start + size].view(form))
        own = slice(one.buffer_start, one.buffer_start + size)
        gradient = self.gradients[own].view(form)
        half = None if self.mains is None else self.parameters[own].view(form)
        if is_whole:
            set_shard_spec(main, spec)
        counted = counted_views(placement, gradient)
        return MainSlice(one.name, placement, main, gradient, self.plan.num_parts > 1, counted, half)
