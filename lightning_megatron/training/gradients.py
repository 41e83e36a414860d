"""Gradient sums over the ranks: bucket by bucket, beginning inside the last backward pass of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import Pending, start_all_reduce, start_reduce_scatter
from lightning_megatron.layers.gradient_slot import GradientSlot, Owner, set_slot
from lightning_megatron.training.flat_buffer import FlatBuffer
from lightning_megatron.training.main_parameters import LATE, MainParameters
from lightning_megatron.training.partial_sums import PartialSums
from lightning_megatron.training.unused import UnusedParameters

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Bucket:
    """Follow one bucket through a step.

    Args:
        buffer: Where it lies.
        index: Its number there.
        names: The parameters whose gradients it holds.
        missing: Parameters whose gradients are not complete yet, while the last backward pass runs.
        pending: Its sum over the data-parallel ranks, once it has started.
    """

    buffer: FlatBuffer
    index: int
    names: tuple[str, ...]
    missing: set[str]
    pending: Pending | None = None

    @classmethod
    def of(cls, buffer: FlatBuffer, index: int) -> _Bucket:
        """Return a bucket of a buffer."""
        return cls(buffer, index, tuple(placed.name for placed in buffer.plan.buckets[index].placed), set())

    @property
    def group(self) -> int:
        """Return the group whose gradients are complete together."""
        return self.buffer.plan.buckets[self.index].group

    def start(self, mesh: ParallelMesh, is_whole: bool) -> None:
        """Start the mean over the ranks that hold the same parameters, of every rank's part or of the whole bucket."""
        axis = mesh.copies(self.buffer.is_expert)
        buffer, place = self.buffer, self.buffer.plan.buckets[self.index]
        whole = buffer.gradients[place.start : place.stop]
        if is_whole or buffer.plan.num_parts == 1:
            self.pending = start_all_reduce(whole, axis, "mean")
        else:
            self.pending = start_reduce_scatter(self.own, whole, axis, "mean")

    def wait(self) -> None:
        """Wait for it."""
        if self.pending is not None:
            self.pending.wait()

    @property
    def own(self) -> Tensor:
        """Return this rank's part."""
        return self.buffer.own_part(self.buffer.gradients, self.index)


