"""Gradient sums over the microbatches of a step, outside of autograd's ``.grad``.

The first gradient of a step overwrites the sum in its slot, and later ones are added to it. Layers
choose between the two in Python, by :attr:`GradientSlot.is_empty`. A CUDA graph repeats the choice
of its capture, so a backward pass has two graphs: one for empty slots and one for filled slots. The
code that replays them sets the flags that the pass would have set by :func:`mark_filled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_megatron.half_types import HALF_TYPES
from lightning_megatron.layers.parameters.weight_gradient_queue import WeightGradientQueue
from lightning_megatron.shapes import Float, Int, Shaped

_ATTRIBUTE = "gradient_slot"


class GradientProduct(Protocol):
    """Weight gradient of a linear layer that is not computed yet."""

    def value(self) -> Float[Tensor, "out_local in_local"]:
        """Return the gradient."""
        ...

    def add_to(
        self, sums: Float[Tensor, "out_local in_local"], *, is_empty: bool, scale: float
    ) -> bool:
        """Add the gradient to a sum, which it overwrites if ``is_empty``.

        If the result is False, nothing was added and the caller must add :meth:`value`.
        """
        ...

    def split(self, rows: Sequence[int]) -> Sequence[GradientProduct] | None:
        """Return the products of consecutive blocks of rows of the weight.

        None means that :meth:`value` must be computed and split.
        """
        ...


@dataclass(frozen=True)
class MatrixProduct:
    """Weight gradient ``left^T @ right`` of the outputs' gradient and the inputs.

    For half types on a GPU, one matrix product accumulates in the float32 memory of the sum,
    without rounding to the half type and without a temporary tensor.

    Shapes: left ``(rows, out_local)``; right ``(rows, in_local)``.
    """

    left: Tensor
    right: Tensor

    def value(self) -> Float[Tensor, "out_local in_local"]:
        """Return the gradient."""
        return self.left.t() @ self.right

    def add_to(
        self, sums: Float[Tensor, "out_local in_local"], *, is_empty: bool, scale: float
    ) -> bool:
        """Add the gradient to a sum; return False if these dtypes have no such product."""
        left = self.left
        right = self.right
        factors = {"beta": 0 if is_empty else 1, "alpha": scale}
        is_half = left.dtype in HALF_TYPES and right.dtype == left.dtype
        if sums.dtype == torch.float32 and left.is_cuda and is_half:
            torch.addmm(sums, left.t(), right, out_dtype=torch.float32, out=sums, **factors)
        elif sums.dtype == left.dtype == right.dtype:
            torch.addmm(sums, left.t(), right, out=sums, **factors)
        else:
            return False
        return True

    def split(self, rows: Sequence[int]) -> Sequence[MatrixProduct]:
        """Return the products of consecutive rows of the weight."""
        return [MatrixProduct(part, self.right) for part in self.left.split(list(rows), dim=1)]


@dataclass(frozen=True)
class ScaledGradient:
    """Weight gradient ``gradient * factor``, with a factor that is known only on the device."""

    gradient: Float[Tensor, "out_local in_local"]
    factor: Float[Tensor, ""]

    def value(self) -> Float[Tensor, "out_local in_local"]:
        """Return the gradient."""
        return self.gradient * self.factor

    def add_to(
        self, sums: Float[Tensor, "out_local in_local"], *, is_empty: bool, scale: float
    ) -> bool:
        """Add the gradient to a sum in one pass; return False if their dtypes differ."""
        if sums.dtype != self.gradient.dtype:
            return False
        if is_empty:
            torch.mul(self.gradient, self.factor * scale, out=sums)
        else:
            sums.addcmul_(self.gradient, self.factor, value=scale)
        return True

    def split(self, rows: Sequence[int]) -> Sequence[ScaledGradient]:
        """Return the gradients of consecutive rows of the weight."""
        return [ScaledGradient(part, self.factor) for part in self.gradient.split(list(rows))]


@dataclass(frozen=True)
class Owner:
    """Callbacks for several slots, which are called once for all of them.

    Args:
        accepts: Function that returns whether gradients are currently accepted for all slots.
        on_gradients: Called after a gradient was added to every slot.
    """

    accepts: Callable[[], bool]
    on_gradients: Callable[[], None]


class GradientSlot:
    """Sum of a parameter's gradients, in a tensor that may have a wider dtype.

    The first gradient of a step overwrites the tensor, so it need not be zeroed.

    Args:
        on_gradient: Called after every addition.
        accepts: Function that returns whether gradients are currently accepted; others are dropped.
        join: Function that returns one owner for several slots with the same ``join``. None means
            that the callbacks of each slot are called.
        scale: Factor of every gradient.
        queue: Queue to which layers may defer the matrix product of the gradient; None computes all
            products at once.
    """

    def __init__(
        self,
        gradient: Tensor,
        on_gradient: Callable[[], None],
        accepts: Callable[[], bool] = lambda: True,
        join: Callable[[Sequence[GradientSlot]], Owner] | None = None,
        scale: float = 1.0,
        queue: WeightGradientQueue | None = None,
    ) -> None:
        self.gradient = gradient
        self._queue = queue
        self.scale = scale
        self.is_empty = True
        #: Indices of the rows of all gradients since the last :meth:`clear`, one tensor for each
        #: addition; None if a gradient of the whole parameter was added.
        self.rows: tuple[Tensor, ...] | None = ()
        self._on_gradient = on_gradient
        self._accepts = accepts
        self._join = join
        self._row: SlotRow | None = None
        self._first_part: GradientSlot | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the sum."""
        return self.gradient.dtype

    @property
    def slots(self) -> tuple[GradientSlot, ...]:
        """Return this slot alone, the counterpart of :attr:`StackedSlot.slots`."""
        return (self,)

    @property
    def open_queue(self) -> WeightGradientQueue | None:
        """Return the queue to which the product can be deferred now; None if there is none.

        Compiled graphs cannot use a queue. Linear layers with slots run between them.
        """
        if torch.compiler.is_compiling() or self._queue is None or not self._queue.is_open:
            return None
        return self._queue

    @torch.no_grad()
    def add(self, gradient: Tensor) -> None:
        """Add a gradient of the parameter's shape, in any dtype."""
        if not self._accepts():
            return
        if self.is_empty:
            self.gradient.copy_(gradient)
            if self.scale != 1:
                self.gradient.mul_(self.scale)
        else:
            self.gradient.add_(gradient, alpha=self.scale)
        self._added()

    @torch.no_grad()
    def add_sum(self, parts: Float[Tensor, "parts ..."]) -> None:
        """Add a gradient that is the sum of some parts: equal to ``add(parts.sum(0))``."""
        if not self._accepts():
            return
        if not self.is_empty or self.scale != 1 or self.gradient.dtype != parts.dtype:
            self.add(parts.sum(0))
            return
        # The first gradient of a step is summed into the slot, without a temporary tensor.
        torch.sum(parts, 0, out=self.gradient)
        self._added()

    @torch.no_grad()
    def add_product(
        self, left: Float[Tensor, "rows out_local"], right: Float[Tensor, "rows in_local"]
    ) -> None:
        """Add ``left.t() @ right``, a weight gradient, in one product where possible."""
        self.add_computed(MatrixProduct(left, right))

    @torch.no_grad()
    def add_computed(self, product: GradientProduct) -> None:
        """Add a weight gradient, which is computed only if the slot accepts it."""
        if not self._accepts():
            return
        if product.add_to(self.gradient, is_empty=self.is_empty, scale=self.scale):
            self._added()
        else:
            self.add(product.value())

    @torch.no_grad()
    def add_rows(self, index: Int[Tensor, "rows"], rows: Float[Tensor, "rows hidden"]) -> None:
        """Add the gradients of some rows of a table, in the dtype of the slot.

        The result is deterministic if at most one of the rows with equal index is not zero.
        """
        if not self._accepts():
            return
        if self.is_empty:
            self.gradient.zero_()
        self.gradient.index_add_(0, index, rows, alpha=self.scale)
        self.note_filled((index,))
        self._on_gradient()

    def first_part(self) -> GradientSlot:
        """Return a slot of the same sum for all parts of a gradient except the last.

        It does not notify the owner. This slot must then add the last part.
        """
        if self._first_part is None:
            self._first_part = GradientSlot(
                self.gradient, self.note_filled, self._accepts, scale=self.scale
            )
        self._first_part.is_empty = self.is_empty
        return self._first_part

    def note_filled(self, rows: tuple[Int[Tensor, "rows"], ...] | None = None) -> None:
        """Record that a gradient was added to some rows, or all (None); call no owner."""
        self.is_empty = False
        self.rows = None if rows is None or self.rows is None else self.rows + rows

    def clear(self) -> None:
        """Mark the sum as empty, at the start of a step."""
        self.is_empty = True
        self.rows = ()

    def _added(self) -> None:
        self.note_filled()
        self._on_gradient()


