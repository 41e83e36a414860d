"""Gradient sums over the ranks after the last backward of a step: bucketed all-reduces in one fixed order."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import ReduceOp, all_gather_objects, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.training.main_parameters import MainParameters
from lightning_megatron.training.shared_gradients import overlapping_pieces, resolve_ties

logger = logging.getLogger(__name__)

#: Size of a bucket: 25 million float32 elements, enough to reach the links' full rate (bytes).
BUCKET_BYTES = 100_000_000


@dataclass(frozen=True)
class _Segment:
    """Place a piece of a gradient in a bucket.

    Args:
        name: The parameter.
        shape: Shape of the piece (elements).
        dim: The dimension that the piece is cut from; None for a whole gradient.
        local_start: First row of the piece in this rank's gradient; None if this rank does not hold the piece.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    local_start: int | None = 0

    def of(self, gradient: Tensor) -> Tensor | None:
        """Return the view of the gradient that this piece covers."""
        if self.local_start is None:
            return None
        return gradient if self.dim is None else gradient.narrow(self.dim, self.local_start, self.shape[self.dim])


@dataclass(frozen=True)
class _Plan:
    """List the buckets of each sum, for one set of trainable parameters."""

    names: tuple[str, ...]
    tensor: list[list[_Segment]]
    tied: list[list[_Segment]]
    data: list[list[_Segment]]


