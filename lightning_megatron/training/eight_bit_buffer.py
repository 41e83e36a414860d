"""Flat buffers of weights whose numbers are kept and gathered in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import ShardSpec
from lightning_megatron.layers.choose_kernels import choose_kernels
from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.layers.fp8.eight_bit_parameter import keep_in_eight_bits, keep_in_memory
from lightning_megatron.layers.fp8.operand import Operand
from lightning_megatron.layers.fp8.stored_weight import FORMAT, StoredWeight
from lightning_megatron.plan.buckets import BufferPlan, Slice
from lightning_megatron.shapes import Float, Shaped
from lightning_megatron.training.flat_buffer import FlatBuffer

#: Types of main parameters that the kernels read.
_KERNEL_TYPES = (torch.float32, torch.bfloat16)


class EightBitBuffer(FlatBuffer):
    """Flat buffer whose parameters are weights of linear layers, in 8 bits with one scale for each.

    The numbers that are rounded to 8 bits are the main parameters, in their own precision: each
    rank rounds its slices, with the largest magnitude of the whole weight, and the all-gathers of
    parameters carry bytes. Layers read them as :meth:`stored_weight`. To other code the members are
    :class:`~lightning_megatron.layers.fp8.eight_bit_parameter.EightBitParameter`.

    After :meth:`leave_eight_bits` the buffer is an ordinary one.

    Shapes: parameters ``(plan.size,)``, bytes; magnitudes ``(weights,)``.

    Args:
        members: As for :class:`FlatBuffer`.
        specs: As for :class:`FlatBuffer`.
        plan: As for :class:`FlatBuffer`.
        part: As for :class:`FlatBuffer`.
        main_dtype: As for :class:`FlatBuffer`.
        gradient_dtype: As for :class:`FlatBuffer`.
        weights: Names of the members of which each weight consists, from the first row to the last.
        wait: Function that waits until all parameters are complete.
    """

    def __init__(
        self,
        members: Mapping[str, nn.Parameter],
        specs: Mapping[str, ShardSpec],
        plan: BufferPlan,
        part: int,
        main_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        weights: Sequence[tuple[str, ...]],
        wait: Callable[[], None],
    ) -> None:
        self.is_in_eight_bits = True
        self._weights = tuple(weights)
        self._number_of = {
            name: number for number, names in enumerate(self._weights) for name in names
        }
        self._dtype = next(iter(members.values())).dtype
        super().__init__(members, specs, plan, part, main_dtype, gradient_dtype)
        device = self.parameters.device
        shape = len(self._weights)
        # Bit patterns of the largest magnitudes, as casts use them.
        self._magnitudes = torch.zeros(shape, dtype=torch.int32, device=device)
        # Matrix products of GPUs read scales only at multiples of 16 bytes.
        self._scales = torch.ones(shape, 4, dtype=torch.float32, device=device)
        self._casts = self._slice_casts()
        for name, parameter in members.items():
            keep_in_eight_bits(parameter, partial(self._read, name, wait))
        self._versions = self._count_writes()

    @property
    @override
    def is_stored_by_update(self) -> bool:
        # The scales of 8 bits are known when all main parameters are updated.
        return not self.is_in_eight_bits

    def stored_weight(self, names: tuple[str, ...]) -> StoredWeight:
        """Return a weight as linear layers read it.

        Args:
            names: Names of the members of which it consists.
        """
        number = self._weights.index(names)
        parts = tuple(self._view(name) for name in names)
        return StoredWeight(parts, self._scales[number, :1])

    def magnitudes(self) -> dict[str, Float[Tensor, "1"]]:
        """Return the largest magnitude of the weight of each member, in the type of the members."""
        found = self._magnitudes.view(torch.float32).to(self._dtype).split(1)
        return {name: found[number] for name, number in self._number_of.items()}

    @torch.no_grad()
    @override
    def store_main_parameters(self, mesh: ParallelMesh, *, stored: bool = False) -> None:
        """Round the main parameters into this rank's part of the parameters.

        Communication: an all-reduce of one number for each weight over the data ranks, and one over
            tp.
        """
        if not self.is_in_eight_bits:
            super().store_main_parameters(mesh, stored=stored)
            return
        self._casts.find(self._magnitudes)
        for axis in (mesh.copies(self.is_expert), mesh.tp):
            all_reduce_(self._magnitudes, axis, "max")
        self._casts.cast(self._magnitudes, FORMAT)
        self._scales[:, 0].copy_(torch_casts.scales_of(self._magnitudes, FORMAT))

    @torch.no_grad()
    def leave_eight_bits(self, mesh: ParallelMesh, *, gathers: bool) -> None:
        """Give the members memory of their own type again.

        Args:
            mesh: Process groups of this rank.
            gathers: Whether they get the main parameters of all ranks, as after a step of an
                ordinary buffer; else what the 8 bits say.

        Communication: an all-gather of each bucket over the data ranks if ``gathers``.
        """
        if not self.is_in_eight_bits:
            return
        whole = self.parameters.new_zeros(self.plan.size, dtype=self._dtype)
        if not gathers:
            for name in self.members:
                place = self.plan.place(name)
                whole[place.start : place.stop].copy_(self._numbers(name).flatten())
        self.parameters = whole
        self.is_in_eight_bits = False
        # It refers to the bytes.
        del self._casts
        if gathers:
            super().store_main_parameters(mesh)
            self.gather(mesh)
        for name, parameter in self.members.items():
            keep_in_memory(parameter, self._view(name))
        pieces = {one.name: one for one in self.plan.slices(self.part)}
        self.slices = {
            name: replace(one, half=self._half(pieces[name], one.main.shape))
            for name, one in self.slices.items()
        }
        self._versions = self._count_writes()

    def gather(self, mesh: ParallelMesh) -> None:
        """Gather the parts of all ranks, and wait for them.

        Args:
            mesh: Process groups of this rank.

        Communication: an all-gather of each bucket over the data ranks.
        """
        if self.plan.num_parts == 1:
            return
        for number in range(len(self.plan.buckets)):
            self.start_gather(number, mesh).wait()

    @override
    def load_main_parameters(self) -> None:
        with torch.no_grad():
            for one in self.plan.slices(self.part):
                whole = self.members[one.name].detach().flatten()
                main = self.slices[one.name].main
                main.copy_(whole[one.start : one.stop].view(main.shape))

    @override
    def adopt_user_writes(self, names: Collection[str] = ()) -> None:
        # Weights in 8 bits refuse to be written.
        if not self.is_in_eight_bits:
            super().adopt_user_writes(names)

    @override
    def is_view(self, name: str) -> bool:
        return self.is_in_eight_bits or super().is_view(name)

    @override
    def _stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    @override
    def _take_members(self) -> None:
        """Leave the members as they are until the main parameters have their numbers."""

    @override
    def _half(self, one: Slice, form: torch.Size) -> Shaped[Tensor, "..."] | None:
        return None if self.is_in_eight_bits else super()._half(one, form)

    def _slice_casts(self) -> Any:
        """Return the casts of this rank's slices, by the kernels where these are available."""
        main = self.main_parameters
        assert main is not None, "bytes are no main parameters"
        kernels = None
        if main.is_cuda and main.dtype in _KERNEL_TYPES:
            kernels = choose_kernels(main.device).kernels
        slices = [
            (one.shard_start, one.buffer_start, one.size, self._number_of[one.name])
            for one in self.plan.slices(self.part)
        ]
        make = torch_casts.SliceCasts if kernels is None else kernels.SliceCastKernel
        return make(main, self.parameters, slices)

    def _read(self, name: str, wait: Callable[[], None]) -> Float[Tensor, "rows columns"]:
        wait()
        return self._numbers(name)

    def _numbers(self, name: str) -> Float[Tensor, "rows columns"]:
        """Return the numbers of a member, rounded to 8 bits, in its own type."""
        number = self._number_of[name]
        operand = Operand(self._view(name).view(FORMAT), self._scales[number, :1])
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        return operand.numbers(wide).to(self._dtype)
