"""A stand-in for CUDA graphs on the CPU: it records the operators and collectives of a computation, and runs
them again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.graphs.backend import CaptureBackend, GraphPool
from lightning_megatron.groups.axis import CollectiveLauncher, Work
from lightning_megatron.groups.generators import GeneratorPool, draw_from
from lightning_megatron.groups.pending import Pending

# Methods that read the memory of a tensor on the CPU directly, without any operator.
_DIRECT_READS = ("tolist", "numpy")


def reads_host(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator reads values on the host, on the CPU or on a GPU.

    Args:
        function: The operator.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    tags = function.tags
    if torch.Tag.data_dependent_output in tags:
        return True
    if function.overloadpacket is torch.ops.aten.repeat_interleave:
        return kwargs.get("output_size") is None
    if function.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
        # A mask is first turned into a list of positions, whose length the host reads.
        return any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in tree_leaves(args[1])
        )
    return torch.Tag.dynamic_output_shape in tags


def host_read_error(name: str) -> UnsupportedError:
    """Return the error of a captured computation that reads values on the host."""
    return UnsupportedError(f"a capture must not read values on the host: it called {name}")


@contextmanager
def direct_reads_pass(check: Callable[[Tensor, str], None]) -> Iterator[None]:
    """Let methods of this thread that read a tensor's memory without an operator pass a check inside
    the block.
    """
    thread = threading.get_ident()

    def checked(name: str, read: Any) -> Any:
        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                check(tensor, f"Tensor.{name}")
            return read(tensor, *args, **kwargs)

        return method

    with ExitStack() as stack:
        for name in _DIRECT_READS:
            method = checked(name, getattr(Tensor, name))
            stack.enter_context(mock.patch.object(Tensor, name, method))
        yield


#: Entry of a tape.
Entry = Callable[[], None]


@dataclass(frozen=True)
class Operator:
    """Run of one operator, which writes into the tensors of the recorded run.

    Args:
        function: The operator.
        args: Its arguments; those that it mutates are written by the operator itself.
        kwargs: Its arguments by name.
        made: Tensors that the recorded run created, each with its position among the results.
        generator: Generator that replaces torch's default one; None keeps the default.
    """

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    made: tuple[tuple[int, Tensor], ...]
    generator: torch.Generator | None = None

    def __call__(self) -> None:
        """Run the operator again."""
        with nullcontext() if self.generator is None else draw_from(self.generator):
            results = tree_leaves(self.function(*self.args, **self.kwargs))
        for position, tensor in self.made:
            tensor.copy_(results[position])


@dataclass(frozen=True)
class Constant:
    """Tensor that the recorded function created from numbers on the host.

    Args:
        tensor: Tensor of the values, which later entries may change.
        values: The values.
    """

    tensor: Tensor
    values: Tensor

    def __call__(self) -> None:
        """Restore the values."""
        self.tensor.copy_(self.values)


class RecordedWork:
    """Asynchronous collective, recorded as two entries of a tape: its start and its wait.

    Args:
        collective: Start of the collective.
        record: Function that adds an entry to the tape.
    """

    def __init__(self, collective: Callable[[], Work], record: Callable[[Entry], None]) -> None:
        self._collective = collective
        self._record = record
        self._work: Work | None = None

    @property
    def is_in_flight(self) -> bool:
        """Return whether the collective has been started but not waited for."""
        return self._work is not None

    def start(self) -> None:
        """Start the collective."""
        self._work = self._collective()

    def finish(self) -> None:
        """Wait for the collective."""
        if self._work is not None:
            self._work.wait()
        self._work = None

    def wait(self) -> None:
        """Wait for the collective, and record that."""
        if self.is_in_flight:
            self.finish()
            self._record(self.finish)

    def is_completed(self) -> bool:
        """Return ``False``: a recording does not know when a replay completes the collective."""
        return False


def _waits_for_own_collectives() -> AbstractContextManager[Any]:
    """Refuse, as CUDA does, to wait in a capture for a collective that started before it."""
    original = Pending.wait

    def wait(pending: Pending) -> None:
        if pending._work is not None and not isinstance(pending._work, RecordedWork):
            raise UnsupportedError("a capture waits for a collective that started before it")
        original(pending)

    return mock.patch.object(Pending, "wait", wait)


# Operators that allocate memory without writing it.
EMPTY = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}


class Session(TorchDispatchMode):
    """Mode that passes operators to the recording that is under way, if there is one.

    It is entered once for a whole backward pass, because autograd runs each of its functions with the
    modes of the pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recording: Recording | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self.recording is None:
            return func(*args, **(kwargs or {}))
        return self.recording.dispatch(func, args, kwargs or {})


