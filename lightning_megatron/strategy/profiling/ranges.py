"""Named ranges of a step in a profile: actions, layers, collectives, optimizer and graph replays.

No code of a step opens a range. Inside of :meth:`Ranges.recording` the calls are intercepted from
outside, so that ranges cost nothing while no profile runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.profiler import record_function

from lightning_megatron.graphs.effects import EffectObservers, Effects
from lightning_megatron.graphs.interception import Interception, intercepted
from lightning_megatron.groups.axis import CollectiveLauncher, Work
from lightning_megatron.groups.journal import NEIGHBOURS
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.nest import leaves
from lightning_megatron.pipeline.action_times import ActionTimes
from lightning_megatron.plan.actions import Action
from lightning_megatron.strategy.profiling.step_parts import WAIT
from lightning_megatron.strategy.run import Run

#: Modules that hold layers and have no formula of their own.
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def name_of(action: Action) -> str:
    """Return the name of an action's range, such as ``F chunk 0 microbatch 3``."""
    return f"{action.kind} chunk {action.chunk} microbatch {action.microbatch}"


class Ranges:
    """Ranges that are open on one rank, and what opens them.

    Args:
        module: Module whose layers have ranges.
        run: The fit.
        mesh: The groups of this rank.
    """

    def __init__(self, module: nn.Module, run: Run, mesh: ParallelMesh) -> None:
        self._module = module
        self._run = run
        self._mesh = mesh
        #: Names of the open ranges, the outermost first.
        self.names: list[str] = []
        #: Ranges of backward passes of layers, which hooks open and close.
        self._backward: list[tuple[str, Any]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Open ranges inside the block."""
        launcher = self._mesh.launcher
        before = launcher.recorder
        state = self._run.state
        calls = [
            (state.gradients, "end_batch", "sum gradients over ranks"),
            (state.clipping, "by_norm", "clip gradients"),
            (state.clipping, "by_value", "clip gradients"),
            (state.main, "publish", "gather updated parameters"),
        ]
        if state.update_graph is not None:
            calls.append((state.update_graph, "run", "update by graphs"))
        layers = [
            Interception(layer, "_compiled_call_impl" if is_compiled else "forward", name)
            for name, layer, is_compiled in named_layers(self._module)
        ]
        update = [Interception(state, "update", "optimizer update")]
        repeat = EffectObservers.repeat
        with ExitStack() as stack:
            stack.enter_context(intercepted([Interception(*call) for call in calls], self._call))
            stack.enter_context(intercepted(layers, self._call_layer))
            actions = _RangedActions(self._mesh.device, self)
            self._run.executor.times.append(actions)
            stack.callback(self._run.executor.times.remove, actions)
            stack.enter_context(intercepted(update, self._call_update))
            # The objects that repeat effects belong to graphs, so their class is changed.
            stack.callback(setattr, EffectObservers, "repeat", repeat)
            EffectObservers.repeat = _named_replays(self, repeat)  # type: ignore[assignment,method-assign]
            stack.callback(setattr, launcher, "recorder", before)
            launcher.recorder = CollectiveRanges(self, self._mesh)
            yield

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Open a range for the block."""
        self.names.append(name)
        try:
            with record_function(name):
                yield
        finally:
            self.names.pop()

    def _call(
        self, place: Interception, original: Callable[..., Any], *args: Any, **kw: Any
    ) -> Any:
        with self.during(place.name):
            return original(*args, **kw)

    def _call_update(
        self,
        place: Interception,
        original: Callable[..., Any],
        optimizer: Any,
        closure: Callable[[], Any],
        options: Any,
    ) -> Any:
        with ExitStack() as stack:

            def timed_closure() -> Any:
                # Optimizers such as LBFGS call the closure several times.
                stack.close()
                result = closure()
                stack.enter_context(self.during(place.name))
                return result

            return original(optimizer, timed_closure, options)

    # ---- layers

    def _call_layer(
        self, place: Interception, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        with self.during(place.name):
            result = original(*args, **kwargs)
        if torch.is_grad_enabled():
            self._follow_backward(place.name, _trained(args), _trained(result))
        return result

    def _follow_backward(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Let the backward pass of a layer open a range, and close it at the layer's input.

        Both happen in one thread, that of the device, as ranges require. A layer without such an
        input, like an embedding, gets no range there.
        """
        if not inputs or not outputs or outputs[0].grad_fn is None:
            return
        first = get_gradient_edge(inputs[0]).node
        if first is not outputs[0].grad_fn:
            outputs[0].grad_fn.register_prehook(partial(self._open_backward, name))
            handle = first.register_prehook(lambda grads: self._close_backward(name, handle))

    def _open_backward(self, name: str, grads: Any) -> None:
        self._close_to(lambda outer: not name.startswith(f"{outer}."))
        entered = record_function(f"{name}, backward")
        entered.__enter__()
        self._backward.append((name, entered))

    def _close_backward(self, name: str, handle: Any) -> None:
        # The input of a stage has a node that outlives the pass.
        handle.remove()
        if any(one == name for one, _ in self._backward):
            self._close_to(lambda inner: inner == name or inner.startswith(f"{name}."))

    def _close_to(self, is_closed: Callable[[str], bool]) -> None:
        while self._backward and is_closed(self._backward[-1][0]):
            self._backward.pop()[1].__exit__(None, None, None)

    @property
    def purpose(self) -> str:
        """Return the innermost layer whose backward pass runs, or the innermost range; or ""."""
        if self._backward:
            return f"{self._backward[-1][0]}, backward"
        return self.names[-1] if self.names else ""


def _named_replays(
    ranges: Ranges, repeat: Callable[..., AbstractContextManager[Any]]
) -> Callable[..., AbstractContextManager[Any]]:
    """Return a function that opens a range around each replay, named by what it replays."""

    @contextmanager
    def named(self: EffectObservers, effects: Effects, *args: Any) -> Iterator[Any]:
        with ranges.during(effects.label), repeat(self, effects, *args) as position:
            yield position

    return named


def _trained(value: Any) -> list[Tensor]:
    """Return the tensors in nested values through which gradients flow."""
    # Tensors of other types stand for values of other stages.
    tensors = [leaf for _, leaf in leaves(value) if type(leaf) is Tensor]
    return [tensor for tensor in tensors if tensor.requires_grad]


def named_layers(root: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield layers with their names, and whether they are compiled in place.

    Layers are the items of lists of modules, what they consist of, and what stands beside the
    lists, such as an embedding. Inside of a compiled layer nothing has a range.
    """
    homes = {name for name, part in root.named_modules() if isinstance(part, _LISTS)}
    owners = {home.rpartition(".")[0] for home in homes}
    for name, part in root.named_modules():
        parent = name.rpartition(".")[0]
        is_near = parent in homes or parent.rpartition(".")[0] in homes
        is_beside = parent in owners and name != ""
        if name in homes or not (is_near or is_beside) or "_orig_mod" in name:
            continue
        yield name, part, part._compiled_call_impl is not None


class _RangedActions(ActionTimes):
    """Recorder that opens a range for each action instead of recording it."""

    def __init__(self, device: torch.device, ranges: Ranges) -> None:
        super().__init__(device)
        self._ranges = ranges

    @contextmanager
    def measure(self, action: Action) -> Iterator[None]:
        """Open the range of an action for the block."""
        with self._ranges.during(name_of(action)):
            yield


class CollectiveRanges:
    """Ranges of the collectives that this rank starts or waits for, by axis and purpose."""

    def __init__(self, ranges: Ranges, mesh: ParallelMesh) -> None:
        self._ranges = ranges
        self._journal = mesh.journal
        self._launcher = mesh.launcher
        #: Number of the last collective that has got a name, by axis.
        self._numbers = dict(mesh.journal.counts)

    def run(self, collective: Callable[[], object], written: Sequence[Tensor]) -> None:
        """Run a collective in a range; see ``CollectiveRecorder``."""
        with self._ranges.during(self._name(written)):
            self._launcher.wait(collective)

    def start(self, collective: Callable[[], Work], written: Sequence[Tensor]) -> Work:
        """Start a collective in a range; see ``CollectiveRecorder``."""
        name = self._name(written)
        with self._ranges.during(f"start {name}"):
            return _RangedWork(collective(), self._launcher, self._ranges, WAIT + name)

    def _name(self, written: Sequence[Tensor]) -> str:
        """Return axis, kind, purpose and size, as in ``tp all_reduce of layers.3.mlp, 0.5 MB``."""
        last = self._journal.last
        num_bytes = sum(tensor.nbytes for tensor in written)
        # A send writes nothing here.
        size = f", {num_bytes / 1e6:.3g} MB" if num_bytes else ""
        if last is None or last.number <= self._numbers.get(last.axis, 0):
            # A capture records its collectives, and counts none.
            return f"captured collective{size}"
        self._numbers[last.axis] = last.number
        axis = last.axis.removesuffix(NEIGHBOURS)
        purpose = self._ranges.purpose
        of = f" of {purpose}" if purpose else ""
        return f"{axis} {last.kind}{of}{size}"


class _RangedWork:
    """Handle of a collective whose wait has a range."""

    def __init__(self, work: Work, launcher: CollectiveLauncher, ranges: Ranges, name: str) -> None:
        self._work = work
        self._launcher = launcher
        self._ranges = ranges
        self._name = name

    def wait(self) -> Any:
        with self._ranges.during(self._name):
            return self._launcher.wait(self._work.wait)

    def is_completed(self) -> bool:
        return self._work.is_completed()
