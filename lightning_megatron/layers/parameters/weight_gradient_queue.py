"""Queue of weight gradients that the input half of a backward pass defers to the weight half."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch

#: Function that adds a weight gradient to its gradient slots.
Add = Callable[[], None]
#: Function that starts the communication of a weight gradient and returns an ``Add``.
Start = Callable[[], Add]
#: Products of one pass, each with the slots to which its gradients are added.
Products = deque[tuple[Start, Sequence[Hashable]]]


class WeightGradientQueue:
    """Queue of the weight gradients that a backward pass does not compute at once.

    A backward pass has two halves. The input half computes everything that earlier layers and
    earlier pipeline stages wait for. The weight half computes matrix products that only the
    optimizer waits for, so it can fill the time in which a stage would be idle. Layers with large
    weights get the queue from their gradient slots. While the queue is open, they put the products
    of their weight gradients into it. All other gradients, such as those of norms, biases,
    embeddings and weights without a gradient slot, are part of the input half.

    A product in the queue keeps its two factors in memory: the input of the layer and the gradient
    of its output.

    Source: Qi et al. 2023 (https://arxiv.org/abs/2401.10241).
    """

    def __init__(self) -> None:
        self._left: dict[Hashable, Products] = {}
        self._open: Products | None = None

    @property
    def is_open(self) -> bool:
        """Return whether an input half is running, whose weight gradients go into the queue."""
        return self._open is not None

    @contextmanager
    def open(self, key: Hashable) -> Iterator[None]:
        """Collect the weight gradients of backward passes inside the block, for ``run(key)``.

        If the block raises an error, the collected gradients are discarded.
        """
        if self._open is not None or key in self._left:
            raise ValueError(
                "each input half must have its own weight half, and must end before the next input "
                f"half starts: open() got {key!r}, while the queue is "
                f"{'open' if self.is_open else 'closed'} and has {list(self._left)}. Otherwise the "
                "gradients of two backward passes would mix. Call run() with this name first."
            )
        collected: Products = deque()
        self._open = collected
        try:
            yield
        finally:
            self._open = None
        self._left[key] = collected

    @contextmanager
    def apart(self) -> Iterator[Products]:
        """Collect the weight gradients of the block separately from the surrounding input half.

        The caller passes them to :func:`compute_products`. Outside of an input half the block
        computes all gradients at once, and there are no products.
        """
        outside = self._open
        collected: Products = deque()
        if outside is not None:
            self._open = collected
        try:
            yield collected
        finally:
            self._open = outside

    def put(self, start: Start, slots: Sequence[Hashable]) -> None:
        """Put a weight gradient into the open queue, with the slots that get one gradient each."""
        assert self._open is not None, "layers ask whether the queue is open"
        self._open.append((start, slots))

    def count_left(self, key: Hashable) -> Counter[Hashable]:
        """Return how many gradients :meth:`run` will add to each slot."""
        return Counter(slot for _, slots in self._left.get(key, ()) for slot in slots)

    def run(self, key: Hashable) -> None:
        """Compute the weight gradients of an input half; without any of this name nothing happens.

        Communication: under sequence parallelism all-gathers over tp of the inputs of column
            layers, each overlapped with the product before it.
        """
        compute_products(self._left.pop(key, deque()))

    def run_open(self) -> None:
        """Compute the weight gradients that the running input half has deferred so far."""
        compute_products(self._open or deque())

    def discard(self) -> None:
        """Discard all weight gradients, after a step that an error has ended."""
        self._left.clear()


@torch.no_grad()
def compute_products(left: Products) -> None:
    """Compute weight gradients in the order in which an input half deferred them.

    The queue is empty at the end; the factors of each product are released when it is computed.

    Communication: that of the products, each overlapped with the product before it.
    """
    add: Add | None = None
    while left:
        start, _ = left.popleft()
        following = start()
        del start
        if add is not None:
            add()
        add = following
    if add is not None:
        add()