class Recording:
    """Recording of all operators that run in a block, forward and backward, and of collectives.

    An operator that creates tensors is recorded with them. A view is not recorded: it stays a view
    of memory that later runs write. A collective of ``groups`` is one entry, or two if it is
    asynchronous; operators inside it are not recorded. The same holds for a custom operator.
    Tensors in entries share memory with those of the computation, but not their version counters.

    Args:
        generators: Generators that may draw, besides torch's default one; None if there are none.
    """

    def __init__(self, generators: GeneratorPool | None) -> None:
        #: What a replay does.
        self.entries: list[Entry] = []
        #: Tensors that operators created.
        self.made: list[Tensor] = []
        self._generators = generators
        self._before: list[tuple[Tensor, Tensor]] = []
        self._own: set[int] = set()
        self._constants: set[int] = set()
        self._works: list[RecordedWork] = []
        self._is_inside = False

    @contextmanager
    def over(self, launcher: CollectiveLauncher) -> Iterator[None]:
        """Record the block; then restore all tensors and generators that existed before.

        Args:
            launcher: Launcher of the collectives.
        """
        drawn = self._known_generators()
        states = [generator.get_state() for generator in drawn]
        launcher.recorder = self
        try:
            with ExitStack() as stack:
                stack.enter_context(direct_reads_pass(self._check_direct_read))
                stack.enter_context(_waits_for_own_collectives())
                yield
            self._check_waited()
        finally:
            launcher.recorder = None
            for work in self._works:
                work.finish()
            self._undo()
            for generator, state in zip(drawn, states, strict=True):
                generator.set_state(state)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and record it."""
        if self._is_inside:
            return func(*args, **kwargs)
        given = _tensors_of((args, kwargs))
        self._check(func, given, args, kwargs)
        generator = self._generator_of(func, kwargs)
        written = _written(func, args, kwargs)
        self._keep_before(written)
        with self._as_one():
            result = func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            self._record_constant(result)
        else:
            self._record(func, args, kwargs, given, written, result, generator)
        return result

    def run(self, collective: Callable[[], object], written: Sequence[Tensor]) -> None:
        """Run a collective, and record it as one entry."""

        def entry() -> None:
            collective()

        self._keep_before(written)
        with self._as_one():
            entry()
        self.entries.append(entry)

    def start(self, collective: Callable[[], Work], written: Sequence[Tensor]) -> Work:
        """Start a collective, and record the start and the wait as two entries."""
        self._keep_before(written)
        work = RecordedWork(collective, self.entries.append)
        with self._as_one():
            work.start()
        self._works.append(work)
        self.entries.append(work.start)
        return work

    def _record(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Sequence[Tensor],
        written: Sequence[Tensor],
        result: Any,
        generator: torch.Generator | None,
    ) -> None:
        known = set(map(_memory_of, given))
        results = tree_leaves(result)
        made = tuple(
            (position, value.data)
            for position, value in enumerate(results)
            if isinstance(value, Tensor) and _memory_of(value) not in known
        )
        self.made += [tensor for _, tensor in made]
        self._own.update(_memory_of(tensor) for _, tensor in made)
        is_view = not made and any(isinstance(value, Tensor) for value in results)
        if func.overloadpacket in EMPTY:
            # A call between two graphs writes it at each replay. On a GPU a capture reads nothing;
            # here the recorded run must find numbers that are also indices.
            with self._as_one(), torch.no_grad():
                for _, tensor in made:
                    tensor.zero_()
            return
        if is_view and not written:
            return
        args, kwargs = tree_map(_shared, (args, kwargs))
        self.entries.append(Operator(func, args, kwargs, made, generator))

    def _record_constant(self, tensor: Tensor) -> None:
        memory = _memory_of(tensor)
        self._own.add(memory)
        self._constants.add(memory)
        self.made.append(tensor.data)
        with self._as_one():
            self.entries.append(Constant(tensor.data, tensor.detach().clone()))

    def _check(
        self, func: Any, given: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse operators that a replay could not repeat."""
        if func.namespace in ("c10d", "_c10d_functional"):
            raise UnsupportedError(
                f"a capture cannot repeat collectives of torch: it called {func}"
            )
        is_constant = all(_memory_of(tensor) in self._constants for tensor in given)
        if reads_host(func, args, kwargs) and not is_constant:
            raise host_read_error(str(func))

    def _check_direct_read(self, tensor: Tensor, name: str) -> None:
        if not self._is_inside and _memory_of(tensor) not in self._constants:
            raise host_read_error(name)

    def _check_waited(self) -> None:
        left = sum(work.is_in_flight for work in self._works)
        if left:
            raise UnsupportedError(f"a capture must wait for its collectives: {left} are in flight")

    def _generator_of(self, func: Any, kwargs: Mapping[str, Any]) -> torch.Generator | None:
        """Return the generator of a random operator; None if it is the default one, or given."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        given = kwargs.get("generator")
        current = None if self._generators is None else self._generators.current
        generator = current if given is None else given
        # The same generator comes to operators as different objects of Python.
        known = set(map(_identity_of, self._known_generators()))
        if generator is not None and _identity_of(generator) not in known:
            raise UnsupportedError(
                f"a capture must know its generators: {func} draws from another one"
            )
        return current if given is None else None

    def _known_generators(self) -> list[torch.Generator]:
        others = [] if self._generators is None else self._generators.of_streams
        return [torch.default_generator, *others]

    def _keep_before(self, tensors: Sequence[Tensor]) -> None:
        """Keep the values of tensors that are written now, if they are older than the recording."""
        for tensor in tensors:
            memory = _memory_of(tensor)
            self._constants.discard(memory)
            if memory not in self._own:
                with self._as_one():
                    self._before.append((tensor.data, tensor.detach().clone()))

    def _undo(self) -> None:
        with torch.no_grad():
            for tensor, before in reversed(self._before):
                tensor.copy_(before)
        self._before.clear()

    @contextmanager
    def _as_one(self) -> Iterator[None]:
        """Record nothing inside the block."""
        outside = self._is_inside
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = outside


def _tensors_of(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _shared(value: Any) -> Any:
    """Return a tensor of the same memory with its own version counter; other values unchanged."""
    return value.data if isinstance(value, Tensor) else value


def _identity_of(generator: Any) -> int:
    """Return the identity of a generator, whichever object of Python stands for it."""
    return int(generator._cdata)


def _memory_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory, unique while a tensor of it exists."""
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """List the arguments that an operator mutates, according to its schema."""
    values = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        is_given = position < len(args) and not argument.kwarg_only
        values.append(args[position] if is_given else kwargs.get(argument.name))
    return _tensors_of(values)


