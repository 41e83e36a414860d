"""Turns of two passes: the forward pass of one microbatch and the backward pass of another switch
at marked points, so that the communication of one overlaps with the computation of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Semaphore
from typing import Any, Protocol

import torch
from torch import Tensor

#: Numbers of the two passes.
_FORWARD = 0
_BACKWARD = 1


class PassState(Protocol):
    """State that belongs to the pass that runs, such as the position of random streams."""

    def exchange(self, other: Any) -> Any:
        """Continue from another state, and return the present one; None continues from a copy."""


class PassTurns:
    """Turns of a forward pass and of the backward pass of another microbatch.

    Each pass has a thread of its own, but only one of them runs. It ends its turn at the next point
    that :meth:`after_forward` or :meth:`after_backward` has marked. The points are part of the
    computation, so all ranks of a stage switch at the same points, and start the collectives of
    both passes in the same order.

    On a GPU each pass has a stream, too. Autograd runs the backward pass of an operator on the
    stream of its forward pass, so that a microbatch stays on one stream.

    Args:
        device: Device of the passes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: The stream of everything else, and a second one; None on a CPU.
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._pair: _RunningPair | None = None

    def after_forward(self, x: Tensor) -> Tensor:
        """Return ``x``, and end the turn of the forward pass here."""
        return _Point.apply(x, self, None)

    def after_backward(self, x: Tensor) -> Tensor:
        """Return ``x``, and end the turn of its backward pass once that has its gradient."""
        return _Point.apply(x, None, self)

    def end_turn(self) -> None:
        """Let the other pass run until it ends its turn; without another pass nothing happens."""
        if self._pair is not None:
            self._pair.end_turn()

    def run(
        self,
        forward: Callable[[], None],
        backward: Callable[[], None],
        states: Sequence[PassState],
        starts: Sequence[Any],
        before_switch: Callable[[], None],
        is_second: bool,
    ) -> None:
        """Run two passes in turns, the forward pass first.

        If one fails, the other one ends at its next turn, and the error of the first is raised.

        Args:
            states: States that belong to the running pass. In the end they are those of the forward
                pass.
            starts: What the backward pass starts from, for each of them.
            before_switch: Function that the backward pass calls before it ends a turn.
            is_second: Whether the forward pass runs on the second stream, the backward pass on the
                first.
        """
        kind = self._device.type
        dtype = torch.get_autocast_dtype(kind)
        is_autocast = torch.is_autocast_enabled(kind)

        def run_backward() -> None:
            # A new thread has the default settings of torch, and no context of the device until its
            # first call, which must not be one of cuBLAS.
            with torch.autocast(kind, dtype, is_autocast), self._stream(not is_second):
                if self._streams:
                    torch.cuda.current_stream(self._device).query()
                backward()

        def run_forward() -> None:
            with self._stream(is_second):
                forward()

        self._pair = _RunningPair(states, starts, before_switch)
        try:
            with self._around_both():
                self._pair.run(run_forward, run_backward)
        finally:
            self._pair = None

    @contextmanager
    def on(self, is_second: bool) -> Iterator[None]:
        """Run a block on one of the streams, after all earlier work and before all later work."""
        with self._around_both(), self._stream(is_second):
            yield

    def join(self) -> None:
        """Make the current stream wait for what either stream has been given so far."""
        for stream in self._streams or ():
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Keep the memory of tensors of another stream until the current one has used them."""
        for tensor in tensors if self._streams else ():
            tensor.record_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def _around_both(self) -> Iterator[None]:
        if self._device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream(self._device)
        second = self._streams[1] if self._streams else torch.cuda.Stream(self._device)
        self._streams = current, second
        second.wait_stream(current)
        yield
        current.wait_stream(second)

    def _stream(self, is_second: bool) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[is_second]) if self._streams else nullcontext()


class _OtherPassFailed(BaseException):
    """End of a pass whose partner has failed; user code that catches errors lets it pass."""


class _RunningPair:
    """Two passes, one of which runs."""

    def __init__(
        self, states: Sequence[PassState], starts: Sequence[Any], before_switch: Callable[[], None]
    ) -> None:
        self._states = states
        self._kept: list[Sequence[Any]] = [[None] * len(states), starts]
        self._before_switch = before_switch
        self._running = _FORWARD
        self._have_ended = [False, False]
        self._has_failed = False
        self._may_run = Semaphore(0), Semaphore(0)

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run both passes, and raise the error of the one that has failed first."""
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(self._run_second, backward)
            try:
                with self._ending(_FORWARD):
                    forward()
            except _OtherPassFailed:
                pass
        ended.result()

    def end_turn(self) -> None:
        """Let the other pass run until it ends its turn, unless it has ended."""
        here = self._running
        if here == _BACKWARD and not self._has_failed:
            self._before_switch()
        if not self._have_ended[1 - here]:
            self._switch()
            self._may_run[here].acquire()
        if self._has_failed:
            raise _OtherPassFailed

    def _run_second(self, backward: Callable[[], None]) -> None:
        self._may_run[_BACKWARD].acquire()
        with self._ending(_BACKWARD):
            if self._has_failed:
                raise _OtherPassFailed
            backward()

    @contextmanager
    def _ending(self, here: int) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._have_ended[here] = True
            if here == _BACKWARD or not self._have_ended[_BACKWARD]:
                self._switch()

    def _switch(self) -> None:
        """Let the other pass run, from where its states were."""
        here = self._running
        others = self._kept[1 - here]
        self._kept[here] = [
            state.exchange(other) for state, other in zip(self._states, others, strict=True)
        ]
        self._running = 1 - here
        self._may_run[1 - here].release()


class _Point(torch.autograd.Function):
    """Identity that ends the turn of a pass, in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: PassTurns | None, later: PassTurns | None) -> Tensor:
        ctx.turns = later
        if turns is not None:
            turns.end_turn()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.turns is not None:
            ctx.turns.end_turn()
        return grads[0], None, None
