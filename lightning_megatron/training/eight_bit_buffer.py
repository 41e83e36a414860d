"""Flat buffers of weights whose numbers are kept and gathered in 8 bits."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import Pending, start_all_reduce
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
#: Buckets between the search for magnitudes and the casts that need them: the all-reduce of the
#: magnitudes may wait for the all-gather of a large embedding, which takes as long as the update of
#: about this many buckets.
_LAG = 32


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
        # The weights of a bucket lie side by side in the tensors of magnitudes and scales.
        buckets = {
            placed.name: number
            for number, bucket in enumerate(plan.buckets)
            for placed in bucket.placed
        }
        self._weights = tuple(sorted(weights, key=lambda names: buckets[names[0]]))
        self._bucket_of = [buckets[names[0]] for names in self._weights]
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
        #: All-reduces of magnitudes, by bucket.
        self._finding: dict[int, Pending] = {}
        #: Buckets whose bytes are those of the updated main parameters.
        self._stored: set[int] = set()
        for name, parameter in members.items():
            keep_in_eight_bits(parameter, partial(self._read, name, wait))
        self._versions = self._count_writes()

    @property
    @override
    def gather_lag(self) -> int:
        return _LAG if self.is_in_eight_bits else 0

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

        Buckets that :meth:`start_gather` has rounded since the last call are left as they are.

        Communication: two all-reduces for each other bucket, of one number for each weight: over
            the data ranks and over tp.
        """
        if not self.is_in_eight_bits:
            super().store_main_parameters(mesh, stored=stored)
            return
        left = [one for one in reversed(range(len(self.plan.buckets))) if one not in self._stored]
        for bucket in left:
            self.prepare_gather(bucket, mesh)
        for bucket in left:
            self._store(bucket, mesh)
        self._stored.clear()
        self._scales[:, 0].copy_(torch_casts.scales_of(self._magnitudes, FORMAT))

    @torch.no_grad()
    @override
    def prepare_gather(self, bucket: int, mesh: ParallelMesh) -> None:
        """Begin to find the largest magnitudes of the weights of a bucket.

        Communication: an all-reduce of one number for each weight over the data ranks.
        """
        if self.is_in_eight_bits and bucket not in self._finding:
            magnitudes = self._magnitudes_of(bucket)
            self._casts[bucket].find(magnitudes)
            axis = mesh.copies(self.is_expert)
            self._finding[bucket] = start_all_reduce(magnitudes, axis, "max")

    @torch.no_grad()
    @override
    def start_gather(self, bucket: int, mesh: ParallelMesh) -> Pending:
        """Start to gather the parts of all ranks, rounded first if they are prepared only.

        Communication: as for :class:`FlatBuffer`, and for a prepared bucket an all-reduce of one
            number for each weight over tp.
        """
        if bucket in self._finding:
            self._store(bucket, mesh)
            self._stored.add(bucket)
        return super().start_gather(bucket, mesh)

    def _store(self, bucket: int, mesh: ParallelMesh) -> None:
        """Round this rank's part of a bucket whose magnitudes are being found."""
        self._finding.pop(bucket).wait()
        magnitudes = self._magnitudes_of(bucket)
        all_reduce_(magnitudes, mesh.tp, "max")
        self._casts[bucket].cast(magnitudes, FORMAT)

    def _magnitudes_of(self, bucket: int) -> Tensor:
        first = bisect_left(self._bucket_of, bucket)
        return self._magnitudes[first : bisect_right(self._bucket_of, bucket)]

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

    def _slice_casts(self) -> list[Any]:
        """List the casts of this rank's slices of each bucket, by kernels where available."""
        main = self.main_parameters
        assert main is not None, "bytes are no main parameters"
        kernels = None
        if main.is_cuda and main.dtype in _KERNEL_TYPES:
            kernels = choose_kernels(main.device).kernels
        slices: list[list[tuple[int, int, int, int]]] = [[] for _ in self.plan.buckets]
        for one in self.plan.slices(self.part):
            weight = self._number_of[one.name] - bisect_left(self._bucket_of, one.bucket)
            slices[one.bucket].append((one.shard_start, one.buffer_start, one.size, weight))
        make = torch_casts.SliceCasts if kernels is None else kernels.SliceCastKernel
        return [make(main, self.parameters, of_bucket) for of_bucket in slices]

    def _read(self, name: str, wait: Callable[[], None]) -> Float[Tensor, "rows columns"]:
        wait()
        return self._numbers(name)

    def _numbers(self, name: str) -> Float[Tensor, "rows columns"]:
        """Return the numbers of a member, rounded to 8 bits, in its own type."""
        number = self._number_of[name]
        operand = Operand(self._view(name).view(FORMAT), self._scales[number, :1])
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        return operand.numbers(wide).to(self._dtype)
