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
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.pending import Pending, start_all_reduce
from lightning_megatron.layers.parameters.gradient_slot import (
    GradientSlot,
    Owner,
    preserve_states,
    set_slot,
)
from lightning_megatron.layers.parameters.weight_gradient_queue import WeightGradientQueue
from lightning_megatron.optimizer.flat_buffer import FlatBuffer
from lightning_megatron.optimizer.gradient_buckets import (
    BucketStarts,
    GradientBucket,
    PartialSums,
    RecordedGradients,
    RowSums,
    sum_slices_,
)
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.optimizer.sharding import LATE_GROUP
from lightning_megatron.shapes import Shaped

logger = logging.getLogger(__name__)

_NUM_SHOWN = 5


class GradientReducer:
    """Reduction of a step's gradients to the mean over the data-parallel ranks.

    Expert gradients are averaged over the ranks with the same experts. If these ranks are fewer
    than the data-parallel ranks, gradient slots scale the gradients by the ratio of the two
    numbers, inside the matrix product if possible.

    Gradients are accumulated over the microbatches in the flat buffers, by the layers' matrix
    products or after autograd has computed them. A bucket's reduce-scatter (all-reduce if main
    parameters are replicated) starts when its last gradient is complete, in the order of a backward
    pass, which is the same on all ranks. :class:`RowSums` may exchange an embedding by rows.
    Partial sums over tp are all-reduced over tp first. The gradients of a tied embedding and its
    copy on the last stage are added at the end. A missing gradient contributes zeros.
    """

    def __init__(self, main: MainParameters) -> None:
        self._main = main
        #: Callback that gets this rank's gradients by name before the reduction.
        self.before_reduction: Callable[[Mapping[str, Tensor]], None] | None = None
        #: Weight gradients that input halves of backward passes defer to weight halves.
        self.weight_gradients = WeightGradientQueue()
        self._slots: dict[str, GradientSlot] = {}
        self._names: dict[Hashable, str] = {}
        self._starts = BucketStarts(self._start, main.order)
        self._recorder: RecordedGradients | None = None
        self._finished: set[str] = set()
        self._unused = UnusedParameters(main)
        self._hooks: list[RemovableHandle] = []
        self._partial = PartialSums({}, main.mesh)
        self._row_sums = RowSums(main.mesh, main.config.exchanges_rows)
        #: Unsharded parameters whose gradients training has found to be partial sums over tp.
        self.used_on_parts: set[str] = set()

    def watch(self, buffers: Iterable[FlatBuffer]) -> None:
        """Install gradient slots and hooks on the parameters of some buffers.

        Communication: One gather of ranges over tp, if there are partial gradients. All ranks must
        call it.
        """
        for buffer in buffers:
            self._starts.add(
                GradientBucket.of(buffer, index) for index in range(len(buffer.plan.buckets))
            )
            mesh = self._main.mesh
            scale = mesh.replica_axis(buffer.sharding.is_expert).size / mesh.data.size
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
                self._hooks.append(parameter.register_post_accumulate_grad_hook(move_hook(slot)))
        specs = {name: self._main.spec(name) for name in self._slots}
        self._partial = PartialSums(
            {name: spec for name, spec in specs.items() if spec.partial}, self._main.mesh
        )

    def begin_last_backward(self, chunk: int) -> None:
        """Mark the next backward pass of a chunk as the last one before the optimizer step."""
        self._starts.begin_last(chunk)

    def begin_last_weight_half(self, chunk: int, left: Mapping[Hashable, int]) -> None:
        """Mark the next weight half of a chunk as the last one before the optimizer step.

        ``left`` is the number of gradients that it will add to each slot.

        Communication: that of :meth:`start_reduction` for buckets that are complete already.
        """
        self._starts.begin_last(chunk, {self._names[slot]: number for slot, number in left.items()})

    def start_reduction(self, chunk: int) -> None:
        """Start to reduce the gradients of a chunk, all of which are complete.

        Communication: one reduce-scatter or all-reduce over the data axis for each bucket.
        """
        self._starts.start_all(chunk)

    def finish(self, names: Set[str], is_empty: Callable[[], bool] = lambda: False) -> None:
        """Finish the reductions, and set the gradient of every main parameter.

        Args:
            is_empty: Function that returns whether no rank had a token to train on. A rank that
                misses a gradient asks. All gradients are zeros then, instead of None.

        Communication: over tp, the data axis and the embedding axis, equal in number and size on
        all ranks of each; that of :meth:`UnusedParameters.find`.
        """
        self._starts.end()
        buckets = [bucket for bucket in self._starts.buckets if not names.isdisjoint(bucket.names)]
        self._sum_up([bucket for bucket in buckets if not bucket.is_summed])
        finished = [name for bucket in buckets for name in bucket.names]
        # Whole parameters have the same layout in the buffers of all tensor-parallel ranks, so each
        # rank adds its slice of the gradients that training has found to be partial sums over tp.
        slices = self._main.slices
        parts = [name for name in finished if name in self.used_on_parts and name in slices]
        sum_slices_([slices[name].gradient for name in parts], self._main.mesh.tp)
        unused = self._unused.find(buckets, is_empty)
        self._assign(finished, unused)
        self._reset(buckets)
        self._finished.difference_update(unused)
        self._finished.update(name for name in finished if name not in unused)

    def clear(self, names: Set[str]) -> None:
        """Discard the gradients of these parameters."""
        for bucket in self._starts.buckets:
            if not names.isdisjoint(bucket.names):
                if bucket.pending is not None:
                    bucket.pending.wait()
                self._reset([bucket])
        self._finished.difference_update(names)

    def zero_grad(self, names: Set[str], set_to_none: bool) -> None:
        """Discard the gradients of these parameters; zeros take their place unless set to None."""
        with_gradient = self._finished | self.unreduced_gradients(names).keys()
        self._unused.note_zero_grad(names, set() if set_to_none else with_gradient & names)
        self.clear(names)

    def unreduced_gradients(self, names: Collection[str]) -> dict[str, Shaped[Tensor, "..."]]:
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
                # User code may write into other rows.
                slot.rows = None
                self._main.exposed_gradients.expose(name, self._main.parameter(name), slot.gradient)

    def adopt_user_changes(self) -> None:
        """Adopt changes that user code made to gradients shown as ``parameter.grad``."""
        slices = self._main.slices
        for name in self._main.exposed_gradients.adopt_user_changes():
            self._slots[name].clear()
            self._finished.discard(name)
            if name in slices:
                slices[name].main.grad = None
        for part in slices.values():
            if part.main.grad is not None and part.shown_dtype != part.gradient.dtype:
                part.main.grad.copy_(part.gradient)

    def resume(self, names: Collection[str]) -> None:
        """Let the next backward pass add to reduced gradients; only for a single rank."""
        for name in self._finished.intersection(names):
            self._slots[name].note_filled()
        self._finished.difference_update(names)

    def take_finished(self, names: Collection[str]) -> dict[str, Shaped[Tensor, "..."]]:
        """Return copies of reduced gradients, so that later gradients may use their buffers."""
        kept = self._finished.intersection(names)
        self._finished.difference_update(names)
        return {name: self._gradient_of(name).clone() for name in kept}

    def add_finished(self, sums: Mapping[str, Shaped[Tensor, "..."]]) -> None:
        """Add gradients of earlier backward passes to the reduced gradients."""
        for name, gradient in sums.items():
            self._gradient_of(name).add_(gradient)
        # The last backward pass may have used none of these parameters.
        self._assign(sums, ())
        self._finished.update(sums)

    def release(self) -> None:
        """Remove slots and hooks, so that autograd writes to ``parameter.grad`` again."""
        self._main.exposed_gradients.withdraw()
        for hook in self._hooks:
            hook.remove()
        for name in self._slots:
            set_slot(self._main.parameter(name), None)
        self._hooks.clear()

    def _gradient_of(self, name: str) -> Tensor:
        return self._slots[name].gradient

    def _join(self, slots: Sequence[GradientSlot]) -> Owner:
        return self._owner_of([self._names[slot] for slot in slots])

    def _owner_of(self, names: list[str]) -> Owner:
        return Owner(partial(self._main.are_trainable, names), partial(self._notice, names))

    @contextmanager
    def recording(
        self, state: Literal["empty", "filled"] | None = None, holds_sums: bool = False
    ) -> Iterator[RecordedGradients]:
        """Record the gradients that arrive inside the block, instead of processing them.

        A CUDA graph is captured once and replayed often, and its replays run no Python. The code
        that replays it marks the recorded slots as filled and passes each recorded group to
        :meth:`mark_arrived`. The states of the slots are restored when the block ends, because a
        capture computes no gradients.

        Args:
            state: State of all slots at the start of the block; None leaves their states unchanged.
                A backward pass overwrites empty slots and adds to filled ones.
            holds_sums: Whether reductions may start inside the block. The block must then end with
                :meth:`sum_up`, and :meth:`mark_summed` repeats its effect after each replay.
        """
        if self._recorder is not None:
            raise RuntimeError(
                "recordings of gradients must not be nested: a gradient would belong to two "
                "captured passes. End the first recording before the next one starts."
            )
        with preserve_states(self._slots.values()), self._starts.preserve_counts():
            for slot in self._slots.values():
                slot.is_empty = slot.is_empty if state is None else state == "empty"
                slot.rows = ()
            recorder = self._recorder = RecordedGradients(self._slots, holds_sums)
            try:
                yield recorder
            finally:
                self._recorder = None
                for bucket in recorder.sums:
                    bucket.pending = None
                    bucket.is_summed = False

    def _notice(self, names: list[str]) -> None:
        if self._recorder is None:
            self.mark_arrived(names)
        else:
            self._recorder.note(names)
            if self._recorder.holds_sums:
                self._starts.mark_arrived(names)

    @property
    def sums_over_ranks(self) -> bool:
        """Return whether gradients are summed over several ranks; the same on all ranks."""
        mesh = self._main.mesh
        return mesh.data.size > 1 or mesh.tp.size > 1 or bool(self._main.ties)

    def sum_up(self) -> None:
        """Sum all gradients over the ranks now, instead of in :meth:`finish`.

        Only the sums over tp of :attr:`used_on_parts` remain for :meth:`finish`, because later
        steps may add parameters to this set.

        Communication: that of :meth:`finish` on the device's groups.
        """
        self._starts.end()
        self._sum_up(self._starts.buckets)

    def mark_summed(self, recorded: RecordedGradients) -> None:
        """Record that a replay has summed the gradients of some buckets over the ranks."""
        for name, slot in recorded.unused.items():
            slot.is_empty = False
            self._note_unused(name)
        for bucket in recorded.sums:
            bucket.pending = Pending()
            bucket.is_summed = True

    def mark_arrived(self, names: Sequence[str]) -> None:
        """Process gradients that have arrived together, and start the buckets that are complete.

        Layers call this through their gradient slots. Code that replays a CUDA graph calls it for
        each recorded group.

        Communication: one reduce-scatter or all-reduce over the data axis for each complete bucket.
        """
        # `zero_grad` has not cleared a slot with the reduced gradient of a finished step.
        if self._finished:
            for name in names:
                self._unused.discard_without_zero_grad(name, self._finished)
        self._starts.mark_arrived(names)

    def _sum_up(self, buckets: Collection[GradientBucket]) -> None:
        late = [name for bucket in buckets if bucket.group == LATE_GROUP for name in bucket.names]
        self._fill(late)
        self._partial.add(late, self._gradient_of)
        self._add_ties(buckets, own_bucket=False)
        for bucket in buckets:
            self._start(bucket)
        for bucket in buckets:
            bucket.wait()
        self._add_ties(buckets, own_bucket=True)
        for bucket in buckets:
            bucket.is_summed = True

    def _start(self, bucket: GradientBucket) -> None:
        if bucket.pending is not None:
            return
        if self._recorder is not None and not self._recorder.holds_sums:
            raise RuntimeError(
                "no gradient sum over the ranks may start while gradients are recorded: the sum of "
                f"{bucket.names[0]!r} would be part of the captured pass. End the recording first."
            )
        turns = self._main.mesh.turns
        if turns is not None:
            turns.join()
        self._fill(bucket.names)
        if self.before_reduction is not None:
            self.before_reduction({name: self._gradient_of(name) for name in bucket.names})
        if not self._row_sums.start(bucket, self._slots):
            bucket.start(self._main.mesh, self._main.exposed_gradients.is_on)
        if self._recorder is not None:
            self._recorder.sums.append(bucket)

    def _fill(self, names: Iterable[str]) -> None:
        for name in names:
            slot = self._slots[name]
            if slot.is_empty:
                slot.gradient.zero_()
                slot.is_empty = False
                if self._recorder is not None:
                    self._recorder.unused[name] = slot
                else:
                    self._note_unused(name)

    def _note_unused(self, name: str) -> None:
        if self._main.is_trainable(name):
            self._unused.note(name)

    def _add_ties(self, buckets: Collection[GradientBucket], *, own_bucket: bool) -> None:
        """Add the gradients of tied embeddings and of their copies on another stage, in place.

        A tied gradient that is alone in its bucket has the same layout on both stages, so each rank
        adds its part after the reduction over the data axis (``own_bucket``). Otherwise the whole
        gradients are added before that reduction.

        Communication: one all-reduce over the embedding axis for each tied embedding.
        """
        for name in (name for pair in self._main.ties or () for name in pair):
            bucket = self._starts.bucket_of.get(name)
            is_alone = name in self._main.planner.ties_alone
            if bucket is not None and bucket in buckets and is_alone == own_bucket:
                self._fill([name])
                gradient = bucket.own_part if own_bucket else self._gradient_of(name)
                all_reduce_(gradient, self._main.mesh.embedding)

    def _assign(self, names: Collection[str], unused: Collection[str]) -> None:
        """Set the gradient of every main parameter to this rank's part of the reduced gradient.

        The gradients of main parameters of unused or frozen parameters become None.
        """
        main = self._main
        exposed = main.exposed_gradients
        has_frozen = not main.are_trainable(names)
        for name in names:
            has_none = name in unused or (has_frozen and not main.is_trainable(name))
            if exposed.is_on and not has_none:
                exposed.expose(name, main.parameter(name), self._gradient_of(name))
            main_slice = main.slices.get(name)
            if main_slice is not None:
                # `to` casts sums in bfloat16 for optimizers that take no others than float32.
                gradient = None if has_none else main_slice.gradient.to(main_slice.shown_dtype)
                main_slice.main.grad = gradient

    def _reset(self, buckets: Iterable[GradientBucket]) -> None:
        for bucket in buckets:
            bucket.pending = None
            bucket.is_summed = False
            bucket.missing = set()
            for name in bucket.names:
                self._slots[name].clear()