class SlotRow:
    """Slots of parameters of one shape, in the order of their memory addresses.

    One kernel can add to all of them if their sums lie at equal distances in one storage.
    """

    def __init__(self, slots: Sequence[GradientSlot]) -> None:
        self._slots = tuple(slots)
        #: Factor of every gradient.
        self.scale = slots[0].scale
        is_one_scale = all(slot.scale == self.scale for slot in slots)
        #: The sums as one tensor ``(experts, *shape)``; None if they are not equally spaced or
        #: differ in scale.
        self.sums = stacked_view([slot.gradient for slot in slots]) if is_one_scale else None
        self.is_contiguous = slots[0].gradient.is_contiguous()
        self._owner = self.owner_of(slots)
        self._addresses: list[int] | None = None
        self._weights: Tensor | None = None

    @staticmethod
    def of(slots: Sequence[GradientSlot]) -> SlotRow:
        """Return the row of these slots."""
        # The first slot can cache the row, because the memory of a slot never changes.
        row = slots[0]._row
        if row is None or row._slots != tuple(slots):
            row = slots[0]._row = SlotRow(slots)
        return row

    def stacked_weights(
        self, weights: Sequence[Float[Tensor, "*shape"]]
    ) -> Float[Tensor, "experts *shape"] | None:
        """Return :func:`stacked_view` of the parameters, cached until one of them moves."""
        addresses = [weight.data_ptr() for weight in weights]
        if addresses != self._addresses:
            self._addresses = addresses
            self._weights = stacked_view(weights)
        return self._weights

    @torch.no_grad()
    def add(self, add: Callable[[Tensor, bool], None]) -> bool:
        """Add the gradients of all parameters with one kernel, if possible.

        It is possible if the sums are one tensor, all slots accept gradients, and either all slots
        are empty or none is. Otherwise the result is False, and the caller must add to each slot.

        Args:
            add: Function of the sums as one tensor, and of whether to overwrite them. It must apply
                :attr:`scale`.
        """
        states = [slot.is_empty for slot in self._slots]
        is_empty = states[0]
        if self.sums is None or states.count(is_empty) != len(states) or not self._owner.accepts():
            return False
        add(self.sums, is_empty)
        for slot in self._slots:
            slot.note_filled()
        self._owner.on_gradients()
        return True

    @torch.no_grad()
    def add_each(self, add: Callable[[list[Tensor], list[bool], list[bool]], None]) -> None:
        """Add the gradients of all parameters by one call, wherever their sums lie in memory.

        Args:
            add: Function of the sums of the parameters, of whether to overwrite each sum, and of
                whether each slot accepts gradients. It must not change the sums of slots that
                accept none, and must apply the scales of the slots.
        """
        slots = self._slots
        accepted = [slot._accepts() for slot in slots]
        are_empty = [slot.is_empty for slot in slots]
        add([slot.gradient for slot in slots], are_empty, accepted)
        for slot, is_accepted in zip(slots, accepted, strict=True):
            if is_accepted:
                slot._added()

    @staticmethod
    def owner_of(slots: Sequence[GradientSlot]) -> Owner:
        """Return one owner for all slots, which calls each slot if the slots cannot be joined."""
        joins = [slot._join for slot in slots]
        join = joins[0] if joins.count(joins[0]) == len(joins) else None
        if join is not None:
            return join(slots)

        def notify() -> None:
            for slot in slots:
                slot._on_gradient()

        return Owner(lambda: all(slot._accepts() for slot in slots), notify)