class TapePool:
    """Graphs that would share memory on a GPU.

    Here each tensor keeps its own memory. Where a replay on a GPU may overwrite tensors, because
    they share memory with it, they are filled with NaN instead (with the smallest number if they
    have integers), so that a wrong read becomes visible.
    """

    def __init__(self) -> None:
        self.graphs: list[TapeGraph] = []
        self.given_up: list[Tensor] = []

    def give_up(self, tensor: Tensor) -> Tensor:
        """Let the replays of later captures fill the tensor with NaN.

        Returns:
            Tensor of the same memory, without autograd history.
        """
        address = tensor.untyped_storage().data_ptr()
        if any(graph.has_made(address) for graph in self.graphs):
            self.given_up.append(tensor.data)
        return tensor.detach()


class TapeGraph:
    """Recorded computation.

    Args:
        entries: What a replay does.
        made: Tensors that the recording created.
        pool: Pool of the graph.
    """

    def __init__(self, entries: Sequence[Entry], made: Sequence[Tensor], pool: TapePool) -> None:
        self._entries = tuple(entries)
        self._made = tuple(made)
        self._pool: TapePool | None = pool
        self._is_spoiled = True

    def has_made(self, address: int) -> bool:
        """Return whether the recording allocated the memory at an address."""
        return any(tensor.untyped_storage().data_ptr() == address for tensor in self._made)

    @torch.no_grad()
    def replay(self) -> None:
        """Run all entries again, after spoiling what the replay would overwrite on a GPU."""
        if self._pool is None:
            raise RuntimeError(
                "a graph can be replayed only before its release: it has been released"
            )
        graphs = self._pool.graphs
        for later in graphs[graphs.index(self) + 1 :]:
            later.spoil()
        for entry in self._entries:
            entry()
        self._is_spoiled = False

    @torch.no_grad()
    def spoil(self) -> None:
        """Fill the tensors of the recording with NaN, if a replay has written them since."""
        if not self._is_spoiled:
            for tensor in self._made:
                _spoil(tensor)
        self._is_spoiled = True

    def release(self) -> None:
        """Free the entries."""
        if self._pool is not None:
            self._pool.graphs.remove(self)
        self._pool = None
        self._entries = ()
        self._made = ()


