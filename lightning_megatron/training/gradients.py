"""Gradient reduction over the ranks, bucket by bucket, overlapped with the backward pass."""

from __future__ import annotations

import logging
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.layers.gradient_slot import GradientSlot, Owner, set_slot
from lightning_megatron.layers.weight_gradient_queue import WeightGradientQueue
from lightning_megatron.shapes import Shaped
from lightning_megatron.training.autograd_gradients import moving_into
from lightning_megatron.training.buffer_planner import LATE_GROUP
from lightning_megatron.training.flat_buffer import FlatBuffer
from lightning_megatron.training.gradient_bucket import GradientBucket
from lightning_megatron.training.main_parameters import MainParameters
from lightning_megatron.training.partial_sums import PartialSums
from lightning_megatron.training.unused import UnusedParameters

logger = logging.getLogger(__name__)


class GradientReducer:
    """Reduction of a step's gradients to the mean over the data-parallel ranks.

    Expert gradients are averaged over the ranks with the same experts. If experts on one rank
    process tokens of several data-parallel ranks, there are fewer replicas than losses. Their
    gradient slots then multiply by the missing factor, inside the matrix product if a kernel
    supports that.

    Gradients are accumulated over the microbatches in the flat buffers, by the layers' own matrix
    products or after autograd has computed them. A bucket's reduce-scatter (all-reduce if main
    parameters are replicated) starts when its last gradient is complete. Buckets start in the order
    of the buffers, which is the same on all ranks. Gradients that are partial sums over the tensor
    axis are added over that axis first. The first stage's embedding and its copy on the last stage
    are added at the end. A parameter without a gradient contributes zeros.

    Args:
        main: Parameters of this rank, to which optimizers are attached.

    Raises:
        UnsupportedError: If several pipeline stages hold the same parameter, other than a tied
            embedding.
    """

    def __init__(self, main: MainParameters) -> None:
        self._main = main
        #: Callback that gets this rank's own gradients by name before the reduction.
        self.before_reduction: Callable[[Mapping[str, Tensor]], None] | None = None
        #: Weight gradients that input halves of backward passes leave to weight halves.
        self.weight_gradients = WeightGradientQueue()
        self._slots: dict[str, GradientSlot] = {}
        self._names: dict[Hashable, str] = {}
        self._buckets: list[GradientBucket] = []
        self._bucket_of: dict[str, GradientBucket] = {}
        self._armed: set[int] = set()
        self._seen: dict[str, int] = {}
        self._expected: dict[str, int] = {}
        self._left: dict[str, int] | None = None
        self._finished: set[str] = set()
        self._unused = UnusedParameters(main)
        self._hooks: list[RemovableHandle] = []
        self._partial = PartialSums({}, main.mesh)
        #: Whole parameters whose gradients are summed over tp although their specs do not say so.
        self.used_on_parts: set[str] = set()

    def watch(self, buffers: Iterable[FlatBuffer]) -> None:
        """Install gradient slots and hooks on the parameters of these buffers.

        Communication: One gather of ranges over tp, if there are partial gradients. All ranks must
        call it.
        """
        for buffer in buffers:
            buckets = [
                GradientBucket.of(buffer, index) for index in range(len(buffer.plan.buckets))
            ]
            self._buckets += buckets
            self._bucket_of |= {name: bucket for bucket in buckets for name in bucket.names}
            mesh = self._main.mesh
            scale = mesh.copies(buffer.is_expert).size / mesh.data.size
            for name, parameter in buffer.members.items():
                owner = self._owner_of([name])
                slot = GradientSlot(
                    buffer.gradient_of(name),
                    owner.on_gradients,
                    owner.accepts,
                    self._join,
                    scale,
                    self.weight_gradients,
                )
                self._slots[name] = slot
                self._names[slot] = name
                set_slot(parameter, slot)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(moving_into(slot)))
        # Within a group the order is that of the buffers; every rank launches in this order.
        self._buckets.sort(key=lambda bucket: bucket.group)
        specs = {name: self._main.spec(name) for name in self._slots}
        self._partial = PartialSums(
            {name: spec for name, spec in specs.items() if spec.partial}, self._main.mesh
        )

    def begin_last_backward(self, chunk: int) -> None:
        """Mark the next backward pass of a chunk as the last one before the optimizer step."""
        self._armed.add(chunk)
        self._left = None
        for bucket in self._in_group(chunk):
            bucket.missing = set(bucket.names)
            self._seen.update(dict.fromkeys(bucket.names, 0))

    def begin_last_weight_half(self, chunk: int, left: Mapping[Hashable, int]) -> None:
        """Mark the next weight half of a chunk as the last one before the optimizer step.

        Args:
            chunk: Chunk whose other gradients are complete.
            left: Number of gradients that the weight half will add to each slot.

        Communication: that of :meth:`start_reduction` for buckets that are complete already.
        """
        self._armed.add(chunk)
        self._left = {self._names[slot]: number for slot, number in left.items()}
        for bucket in self._in_group(chunk):
            bucket.missing = self._left.keys() & set(bucket.names)
            self._seen |= dict.fromkeys(bucket.names, 0)
        self._start_group(chunk)

    def start_reduction(self, chunk: int) -> None:
        """Start reducing the gradients of a chunk, all of which are complete.

        Communication: one reduce-scatter or all-reduce over the data axis for each bucket.
        """
        if chunk in self._armed:
            self._armed.discard(chunk)
            for bucket in self._in_group(chunk) if self._left is None else ():
                self._expected |= {
                    n: max(self._seen[n], self._expected.get(n, 0)) for n in bucket.names
                }
        for bucket in self._in_group(chunk):
            self._start(bucket)

    def finish(self, names: Set[str]) -> None:
        """Finish the reductions and assign every main parameter its gradient.

        Args:
            names: Names of all parameters of one optimizer, or of several.

        Communication: over tp, the data axis and the embedding axis, equal in number and size on
        all ranks of each; one all-reduce of flags over the data axis on the CPU at the first call,
        and while there are unused parameters.
        """
        self._armed.clear()
        buckets = (
            [bucket for bucket in self._buckets if not names.isdisjoint(bucket.names)]
            if names
            else []
        )
        late = [name for bucket in buckets if bucket.group == LATE_GROUP for name in bucket.names]
        self._fill(late)
        self._partial.add(late, self._gradient_of)
        self._add_ties(buckets, alone=False)
        for bucket in buckets:
            self._start(bucket)
        for bucket in buckets:
            bucket.wait()
        self._add_ties(buckets, alone=True)
        finished = [name for bucket in buckets for name in bucket.names]
        self._add_parts(finished)
        dormant = self._unused.find_dormant(finished)
        self._hand_over(finished, dormant)
        self._reset(buckets)
        self._finished.update(finished)

    def clear(self, names: Set[str]) -> None:
        """Discard the gradients of these parameters, as ``zero_grad`` does."""
        for bucket in self._buckets:
            if not names.isdisjoint(bucket.names):
                if bucket.pending is not None:
                    bucket.pending.wait()
                self._reset([bucket])
        self._finished.difference_update(names)

    def unreduced(self, names: Collection[str]) -> dict[str, Shaped[Tensor, "..."]]:
        """Return this rank's accumulated gradients that are not reduced yet, by name."""
        return {
            name: slot.gradient
            for name, slot in self._slots.items()
            if name in names and not slot.is_empty
        }

    @property
    def has_unreduced(self) -> bool:
        """Return whether this rank has accumulated gradients that are not reduced yet."""
        return any(not slot.is_empty for slot in self._slots.values())

    def expose_unreduced(self) -> None:
        """Show this rank's accumulated gradients as ``parameter.grad``."""
        for name, slot in self._slots.items():
            if not slot.is_empty:
                self._main.exposed_gradients.expose(name, self._main.parameter(name), slot.gradient)

    def adopt_user_changes(self) -> None:
        """Adopt changes that user code made to gradients shown as ``parameter.grad``."""
        slices = self._main.slices
        for name in self._main.exposed_gradients.adopt_user_changes():
            self._slots[name].clear()
            self._finished.discard(name)
            if name in slices:
                slices[name].main.grad = None
        self._copy_apart()

    def resume(self, names: Collection[str]) -> None:
        """Let the next backward pass add to reduced gradients that were not cleared (one rank)."""
        for name in self._finished.intersection(names):
            self._slots[name].is_empty = False
        self._finished.difference_update(names)

    def take_finished(self, names: Collection[str]) -> dict[str, Shaped[Tensor, "..."]]:
        """Copy reduced gradients that were not cleared, by name, and free their buffers."""
        kept = self._finished.intersection(names)
        self._finished.difference_update(names)
        return {name: self._gradient_of(name).clone() for name in kept}

    def add_finished(self, sums: Mapping[str, Shaped[Tensor, "..."]]) -> None:
        """Add gradients of earlier backward passes to the reduced gradients."""
        for name, gradient in sums.items():
            self._gradient_of(name).add_(gradient)
        self._copy_apart()

    def release(self) -> None:
        """Remove slots and hooks, so that autograd writes to ``parameter.grad`` again."""
        self._main.exposed_gradients.withdraw()
        for hook in self._hooks:
            hook.remove()
        for name in self._slots:
            set_slot(self._main.parameter(name), None)
        self._hooks.clear()

    def _copy_apart(self) -> None:
        for one in self._main.slices.values():
            if one.main.grad is not None and one.main.dtype != one.gradient.dtype:
                one.main.grad.copy_(one.gradient)

    def _in_group(self, group: int) -> Iterator[GradientBucket]:
        return (bucket for bucket in self._buckets if bucket.group == group)

    def _gradient_of(self, name: str) -> Tensor:
        return self._slots[name].gradient

    def _join(self, slots: Sequence[GradientSlot]) -> Owner:
        return self._owner_of([self._names[slot] for slot in slots])

    def _owner_of(self, names: list[str]) -> Owner:
        return Owner(partial(self._main.are_trainable, names), partial(self._arrived, names))

    def _arrived(self, names: list[str]) -> None:
        """Record gradients that have arrived, and start the buckets that are complete now."""
        # This runs in the backward pass, once for each gradient of each microbatch.
        seen = self._seen
        touched = set(map(self._bucket_of.__getitem__, names))
        # A parameter that the model uses several times gets several gradients. Its bucket starts
        # after as many as the first steps have counted, so one more comes too late.
        if any(bucket.pending is not None for bucket in touched):
            name = next(name for name in names if self._bucket_of[name].pending is not None)
            raise RuntimeError(
                "a parameter's gradient must be complete when its sum over the ranks starts: "
                f"{name!r} received a second gradient afterwards, because the model uses it more "
                "often than in earlier steps. Use MegatronStrategy(overlap_gradients=False)."
            )
        for name in names:
            seen[name] = seen.get(name, 0) + 1
        # A slot that still has the sum of a finished step was not cleared by `zero_grad`.
        if self._finished:
            for name in names:
                self._unused.discard_without_zero_grad(name, self._finished)
        # Only the last backward pass of a step completes gradients; `_armed` has its chunks.
        if self._armed:
            self._start_complete_groups(names, touched)

    def _start_complete_groups(self, names: list[str], touched: Collection[GradientBucket]) -> None:
        """Remove complete gradients from their buckets' missing sets, and start complete groups."""
        seen = self._seen
        # A weight half knows what it will add; of a backward pass the steps before have shown it.
        expected = self._expected if self._left is None else self._left
        # In the first step nothing is expected yet: `start_reduction` starts its buckets.
        complete = [name for name in names if seen[name] == expected.get(name)]
        for bucket in touched:
            bucket.missing.difference_update(complete)
        for group in sorted(
            {bucket.group for bucket in touched if not bucket.missing} & self._armed
        ):
            self._start_group(group)

    def _start_group(self, group: int) -> None:
        """Start the complete buckets of a group, in order, up to the first incomplete one."""
        for bucket in self._in_group(group):
            if bucket.missing:
                return
            self._start(bucket)

    def _start(self, bucket: GradientBucket) -> None:
        if bucket.pending is not None:
            return
        self._fill(bucket.names)
        if self.before_reduction is not None:
            self.before_reduction({name: self._gradient_of(name) for name in bucket.names})
        bucket.start(self._main.mesh, self._main.exposed_gradients.is_on)

    def _fill(self, names: Iterable[str]) -> None:
        """Fill the gradients that have not arrived with zeros."""
        for name in names:
            slot = self._slots[name]
            if slot.is_empty:
                slot.gradient.zero_()
                slot.is_empty = False
                if self._main.is_trainable(name):
                    self._unused.note(name)

    def _add_ties(self, buckets: Collection[GradientBucket], *, alone: bool) -> None:
        """Add the gradients of tied embeddings and of their copies on another stage.

        A tied gradient in a bucket of its own has the same layout on both stages, so that each rank
        adds its part after the reduction over the data axis. Otherwise the whole gradients are
        added before that reduction.
        """
        mesh = self._main.mesh
        for name in (name for pair in self._main.ties or () for name in pair):
            bucket = self._bucket_of.get(name)
            if (
                bucket is None
                or bucket not in buckets
                or (name in self._main.planner.ties_alone) != alone
            ):
                continue
            self._fill([name])
            own = bucket.buffer.own_part(bucket.buffer.gradients, bucket.index)
            all_reduce_(own if alone else self._gradient_of(name), mesh.embedding)

    def _add_parts(self, names: Collection[str]) -> None:
        """Add, over tp, gradients that were found to be partial during training.

        This runs after the reduction over the data axis. Whole parameters have the same layout in
        the buffers of all tensor-parallel ranks, so each rank adds its slice.
        """
        slices = self._main.slices
        parts = [
            slices[name].gradient for name in names if name in self.used_on_parts and name in slices
        ]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for part in parts:
            by_dtype.setdefault(part.dtype, []).append(part)
        for alike in by_dtype.values():
            flat = all_reduce_(torch.cat([part.reshape(-1) for part in alike]), self._main.mesh.tp)
            sums = flat.split([part.numel() for part in alike])
            torch._foreach_copy_(
                alike, [one.view(part.shape) for one, part in zip(sums, alike, strict=True)]
            )

    def _hand_over(self, names: Collection[str], dormant: Collection[str]) -> None:
        main = self._main
        slices = main.slices
        has_frozen = not main.are_trainable(names)
        for name in names:
            one = slices.get(name)
            has_none = name in dormant or (has_frozen and not main.is_trainable(name))
            if main.exposed_gradients.is_on and not has_none:
                main.exposed_gradients.expose(name, main.parameter(name), self._gradient_of(name))
            if one is None:
                continue
            if has_none:
                one.main.grad = None
            elif one.gradient.dtype == one.main.dtype:
                one.main.grad = one.gradient
            else:
                # The gradients were accumulated in bfloat16, the main parameter is float32.
                one.main.grad = one.gradient.to(one.main.dtype)

    def _reset(self, buckets: Iterable[GradientBucket]) -> None:
        for bucket in buckets:
            bucket.pending = None
            bucket.missing = set()
            for name in bucket.names:
                self._slots[name].clear()