class StackedSlot:
    """Gradient slot of a fused weight whose rows belong to several parameters.

    Equal to adding its rows of every gradient to the slot of each parameter. If the sums are
    adjacent in memory, one matrix product adds to all of them.
    """

    def __init__(self, slots: Sequence[GradientSlot], rows: Sequence[int]) -> None:
        self.slots = tuple(slots)
        self._rows = list(rows)
        self._owner = SlotRow.owner_of(slots)
        self._full = self._joined_sums()

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the sums."""
        return self.slots[0].dtype

    @property
    def open_queue(self) -> WeightGradientQueue | None:
        """Return the queue for the product, as :attr:`GradientSlot.open_queue` does."""
        return self.slots[0].open_queue

    def add(self, gradient: Float[Tensor, "rows ..."]) -> None:
        """Add a gradient of the concatenated parameters."""
        for slot, part in zip(self.slots, gradient.split(self._rows), strict=True):
            slot.add(part)

    def add_computed(self, product: GradientProduct) -> None:
        """Add a weight gradient, as :meth:`GradientSlot.add_computed` does."""
        first = self.slots[0]
        states = [slot.is_empty for slot in self.slots]
        is_mixed = states.count(states[0]) != len(states)
        if self._full is None or is_mixed or not self._owner.accepts():
            parts = product.split(self._rows)
            if parts is None:
                self.add(product.value())
                return
            for slot, part in zip(self.slots, parts, strict=True):
                slot.add_computed(part)
            return
        with torch.no_grad():
            if not product.add_to(self._full, is_empty=states[0], scale=first.scale):
                self.add(product.value())
                return
        for slot in self.slots:
            slot.note_filled()
        self._owner.on_gradients()

    def _joined_sums(self) -> Tensor | None:
        """Return the sums as one tensor; None if they are apart or differ in scale or dtype."""
        sums = [slot.gradient for slot in self.slots]
        has_one_scale = all(slot.scale == self.slots[0].scale for slot in self.slots)
        return neighbours_as_one(sums) if has_one_scale else None


def slot_of(parameter: Tensor | None) -> Any:
    """Return the slot of a parameter: for a fused weight a :class:`StackedSlot`.

    None if the parameter is frozen or if autograd accumulates its gradient, as for parameters with
    hooks, which autograd runs. Compiled blocks ignore hooks.
    """
    if parameter is None or not parameter.requires_grad:
        return None
    slot = getattr(parameter, _ATTRIBUTE, None)
    if slot is None or torch.compiler.is_compiling():
        return slot
    return None if parameter._backward_hooks else slot


def slots_of(parameters: Sequence[Tensor]) -> list[GradientSlot | None]:
    """Return the slot of each parameter, as :func:`slot_of` does."""
    return [slot_of(parameter) for parameter in parameters]


def cached_stack(
    weights: Sequence[Float[Tensor, "*shape"]], slots: Sequence[GradientSlot | None]
) -> Float[Tensor, "experts *shape"] | None:
    """Return :func:`stacked_view` of weights, which their slots cache if each weight has one."""
    present = [slot for slot in slots if slot is not None]
    if len(present) == len(weights):
        return SlotRow.of(present).stacked_weights(weights)
    return stacked_view(weights)


def set_slot(parameter: Tensor, slot: GradientSlot | StackedSlot | None) -> None:
    """Attach a slot to a parameter; None removes its slot."""
    if slot is not None:
        setattr(parameter, _ATTRIBUTE, slot)
    elif hasattr(parameter, _ATTRIBUTE):
        delattr(parameter, _ATTRIBUTE)


def add_to_slots(
    gradients: Float[Tensor, "experts *shape"],
    weights: Sequence[Float[Tensor, "*shape"]],
    slots: Sequence[GradientSlot | None],
    needed: Sequence[bool],
) -> list[Float[Tensor, "*shape"] | None]:
    """Add a stack of gradients to the slots of weights, and return what is left for autograd.

    An entry of the result is None if its gradient is in a slot, or not ``needed``.
    """
    remaining: list[Tensor | None] = [None] * len(weights)
    for number, (weight, slot) in enumerate(zip(weights, slots, strict=True)):
        if slot is not None:
            slot.add(gradients[number])
        elif needed[number]:
            remaining[number] = gradients[number].to(weight.dtype)
    return remaining


def mark_filled(
    slots: Iterable[GradientSlot], rows: Mapping[GradientSlot, tuple[Int[Tensor, "rows"], ...]]
) -> None:
    """Record that a replay added gradients to these slots, without a call of their owners.

    Args:
        rows: Rows of the gradients, for slots that got only gradients of known rows. The tensors
            are copied, because the next replay overwrites them.
    """
    for slot in slots:
        slot_rows = rows.get(slot)
        slot.note_filled(None if slot_rows is None else tuple(index.clone() for index in slot_rows))


@torch.no_grad()
def fill_empty(slots: Iterable[GradientSlot]) -> None:
    """Fill the empty slots with zeros: adding to zeros equals overwriting.

    A pass can then add its gradients to all slots of a mixed state.
    """
    for slot in slots:
        if slot.is_empty:
            slot.gradient.zero_()
            slot.is_empty = False


@contextmanager
def preserve_states(slots: Iterable[GradientSlot]) -> Iterator[None]:
    """Restore the current states of the slots when the block ends."""
    before = [(slot, slot.is_empty, slot.rows) for slot in slots]
    try:
        yield
    finally:
        for slot, is_empty, rows in before:
            slot.is_empty = is_empty
            slot.rows = rows


def neighbours_as_one(
    parts: Sequence[Shaped[Tensor, "_ ..."]],
) -> Shaped[Tensor, "rows ..."] | None:
    """Return adjacent tensors as one view of their memory; None if they are not adjacent."""
    first = parts[0]
    address = first.data_ptr()
    itemsize = first.element_size()
    num_rows = 0
    for part in parts:
        is_next = part.data_ptr() == address and part.is_contiguous()
        if not is_next or part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
            return None
        address += part.numel() * itemsize
        num_rows += len(part)
    storage = first.untyped_storage()
    # Tensors of different storages can be adjacent by chance.
    if address > storage.data_ptr() + storage.nbytes():
        return None
    return first.detach().as_strided((num_rows, *first.shape[1:]), first.stride())


def stacked_view(tensors: Sequence[Shaped[Tensor, "..."]]) -> Shaped[Tensor, "experts ..."] | None:
    """Return tensors as one view of their memory; None if they are not equally spaced in order.

    Every matrix product of experts calls this function, so it is cheap and caches nothing. Memory
    within the storage of the first tensor belongs to that storage, because storages do not overlap.

    Shapes: tensors ``(*shape)``; output ``(number of tensors, *shape)``.
    """
    first = tensors[0]
    num_tensors = len(tensors)
    if num_tensors == 1:
        return first.unsqueeze(0)
    addresses = [tensor.data_ptr() for tensor in tensors]
    start = addresses[0]
    step = addresses[1] - start
    stop = start + step * num_tensors
    if step <= 0 or step % first.element_size() or addresses != list(range(start, stop, step)):
        return None
    # ``list.count`` is faster than a Python loop: there may be hundreds of tensors.
    shape = first.shape
    if [tensor.shape for tensor in tensors].count(shape) != num_tensors:
        return None
    strides = first.stride()
    if [tensor.stride() for tensor in tensors].count(strides) != num_tensors:
        return None
    if [tensor.dtype for tensor in tensors].count(first.dtype) != num_tensors:
        return None
    storage = first.untyped_storage()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if stop - step + extent * first.element_size() > storage.data_ptr() + storage.nbytes():
        return None
    return first.as_strided((num_tensors, *shape), (step // first.element_size(), *strides))