class TapeCapture:
    """Recording that is under way; see ``OpenCapture``."""

    def __init__(
        self, session: Session, recording: Recording, stack: ExitStack, pool: TapePool
    ) -> None:
        self._session = session
        self._recording = recording
        self._stack = stack
        self._pool = pool
        self._spoiling: list[Entry] = [_spoiling(tensor) for tensor in pool.given_up]
        pool.given_up.clear()

    def end(self) -> TapeGraph:
        """End the recording, restore what it changed, and return the graph."""
        self._session.recording = None
        self._stack.close()
        entries = [*self._spoiling, *self._recording.entries]
        graph = TapeGraph(entries, self._recording.made, self._pool)
        self._pool.graphs.append(graph)
        return graph

    def abandon(self) -> None:
        """End the recording after an error, and restore what it changed."""
        self._session.recording = None
        with suppress(_Abandoned):
            error = _Abandoned()
            self._stack.__exit__(_Abandoned, error, None)


class _Abandoned(Exception):
    pass


class TapeBackend(CaptureBackend):
    """Backend for the CPU, with the contract of CUDA graphs.

    It runs the captured function and records its operators and collectives. Then it restores what
    the run has changed. Replays run the operators again, without Python of the package except
    inside custom operators.

    Args:
        launcher: Launcher of the collectives that may be recorded.
    """

    def __init__(self, launcher: CollectiveLauncher | None = None) -> None:
        self._launcher = launcher or CollectiveLauncher()
        self._session: Session | None = None

    @property
    def is_capturing(self) -> bool:
        """Return whether a capture is under way."""
        return self._launcher.recorder is not None

    def make_pool(self) -> TapePool:
        """Return a new pool without graphs."""
        return TapePool()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Let captures begin and end inside the block; see ``CaptureBackend``."""
        outside = self._session
        if outside is not None and self.is_capturing:
            raise RuntimeError("captures must not be nested: one is under way. End it first.")
        self._session = Session()
        try:
            with self._session:
                yield
        finally:
            self._session = outside

    def begin(self, pool: GraphPool, generators: GeneratorPool | None = None) -> TapeCapture:
        """Record what follows, and restore what it changed at the end; see ``CaptureBackend``.

        Raises:
            RuntimeError: If a capture is under way.
            UnsupportedError: If values are read on the host, drawn from a generator that is not
                given, if collectives of torch are called directly, or if one is not waited for.

        Communication: that of the recorded code, in the capture and in each replay.
        """
        assert isinstance(pool, TapePool), "the pool comes from this backend"
        if self.is_capturing:
            raise RuntimeError("captures must not be nested: one is under way. End it first.")
        assert self._session is not None, "captures begin inside of a session"
        recording = Recording(generators)
        stack = ExitStack()
        stack.enter_context(recording.over(self._launcher))
        self._session.recording = recording
        return TapeCapture(self._session, recording, stack, pool)


def _spoiling(tensor: Tensor) -> Entry:
    return lambda: _spoil(tensor)


def _spoil(tensor: Tensor) -> None:
    """Fill a tensor with values that no computation should read."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