class UnusedParameters:
    """Tracking of the parameters that no rank uses in a step, so that optimizers skip them.

    Optimizers in a single process skip them, too. A parameter that another data-parallel rank uses
    contributes zeros on this rank. Each such parameter is logged once.
    """

    def __init__(self, main: MainParameters) -> None:
        self._main = main
        self._without_gradient: set[str] = set()
        self._with_zeros: set[str] = set()
        self._in_flight: list[Pending] = []
        self._logged: set[str] = set()
        self._has_warned_of_zero_grad = False

    def note(self, name: str) -> None:
        """Record that this rank has no gradient for a parameter in this step."""
        self._without_gradient.add(name)

    def note_zero_grad(self, names: Collection[str], with_zeros: Collection[str]) -> None:
        """Record a call of ``zero_grad``; optimizers do not skip parameters with zeros."""
        self._with_zeros.difference_update(names)
        self._with_zeros.update(with_zeros)

    def find(self, buckets: Iterable[GradientBucket], is_empty: Callable[[], bool]) -> set[str]:
        """Return the parameters that no rank uses in this step, the same on all ranks.

        Args:
            is_empty: Function that returns whether no rank had a token, so that backward passes
                of the loss were left out.

        Communication: one all-reduce of flags over the data axis on the CPU, and one over the ranks
        with the same experts, if there are any; one over the embedding axis for tied embeddings.
        Only ranks that do not use all of their parameters wait for the results.
        """
        for pending in self._in_flight:
            pending.wait()
        self._in_flight.clear()
        names: dict[bool, list[str]] = {False: [], True: []}
        for bucket in buckets:
            names[bucket.buffer.sharding.is_expert] += bucket.names
        missing = self._without_gradient.intersection(names[False] + names[True])
        self._without_gradient -= missing
        unused = missing - self._with_zeros
        if unused and is_empty():
            unused = set()
        mesh = self._main.mesh
        unused = self._agree(names[False], unused, mesh.data_cpu)
        unused = self._agree(names[True], unused, mesh.edp_cpu)
        # Each stage has one parameter of a pair. The order of the pairs is that of both stages.
        ties = [name for pair in self._main.ties or () for name in pair if name in names[False]]
        unused = self._agree(ties, unused, mesh.embedding_cpu)
        self._log(unused, "have no gradient on any rank, so that the optimizer skips them")
        self._log(missing - unused, "have no gradient on this rank, which uses zeros instead")
        return unused

    def _agree(self, names: Sequence[str], unused: set[str], axis: MeshAxis) -> set[str]:
        """Remove from ``unused`` those of the names that another rank of the axis uses."""
        if not names or axis.size == 1:
            return unused
        flags = torch.tensor([name in unused for name in names], dtype=torch.uint8)
        pending = start_all_reduce(flags, axis, "min")
        if unused.isdisjoint(names):
            # The result is known already: a rank without unused parameters only informs others.
            self._in_flight.append(pending)
            return unused
        pending.wait()
        used = {name for name, flag in zip(names, flags.tolist(), strict=True) if not flag}
        return unused - used

    def discard_without_zero_grad(self, name: str, finished: set[str]) -> None:
        """Warn once that gradients of an earlier step are discarded without ``zero_grad``."""
        if name in finished:
            finished.discard(name)
            if not self._has_warned_of_zero_grad:
                self._has_warned_of_zero_grad = True
                logger.warning(
                    "Gradients are not accumulated over optimizer steps: the gradient of %s was "
                    "set to zero after a step, although zero_grad() was not called.",
                    name,
                )

    def _log(self, names: set[str], what: str) -> None:
        new = sorted(names - self._logged)
        if new:
            self._logged.update(new)
            shown = ", ".join(new[:_NUM_SHOWN]) + (", ..." if len(new) > _NUM_SHOWN else "")
            logger.warning("%d parameter(s) %s: %s.", len(new), what, shown)


def move_hook(slot: GradientSlot) -> Callable[[nn.Parameter], None]:
    """Return the hook that moves a parameter's gradient from autograd into a slot."""

    def hook(parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise UnsupportedError(
                f"gradients must be dense: one of shape {tuple(parameter.shape)} is "
                f"{gradient.layout}. Flat buffers hold dense tensors only. Use sparse=False in the "
                "embedding."
            )
        slot.add(gradient)

    return hook
