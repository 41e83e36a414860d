"""Weights that are stored and all-gathered in 8 bits while an optimizer trains them."""

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
from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.layers.fp8.operand import Operand
from lightning_megatron.layers.fp8.scaling import FORMAT, StoredWeight
from lightning_megatron.layers.fused.choose_kernels import choose_kernels
from lightning_megatron.layers.parameters.eight_bit_parameter import (
    keep_in_eight_bits,
    keep_in_memory,
)
from lightning_megatron.optimizer.flat_buffer import FlatBuffer
from lightning_megatron.optimizer.sharding import Zero1Sharding
from lightning_megatron.plan.buckets import Slice
from lightning_megatron.shapes import Float, Shaped

#: Dtypes of main parameters that the kernels read.
_KERNEL_TYPES = (torch.float32, torch.bfloat16)


class EightBitBuffer(FlatBuffer):
    """Flat buffer that stores weights of linear layers in 8 bits, with one scale per weight.

    Each rank quantizes its slices of the main parameters directly, without a cast to the model's
    dtype in between. The scale follows from the largest magnitude of the whole weight. The
    all-gathers of parameters transfer 8-bit values. Values and scales keep their addresses, so that
    CUDA graphs can read them. Linear layers read a weight by
    :meth:`stored_weight`; other code sees the members as
    :class:`~lightning_megatron.layers.parameters.eight_bit_parameter.EightBitParameter`.

    After :meth:`leave_eight_bits` the buffer works like a :class:`FlatBuffer`.

    Shapes: parameters ``(plan.size,)``, uint8; magnitudes ``(weights,)``.

    Args:
        weights: Names of the members that form each weight, from the first row to the last.
    """

    def __init__(
        self,
        members: Mapping[str, nn.Parameter],
        specs: Mapping[str, ShardSpec],
        sharding: Zero1Sharding,
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
        super().__init__(members, specs, sharding, main_dtype, gradient_dtype)
        device = self.parameters.device
        shape = len(self._weights)
        # Bit patterns of the largest magnitudes (float32), the form that the casts use.
        self._magnitudes = torch.zeros(shape, dtype=torch.int32, device=device)
        # Matrix products on GPUs need scales at addresses that are multiples of 16 bytes.
        self._scales = torch.ones(shape, 4, dtype=torch.float32, device=device)
        self._casts = self._slice_casts()
        for name, parameter in members.items():
            keep_in_eight_bits(parameter, partial(self._read, name, wait))
        self._versions = self._count_writes()

    @property
    @override
    def is_stored_by_update(self) -> bool:
        # The scales are known only after all main parameters are updated.
        return not self.is_in_eight_bits

    def stored_weight(self, names: tuple[str, ...]) -> StoredWeight:
        """Return a weight in the form that linear layers read, by the names of its members."""
        number = self._weights.index(names)
        parts = tuple(self._view(name) for name in names)
        entry = slice(number, number + 1)
        return StoredWeight(parts, self._scales[number, :1], self._magnitudes[entry])

    def magnitudes(self) -> dict[str, Float[Tensor, "1"]]:
        """Return the largest magnitude of each member's weight, in the dtype of the members."""
        magnitudes = self._magnitudes.view(torch.float32).to(self._dtype).split(1)
        return {name: magnitudes[number] for name, number in self._number_of.items()}

    @torch.no_grad()
    @override
    def store_main_parameters(self, mesh: ParallelMesh) -> None:
        """Quantize the main parameters into this rank's part of the parameters.

        Communication: an all-reduce of one number for each weight over the data ranks, and one over
            tp.
        """
        if not self.is_in_eight_bits:
            super().store_main_parameters(mesh)
            return
        self._casts.find(self._magnitudes)
        for axis in (mesh.replica_axis(self.sharding.is_expert), mesh.tp):
            all_reduce_(self._magnitudes, axis, "max")
        self._casts.cast(self._magnitudes, FORMAT)
        self._scales[:, 0].copy_(torch_casts.scales_of(self._magnitudes, FORMAT))

    @torch.no_grad()
    def leave_eight_bits(self, mesh: ParallelMesh, *, gathers: bool) -> None:
        """Store the members in the model's dtype again.

        Args:
            gathers: Whether the members get the rounded main parameters of all ranks, as after a
                step with a :class:`FlatBuffer`; otherwise they get the dequantized 8-bit values.

        Communication: an all-gather of each bucket over the data ranks if ``gathers``.
        """
        whole = self.parameters.new_zeros(self.plan.size, dtype=self._dtype)
        if not gathers:
            for name in self.members:
                place = self.plan.place(name)
                whole[place.start : place.stop].copy_(self._numbers(name).flatten())
        self.parameters = whole
        self.is_in_eight_bits = False
        # The casts would keep the 8-bit memory alive.
        del self._casts
        if gathers:
            self.publish(mesh)
        for name, parameter in self.members.items():
            keep_in_memory(parameter, self._view(name))
        pieces = {part_slice.name: part_slice for part_slice in self.sharding.slices()}
        self.slices = {
            name: replace(main_slice, half=self._half(pieces[name], main_slice.main.shape))
            for name, main_slice in self.slices.items()
        }
        self._versions = self._count_writes()

    def publish(self, mesh: ParallelMesh) -> None:
        """Store the main parameters, gather the parts of all ranks, and wait for them.

        Communication: that of :meth:`store_main_parameters`, and an all-gather of each bucket over
            the data ranks.
        """
        self.store_main_parameters(mesh)
        for number in self.sharding.gathered:
            self.sharding.start_gather(self.parameters, number, mesh).wait()

    @override
    def load_main_parameters(self) -> None:
        with torch.no_grad():
            for part_slice in self.sharding.slices():
                whole = self.members[part_slice.name].detach().flatten()
                main = self.slices[part_slice.name].main
                main.copy_(whole[part_slice.start : part_slice.stop].view(main.shape))

    @override
    def adopt_user_writes(self, names: Collection[str] = ()) -> None:
        # Weights in 8 bits raise an error when user code writes to them.
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
        """Leave the members unchanged, because the main parameters are loaded from them."""

    @override
    def _half(self, part_slice: Slice, form: torch.Size) -> Shaped[Tensor, "..."] | None:
        return None if self.is_in_eight_bits else super()._half(part_slice, form)

    def _slice_casts(self) -> Any:
        """Return the function that casts this rank's slices, with fused kernels if available."""
        main = self.main_parameters
        assert main is not None, "bytes are no main parameters"
        kernels = None
        if main.is_cuda and main.dtype in _KERNEL_TYPES:
            kernels = choose_kernels(main.device).kernels
        slices = [
            (
                part_slice.shard_start,
                part_slice.buffer_start,
                part_slice.size,
                self._number_of[part_slice.name],
            )
            for part_slice in self.sharding.slices()
        ]
        make = torch_casts.SliceCasts if kernels is None else kernels.SliceCastKernel
        return make(main, self.parameters, slices)

    def _read(self, name: str, wait: Callable[[], None]) -> Float[Tensor, "rows columns"]:
        wait()
        return self._numbers(name)

    def _numbers(self, name: str) -> Float[Tensor, "rows columns"]:
        """Return the dequantized 8-bit values of a member, in the members' dtype."""
        number = self._number_of[name]
        operand = Operand(self._view(name).view(FORMAT), self._scales[number, :1])
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        return operand.numbers(wide).to(self._dtype)