class GradientReducer:
    """Sum the gradients of a step over the ranks: every slice ends with its part of the mean over the data ranks.

    Those of experts are averaged over the ranks that hold the same experts. Fewer ranks hold copies than there are
    losses where experts on one rank have the tokens of several data ranks: their slots multiply by what is missing to
    the mean over the losses, inside of the product that makes a gradient where a kernel can.

    Gradients are summed over the microbatches in the flat buffers, by the layers' own matrix products or after
    autograd has made them. A bucket's reduce-scatter (all-reduce without divided mains) starts when its last gradient
    is there, in the order of the buckets, which is the same on all ranks. Copies over the tensor axis whose gradients
    are partial sums are added first; the first stage's embedding and its copy on the last stage are added at the end.
    A parameter without a gradient takes part with zeros.

    Args:
        main: The parameters of this rank, which optimizers are attached to.

    Raises:
        UnsupportedError: If several pipeline stages hold the same parameter, other than a tied embedding.
    """

    def __init__(self, main: MainParameters) -> None:
        self._main = main
        #: Called with this rank's own gradients by name before they are summed over the ranks.
        self.look: Callable[[Mapping[str, Tensor]], None] | None = None
        self._slots: dict[str, GradientSlot] = {}
        self._names: dict[GradientSlot, str] = {}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[str, _Bucket] = {}
        self._armed: set[int] = set()
        self._seen: dict[str, int] = {}
        self._expected: dict[str, int] = {}
        self._finished: set[str] = set()
        self._unused = UnusedParameters(main)
        self._hooks: list[RemovableHandle] = []
        self._partial = PartialSums({}, main.mesh)
        #: Whole parameters whose gradients are summed over tp although their specs do not say so.
        self.used_on_parts: set[str] = set()

    def watch(self, buffers: Iterable[FlatBuffer]) -> None:
        """Let the gradients of these buffers' parameters be summed here from now on.

        Communication: one gather of ranges over tp, if there are partial gradients. All ranks must call it.
        """
        for buffer in buffers:
            buckets = [_Bucket.of(buffer, index) for index in range(len(buffer.plan.buckets))]
            self._buckets += buckets
            self._bucket_of |= {name: bucket for bucket in buckets for name in bucket.names}
            mesh = self._main.mesh
            scale = mesh.copies(buffer.is_expert).size / mesh.data.size
            for name, parameter in buffer.members.items():
                owner = self._owner_of([name])
                slot = GradientSlot(buffer.gradient_of(name), owner.on_gradients, owner.accepts, self._join, scale)
                self._slots[name] = slot
                self._names[slot] = name
                set_slot(parameter, slot)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(_moving_into(slot)))
        # Within a group the order is that of the buffers; every rank launches in this order.
        self._buckets.sort(key=lambda bucket: bucket.group)
        specs = {name: self._main.spec(name) for name in self._slots}
        self._partial = PartialSums({name: spec for name, spec in specs.items() if spec.partial}, self._main.mesh)

    def begin_last_backward(self, chunk: int) -> None:
        """Note that the next backward pass of a chunk is the last one before the optimizer steps."""
        self._armed.add(chunk)
        for bucket in self._in_group(chunk):
            bucket.missing = set(bucket.names)
            self._seen.update(dict.fromkeys(bucket.names, 0))

    def start_reduction(self, chunk: int) -> None:
        """Start the sums of all gradients of a chunk, which are complete.

        Communication: one reduce-scatter or all-reduce over the data axis for each bucket.
        """
        if chunk in self._armed:
            self._armed.discard(chunk)
            for bucket in self._in_group(chunk):
                self._expected |= {n: max(self._seen[n], self._expected.get(n, 0)) for n in bucket.names}
        for bucket in self._in_group(chunk):
            self._start(bucket)

    def finish(self, names: Set[str]) -> None:
        """Finish the sums, and give every main its gradient.

        Args:
            names: All parameters of one optimizer, or of several.

        Communication: over tp, the data axis and the embedding axis, equal in number and size on all ranks of each;
        one all-reduce of flags over the data axis on the CPU at the first call, and while there are unused parameters.
        """
        self._armed.clear()
        buckets = [bucket for bucket in self._buckets if not names.isdisjoint(bucket.names)] if names else []
        late = [name for bucket in buckets if bucket.group == LATE for name in bucket.names]
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
        dormant = self._unused.agree(finished)
        self._hand_over(finished, dormant)
        self._reset(buckets)
        self._finished.update(finished)

    def clear(self, names: Set[str]) -> None:
        """Forget the gradients of these parameters, as ``zero_grad`` does."""
        for bucket in self._buckets:
            if not names.isdisjoint(bucket.names):
                if bucket.pending is not None:
                    bucket.pending.wait()
                self._reset([bucket])
        self._finished.difference_update(names)

    def unreduced(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return this rank's own sums over the microbatches, as far as there are any that are not finished."""
        return {name: slot.gradient for name, slot in self._slots.items() if name in names and not slot.is_empty}

    @property
    def has_unreduced(self) -> bool:
        """Tell whether this rank has any sum that is not finished."""
        return any(not slot.is_empty for slot in self._slots.values())

    def lend_unreduced(self) -> None:
        """Let parameters show this rank's own sums over the backward passes so far."""
        for name, slot in self._slots.items():
            if not slot.is_empty:
                self._main.lent.lend(name, self._main.parameter(name), slot.gradient)

    def take_over(self) -> None:
        """Go on with what user code has made of the gradients that parameters show."""
        slices = self._main.slices
        for name in self._main.lent.take_over():
            self._slots[name].clear()
            self._finished.discard(name)
            if name in slices:
                slices[name].main.grad = None
        self._copy_apart()

    def resume(self, names: Collection[str]) -> None:
        """Let the next backward pass add to finished sums that nobody has forgotten, where there is one rank."""
        for name in self._finished.intersection(names):
            self._slots[name].is_empty = False
        self._finished.difference_update(names)

    def take_finished(self, names: Collection[str]) -> dict[str, Tensor]:
        """Copy finished sums that nobody has forgotten, by name; the buffers are free for others."""
        kept = self._finished.intersection(names)
        self._finished.difference_update(names)
        return {name: self._gradient_of(name).clone() for name in kept}

    def add_finished(self, sums: Mapping[str, Tensor]) -> None:
        """Add sums of earlier backward passes to finished ones."""
        for name, gradient in sums.items():
            self._gradient_of(name).add_(gradient)
        self._copy_apart()

    def release(self) -> None:
        """Leave gradients with the module's own parameters again."""
        self._main.lent.take_back()
        for hook in self._hooks:
            hook.remove()
        for name in self._slots:
            set_slot(self._main.parameter(name), None)
        self._hooks.clear()

    def _copy_apart(self) -> None:
        for one in self._main.slices.values():
            if one.main.grad is not None and one.main.dtype != one.gradient.dtype:
                one.main.grad.copy_(one.gradient)

    def _in_group(self, group: int) -> Iterator[_Bucket]:
        return (bucket for bucket in self._buckets if bucket.group == group)

    def _gradient_of(self, name: str) -> Tensor:
        return self._slots[name].gradient

    def _join(self, slots: Sequence[GradientSlot]) -> Owner:
        return self._owner_of([self._names[slot] for slot in slots])

    def _owner_of(self, names: list[str]) -> Owner:
        return Owner(partial(self._main.are_trainable, names), partial(self._arrived, names))

    def _arrived(self, names: list[str]) -> None:
        """Take note of gradients, and start what is complete now."""
        seen, touched = self._seen, set(map(self._bucket_of.__getitem__, names))
        if any(bucket.pending is not None for bucket in touched):
            name = next(name for name in names if self._bucket_of[name].pending is not None)
            raise RuntimeError(
                f"a parameter's gradient must be complete when its sum over the ranks starts: {name!r} got another "
                "one afterwards, because the model uses it more often now than in the steps before. Its gradient "
                "would miss a part. Use MegatronStrategy(overlap_gradients=False)."
            )
        for name in names:
            seen[name] = seen.get(name, 0) + 1
        if self._finished:
            for name in names:
                self._unused.forgive_missing_zero_grad(name, self._finished)
        if self._armed:
            self._take_off(names, touched)

    def _take_off(self, names: list[str], touched: Collection[_Bucket]) -> None:
        """Take gradients that are complete off what their buckets wait for, and start the groups that are complete."""
        seen, expected = self._seen, self._expected
        complete = [name for name in names if seen[name] == expected.get(name)]
        for bucket in touched:
            bucket.missing.difference_update(complete)
        for group in sorted({bucket.group for bucket in touched if not bucket.missing} & self._armed):
            self._start_complete(group)

    def _start_complete(self, group: int) -> None:
        """Start the buckets of a group that are complete, as long as none before them is still waited for."""
        for bucket in self._in_group(group):
            if bucket.missing:
                return
            self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        if bucket.pending is not None:
            return
        self._fill(bucket.names)
        if self.look is not None:
            self.look({name: self._gradient_of(name) for name in bucket.names})
        bucket.start(self._main.mesh, self._main.lent.is_on)

    def _fill(self, names: Iterable[str]) -> None:
        """Put zeros where no gradient has arrived."""
        for name in names:
            slot = self._slots[name]
            if slot.is_empty:
                slot.gradient.zero_()
                slot.is_empty = False
                if self._main.is_trainable(name):
                    self._unused.note(name)

    def _add_ties(self, buckets: Collection[_Bucket], *, alone: bool) -> None:
        """Add the gradients of the tied embeddings' copies.

        In a bucket of its own a tied gradient lies alike on both stages, so that each rank adds its part when the sum
        over the data ranks is done; otherwise the whole gradients are added before.
        """
        mesh = self._main.mesh
        for name in (name for pair in self._main.ties or () for name in pair):
            bucket = self._bucket_of.get(name)
            if bucket is None or bucket not in buckets or (name in self._main.ties_alone) != alone:
                continue
            self._fill([name])
            own = bucket.buffer.own_part(bucket.buffer.gradients, bucket.index)
            all_reduce_(own if alone else self._gradient_of(name), mesh.embedding)

    def _add_parts(self, names: Collection[str]) -> None:
        """Add the parts of gradients that were found while training, after the sum over the data ranks.

        Whole parameters lie alike in the buffers of all tensor-parallel ranks, so each adds its slice.
        """
        slices = self._main.slices
        parts = [slices[name].gradient for name in names if name in self.used_on_parts and name in slices]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for part in parts:
            by_dtype.setdefault(part.dtype, []).append(part)
        for alike in by_dtype.values():
            flat = all_reduce_(torch.cat([part.reshape(-1) for part in alike]), self._main.mesh.tp)
            sums = flat.split([part.numel() for part in alike])
            torch._foreach_copy_(alike, [one.view(part.shape) for one, part in zip(sums, alike, strict=True)])

    def _hand_over(self, names: Collection[str], dormant: Collection[str]) -> None:
        slices, main = self._main.slices, self._main
        has_frozen = not main.are_trainable(names)
        for name in names:
            one = slices.get(name)
            has_none = name in dormant or (has_frozen and not main.is_trainable(name))
            if main.lent.is_on and not has_none:
                main.lent.lend(name, main.parameter(name), self._gradient_of(name))
            if one is None:
                continue
            if has_none:
                one.main.grad = None
            elif one.gradient.dtype == one.main.dtype:
                one.main.grad = one.gradient
            else:
                # bfloat16 sums for float32 mains.
                one.main.grad = one.gradient.to(one.main.dtype)

    def _reset(self, buckets: Iterable[_Bucket]) -> None:
        for bucket in buckets:
            bucket.pending = None
            bucket.missing = set()
            for name in bucket.names:
                self._slots[name].clear()


def _moving_into(slot: GradientSlot) -> object:
    """Return the hook that moves what autograd has made into a slot."""

    def hook(parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise UnsupportedError(
                f"gradients must be dense: one of shape {tuple(parameter.shape)} is {gradient.layout}. Flat buffers "
                "cannot hold it. Use sparse=False in the embedding."
            )
        slot.add(gradient)

    return hook