class GradientSync:
    """Finish the main gradients of a step: every rank ends with the gradient of the mean loss over the data ranks.

    In order: copies over the tensor axis whose gradients are partial sums are added; the first stage's embedding and
    its copy on the last stage are added; all gradients are averaged over dp x cp.

    Args:
        main: The parameters of this rank.
        mesh: The groups of this rank.
        bucket_bytes: Gradients are flattened into messages of about this size (bytes).

    Raises:
        UnsupportedError: If several pipeline stages hold the same parameter, other than a tied embedding.

    Communication: gathers names over pp and, where gradients are partial, ranges over tp. All ranks must construct it.
    """

    def __init__(self, main: MainParameters, mesh: ParallelMesh, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._main, self._mesh, self._bucket_bytes = main, mesh, bucket_bytes
        stages = all_gather_objects([(name, main.spec(name).tied_to) for name in main.names], mesh.pp_cpu)
        self._ties = resolve_ties(stages)
        self._pieces = self._gather_pieces()
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self._plan = self._build_plan(())
        self._has_warned = False

    def finish(self, names: Collection[str] | None = None) -> None:
        """Sum the main gradients over the ranks, in place.

        A parameter without a gradient takes part with zeros if any rank that shares it has one; if none has, it stays
        without, and the optimizer leaves it alone as it would on one process.

        Args:
            names: Only these parameters of this rank; None means all.

        Communication: all-reduces over tp, embedding and data axes, equal in number and size on all ranks of an axis.
        """
        if not (self._pieces or self._ties or self._mesh.data.size > 1):
            return
        trainable = {name: main for name, main in self._main.trainable() if names is None or name in names}
        self._plan = self._plan_for(tuple(trainable))
        missing = [name for name, main in trainable.items() if main.grad is None]
        present = self._agree_on_present(missing)
        for name in missing:
            trainable[name].grad = torch.zeros_like(trainable[name])
        for buckets, axis, op in self._sums():
            for bucket in buckets:
                self._reduce(bucket, axis, op)
        if missing:
            self._forget_unused(missing, present)

    def check_ties(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer trains the first stage's embedding and its copy on the last stage alike.

        Args:
            optimizer: One over these parameters, before or after ``main.attach``.

        Raises:
            UnsupportedError: On every stage, if their groups differ.

        Communication: one gather over pp where there are ties.
        """
        if not self._ties:
            return
        place: dict[str, str] = {}
        groups = zip(optimizer.param_groups, self._main.names_of(optimizer), strict=True)
        for number, (group, names) in enumerate(groups):
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            place |= dict.fromkeys(names, f"group {number} with {settings}")
        stages = all_gather_objects(place, self._mesh.pp_cpu)
        everyone = {name: where for stage in stages for name, where in stage.items()}
        for original, copy in self._ties:
            first, last = everyone.get(original, "no group"), everyone.get(copy, "no group")
            if first != last:
                raise UnsupportedError(
                    f"a tied embedding must be trained alike on the first and the last stage: {original!r} is in "
                    f"{first}, its copy {copy!r} in {last}. The two would drift apart. Put both in the same group in "
                    "configure_optimizers."
                )

    def _sums(self) -> list[tuple[list[list[_Segment]], MeshAxis, ReduceOp]]:
        plan, mesh = self._plan, self._mesh
        return [(plan.tensor, mesh.tp, "sum"), (plan.tied, mesh.embedding, "sum"), (plan.data, mesh.data, "mean")]

    def _gather_pieces(self) -> dict[str, list[tuple[int, int]]]:
        """Find which rows of each partial parameter several tensor-parallel ranks hold."""
        tp = self._mesh.tp
        ranges = {
            name: [(piece.start, piece.stop) for piece in self._main.spec(name).ranges]
            for name in self._main.names
            if self._main.spec(name).partial
        }
        if tp.size == 1 or not ranges:
            return {}
        everyone = all_gather_objects(ranges, tp)
        pieces = {name: overlapping_pieces([one[name] for one in everyone]) for name in ranges}
        return {name: found for name, found in pieces.items() if found}

    def _plan_for(self, names: tuple[str, ...]) -> _Plan:
        if names not in self._plans:
            self._plans[names] = self._build_plan(names)
        return self._plans[names]

    def _build_plan(self, names: tuple[str, ...]) -> _Plan:
        # Gradients of the last layers are ready first.
        order = list(reversed(names))
        tensor = [segment for name in order for segment in self._partial_segments(name)]
        # Ties are listed in the same order on both stages, whatever else these hold.
        own = [name for tie in self._ties for name in tie if name in names]
        shape = {name: tuple(self._main.main(name).shape) for name in names}
        return _Plan(
            names,
            self._fill_buckets(tensor),
            self._fill_buckets(_Segment(name, shape[name]) for name in own),
            self._fill_buckets(_Segment(name, shape[name]) for name in order) if self._mesh.data.size > 1 else [],
        )

    def _partial_segments(self, name: str) -> list[_Segment]:
        spec, local_shape = self._main.spec(name), tuple(self._main.main(name).shape)
        segments = []
        for start, stop in self._pieces.get(name, ()):
            local_start, before = None, 0
            for held in spec.ranges:
                if held.start <= start and stop <= held.stop:
                    local_start = before + start - held.start
                before += held.size
            if not local_shape:
                segments.append(_Segment(name, ()))
                continue
            shape = (*local_shape[: spec.dim], stop - start, *local_shape[spec.dim + 1 :])
            segments.append(_Segment(name, shape, spec.dim, local_start))
        return segments

    def _fill_buckets(self, segments: Iterable[_Segment]) -> list[list[_Segment]]:
        """Pack segments of one dtype, in order, into buckets that close once they are full."""
        done: list[list[_Segment]] = []
        filling: dict[torch.dtype, list[_Segment]] = {}
        for segment in segments:
            dtype = self._main.main(segment.name).dtype
            bucket = filling.setdefault(dtype, [])
            bucket.append(segment)
            if sum(prod(one.shape) for one in bucket) * dtype.itemsize >= self._bucket_bytes:
                done.append(filling.pop(dtype))
        return done + list(filling.values())

    def _reduce(self, bucket: Sequence[_Segment], axis: MeshAxis, op: ReduceOp) -> None:
        gradients = [self._gradient(segment.name) for segment in bucket]
        local = [segment.of(gradient) for segment, gradient in zip(bucket, gradients, strict=True)]
        if len(bucket) == 1 and local[0] is not None and local[0].is_contiguous():
            all_reduce_(local[0], axis, op)
            return
        size = sum(prod(segment.shape) for segment in bucket)
        is_held_whole = all(view is not None for view in local)
        flat = gradients[0].new_empty(size) if is_held_whole else gradients[0].new_zeros(size)
        slots = flat.split([prod(segment.shape) for segment in bucket])
        pairs = [
            (slot.view(segment.shape), view)
            for slot, segment, view in zip(slots, bucket, local, strict=True)
            if view is not None
        ]
        inside, outside = [slot for slot, _ in pairs], [view for _, view in pairs]
        if pairs:
            torch._foreach_copy_(inside, outside)
        all_reduce_(flat, axis, op)
        if pairs:
            torch._foreach_copy_(outside, inside)

    def _gradient(self, name: str) -> Tensor:
        gradient = self._main.main(name).grad
        assert gradient is not None, f"{name} has no gradient although it takes part in a sum"
        if gradient.layout != torch.strided:
            raise UnsupportedError(
                f"gradients must be dense: that of {name!r} is {gradient.layout}. Buckets hold dense rows only. "
                "Build the embedding with sparse=False."
            )
        return gradient

    def _agree_on_present(self, missing: Sequence[str]) -> Tensor:
        """Mark the parameters that have a gradient on any rank that shares them; only ranks that miss one read it."""
        # Made and indexed on the device: a copy from the host would wait for the backward pass.
        names = self._plan.names
        present = torch.ones(len(names), device=self._mesh.device)
        for name in missing:
            present[names.index(name)].fill_(0.0)
        all_reduce_(present, self._mesh.tp, "max")
        for segment in (segment for bucket in self._plan.tied for segment in bucket):
            index = names.index(segment.name)
            all_reduce_(present[index : index + 1], self._mesh.embedding, "max")
        return all_reduce_(present, self._mesh.data, "max")

    def _forget_unused(self, missing: Sequence[str], present: Tensor) -> None:
        used = {name for name, flag in zip(self._plan.names, present.tolist(), strict=True) if flag}
        for name in missing:
            if name not in used:
                self._main.main(name).grad = None
        filled = [name for name in missing if name in used]
        if filled and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%d parameter(s) had no gradient on this rank while other ranks had one, and take part with zeros: "
                "%s%s.",
                len(filled),
                ", ".join(filled[:5]),
                ", ..." if len(filled) > 5 else "",
            )
