"""Pipeline stages for a list of blocks of any model, which the model's own code calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.sequence_shard import whole_of
from lightning_megatron.models.absent import AbsentTensor, filled, line_of_user
from lightning_megatron.models.around_blocks import Elsewhere, HeldModule, LooseParameter, follow
from lightning_megatron.models.crossings import Crossings
from lightning_megatron.models.forms import Form, flatten
from lightning_megatron.models.stage import PipelinedModule, StageCursor, StageDone, StepPlan
from lightning_megatron.models.turns import (
    Turn,
    Turns,
    check_checkpoint,
    check_listing,
    is_recomputing,
)


class StagedBlocks(PipelinedModule):
    """Replacement of a ``ModuleList`` or ``Sequential`` that has only this rank's blocks.

    The code around the list runs unchanged on every stage. Blocks of other stages return
    placeholders. The arguments of a stage's first block are received from the previous stage, which
    ends its step there. Other values that a stage reads from earlier stages are sent along, if the
    probe of the first step has found them. Blocks keep their indices as names.

    Args:
        name: Name of the list, for errors.
        source: List to replace; its blocks of other stages move to the meta device.
        twins: Copies of all blocks on the meta device.
        layers: Ranges of block indices, as ``layers[stage][chunk]``.
        mesh: The groups of this rank.
        ends: Modules next to the list that only this stage has, and whether with their submodules.
    """

    def __init__(
        self,
        name: str,
        source: nn.ModuleList | nn.Sequential,
        twins: Sequence[nn.Module],
        layers: Sequence[Sequence[range]],
        mesh: ParallelMesh,
        ends: Sequence[tuple[nn.Module, bool]] = (),
    ) -> None:
        super().__init__(mesh)
        self.name = name
        self.layers = tuple(layers[mesh.pp.rank])
        self.calls_in_turn = isinstance(source, nn.Sequential)
        order = [
            layers[rank][chunk] for chunk in range(self.num_chunks) for rank in range(mesh.pp.size)
        ]
        self.crossings = Crossings([blocks.start for blocks in order], len(source))
        # In a tuple and a dictionary, so that nn.Module does not register them as children.
        self.ends = tuple(ends)
        self.elsewhere = dict(enumerate(twins))
        #: The pipeline_plan that cuts the model in this way, for errors.
        self.plan = {name: "blocks"}
        self.held: list[HeldModule] = []
        self.stand_ins: list[Elsewhere] = []
        self.loose: list[LooseParameter] = []
        for index, block in enumerate(source):
            if any(index in chunk for chunk in self.layers):
                self.add_module(str(index), block)
            else:
                # Other references to the block must not keep its values in memory.
                block.to("meta")
        self.train(source.training)

    def __len__(self) -> int:
        """Return the number of blocks of all stages."""
        return len(self.elsewhere)

    def __iter__(self) -> Iterator[Turn]:
        """Iterate over proxies of the blocks of all stages."""
        return (Turn(self, index) for index in range(len(self)))

    def __getitem__(self, index: int | slice) -> Any:
        """Return a proxy of a block, or a list of proxies."""
        found = list(self)[index]
        return Turns(found) if isinstance(found, list) and self.calls_in_turn else found

    @override
    def named_children(self) -> Iterator[tuple[str, Any]]:
        # The user's step calls the blocks of all stages.
        if self.cursor is None:
            yield from super().named_children()
        else:
            yield from ((str(index), block) for index, block in enumerate(self))

    @override
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        if self.cursor is not None:
            check_listing(self)
        yield from super().named_modules(*args, **kwargs)

    def block(self, index: int) -> nn.Module:
        """Return a block; a block of another stage is on the meta device."""
        found = self._modules.get(str(index))
        return self.elsewhere[index] if found is None else found

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StagedBlocks:
        for block in self.elsewhere.values():
            follow(block, fn)
        beside: list[HeldModule | LooseParameter] = [*self.held, *self.loose]
        for one in beside:
            one.follow(fn)
        self.forms.clear()
        super()._apply(fn, recurse)
        return self

    @override
    def train(self, mode: bool = True) -> StagedBlocks:
        for block in self.elsewhere.values():
            block.train(mode)
        super().train(mode)
        return self

    @override
    def chunk_of(self, name: str) -> int | None:
        index = int(name.partition(".")[0])
        return next(chunk for chunk, layers in enumerate(self.layers) if index in layers)

    @override
    def stage_parameters(self) -> Iterator[nn.Parameter]:
        yield from self.parameters()
        for end, is_whole in self.ends:
            yield from end.parameters(recurse=is_whole)

    def forward(self, hidden: Any) -> Any:
        """Run all blocks one after the other, if the list was a ``torch.nn.Sequential``."""
        if not self.calls_in_turn:
            raise NotImplementedError("a torch.nn.ModuleList cannot be called.")
        for block in self:
            hidden = block(hidden)
        return hidden

    @property
    def here(self) -> int:
        """Return the virtual stage that runs now."""
        assert self.cursor is not None, "a step runs"
        return self.cursor.chunk * self.mesh.pp.size + self.mesh.pp.rank

    def current(self) -> StageCursor:
        """Return the cursor of the running step, or raise if no step runs."""
        self.check_callable_whole()
        assert self.cursor is not None, "lists are cut only where there are several stages"
        self.crossings.open(self.cursor, self.here)
        return self.cursor

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block if it is on the current virtual stage; otherwise return placeholders.

        Raises:
            UnsupportedError: If the blocks are called out of order, or values are on another stage.
            StageDone: At the next stage's first block in the last call; in a probe, at this
                stage's.
        """
        if self.cursor is None and is_recomputing():
            return self._run_again(index, args, kwargs)
        cursor = self.current()
        self._count(cursor, index)
        stage = self.crossings.stage_of(index)
        starts = index in self.crossings.starts[1:]
        leaves, structure = flatten((args, kwargs))
        name = f"{cursor.calls}:{self.name}.{index}"
        for leaf in leaves:
            if isinstance(leaf, AbsentTensor):
                leaf.check_unwritten()
        if cursor.probe:
            check_checkpoint()
            if cursor.plan is not None and starts and stage == self.here:
                self._foresee(cursor, cursor.plan.extras.get(stage, ()))
            self.crossings.enter(cursor, self.here, f"{name}:in", leaves, stage, starts)
        elif stage == self.here:
            leaves = (
                self.crossings.arrive(cursor, f"{name}:in", leaves, stage) if starts else leaves
            )
            leaves = self._values(index, leaves)
            for n in self.forms.written.get(index, ()) if starts else ():
                # A received tensor is a leaf of the graph, which the block must not write in place.
                leaves[n] = leaves[n].clone()
            args, kwargs = pytree.tree_unflatten(leaves, structure)
        elif starts and stage == self.here + 1:
            self._leave(cursor, index, leaves, stage)
        self.crossings.keep(cursor, f"{name}:in", leaves)
        if cursor.probe or stage != self.here:
            form = self.form_of(f"{self.name}.{index}", self.elsewhere[index], args, kwargs)
            result = self.absent(form, f"{name}:out", f"the result of '{self.name}.{index}'", stage)
            self.forms.written[index] = form.written
            for leaf in (leaves[n] for n in form.written):
                if isinstance(leaf, AbsentTensor):
                    leaf.writer = f"'{self.name}.{index}'"
        else:
            result = self._run(index, args, kwargs)
            self._keep_left_behind(cursor, index)
        cursor.may_stop = index == len(self) - 1
        self.crossings.keep(cursor, f"{name}:out", flatten(result)[0])
        return result

    def _run_again(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block again in a backward pass, because the user's code has checkpointed it."""
        found, structure = flatten((args, kwargs))
        leaves = [leaf.settled() if isinstance(leaf, AbsentTensor) else leaf for leaf in found]
        is_known = all(
            (value is None) == (leaf is None) for value, leaf in zip(leaves, found, strict=True)
        )
        if str(index) not in self._modules or not is_known:
            raise UnsupportedError(
                "a function under torch.utils.checkpoint must call blocks of one pipeline stage "
                f"only: block {index} of {self.name!r} is run again where {sorted(self._modules)} "
                "are. Checkpoint every block by itself."
            )
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        return self._run(index, args, kwargs)

    def weight(self, index: int, path: str, found: nn.Parameter) -> Tensor:
        """Return a parameter of a block, or a placeholder if another stage has the block."""
        if self.cursor is None or (not self.cursor.probe and str(index) in self._modules):
            return found
        name = f"the parameter '{self.name}.{index}.{path}', which is read at {line_of_user()},"
        return AbsentTensor.of(found.detach(), self, name)

    def left_behind(self, index: int, path: str, found: Tensor) -> Tensor:
        """Return a tensor that a block stores in itself, or a placeholder if another stage has it.

        Args:
            index: Index of the block.
            path: Name of the tensor in the block.
            found: Tensor of the block, or of its copy on the meta device.

        Raises:
            UnsupportedError: If the block has not run in this call of the model.
        """
        cursor = self.cursor
        name = f"'{self.name}.{index}.{path}'"
        if cursor is None:
            return found
        owner, _, key = path.rpartition(".")
        if key not in self.elsewhere[index].get_submodule(owner)._buffers and index >= cursor.turn:
            raise UnsupportedError(
                f"{name} is read before block {index} has run in this call of the model: "
                f"{line_of_user()}. What the last call has left is on one stage alone. Read it "
                "after the block, or use pp=1."
            )
        point = f"{cursor.calls}:{self.name}.{index}.{path}"
        stage = self.crossings.stage_of(index)
        if not cursor.probe and stage == self.here:
            return found
        if point in cursor.known:
            return cursor.known[point]
        form = torch.empty(found.shape, dtype=found.dtype, device="meta")
        result = AbsentTensor.of(form, self, name, point)
        self.crossings.make(cursor, point, result, stage, at_start=True)
        return result

    def _foresee(self, cursor: StageCursor, points: Sequence[str]) -> None:
        """Register placeholders for values that will arrive, also those read after the blocks."""
        for kind, _, name in (
            point.partition(":") for point in points if point not in cursor.known
        ):
            for one in self.stand_ins if kind == "parameter" else ():
                one.foresee(name)
            if kind != "parameter":
                self._foresee_left_behind(name)

    def _foresee_left_behind(self, name: str) -> None:
        if name.startswith(f"{self.name}.") and ":" not in name:
            index, _, path = name.removeprefix(f"{self.name}.").partition(".")
            owner, _, key = path.rpartition(".")
            self.left_behind(
                int(index), path, getattr(self.elsewhere[int(index)].get_submodule(owner), key)
            )

    def _keep_left_behind(self, cursor: StageCursor, index: int) -> None:
        prefix = f"{cursor.calls}:{self.name}.{index}."
        for point in cursor.plan.travellers if cursor.plan is not None else ():
            if point.startswith(prefix):
                owner, _, key = point.removeprefix(prefix).rpartition(".")
                cursor.known[point] = getattr(self.block(index).get_submodule(owner), key)

    def _count(self, cursor: StageCursor, index: int) -> None:
        if index == 0 and cursor.turn in (0, len(self)):
            cursor.begin_call()
            cursor.turn = 0
        if index != cursor.turn:
            raise UnsupportedError(
                f"the blocks of {self.name!r} must be called once each, in order, where pp is "
                f"above 1: {index} was called where it was the turn of {cursor.turn}. Call all of "
                "them before the model is called again, without skipping blocks, or use pp=1."
            )
        cursor.turn += 1

    def _values(self, index: int, leaves: Sequence[Any]) -> list[Any]:
        why = f"block {index} of {self.name!r} reads it"
        return [leaf.settle(why) if isinstance(leaf, AbsentTensor) else leaf for leaf in leaves]

    def _leave(self, cursor: StageCursor, index: int, leaves: Sequence[Any], stage: int) -> None:
        plan = cursor.plan
        assert plan is not None, "only a probe has no plan"
        why = f"block {index} of {self.name!r} reads it on the next stage"
        for number in plan.inputs[cursor.calls, stage]:
            leaf = leaves[number]
            found = leaf.settle(why) if isinstance(leaf, AbsentTensor) else leaf
            if not isinstance(found, Tensor):
                raise UnsupportedError(
                    f"the blocks of {self.name!r} must take as many tensors in every step where pp "
                    f"is above 1: block {index} took {type(found).__name__} in place of one. "
                    "Another stage waits for it. Use pp=1."
                )
            cursor.sent.append(whole_of(found))
        if cursor.is_last_call:
            for point in plan.extras.get(stage, ()):
                cursor.sent.append(self._known(cursor, point))
            raise StageDone

    def _known(self, cursor: StageCursor, point: str) -> Tensor:
        for one in self.loose:
            if point == one.point and self.here == 0:
                return one.value
        name = point.removeprefix("parameter:")
        for found in (
            held.tensor(name) for held in self.held if name != point and held.stage == self.here
        ):
            if found is not None:
                return found
        if point not in cursor.known:
            raise UnsupportedError(
                f"{point!r} must be sent to a later stage, but is sharded or not known by this "
                "name: a submodule of a module outside of the blocks was called, or a weight that "
                "is cut over tp is read. Use pp=1."
            )
        return whole_of(cursor.known[point])

    def _run(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.training:
            return self.block(index)(*args, **kwargs)
        # The random numbers of a block must depend on its index, and be the same on all tp ranks.
        self.mesh.random.seek(1 + index)
        with self.mesh.random.fork("replicated"):
            return self.block(index)(*args, **kwargs)

    def form_of(
        self, name: str, twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Form:
        """Return the form of the result of a module that is on another stage.

        Raises:
            UnsupportedError: If the form depends on values.
        """
        try:
            form = self.forms.of_module(twin, self.mesh.device, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise UnsupportedError(
                f"{name!r} must give results whose shapes follow from those of its inputs, because "
                f"another stage computes them: without values it fails with {error}. Use pp=1."
            ) from error
        if form.problem:
            raise UnsupportedError(
                f"{name!r} must tell other pipeline stages all that it does by what it returns: it "
                f"{form.problem}, or use pp=1."
            )
        return form

    def absent(self, form: Form, point: str, name: str, stage: int) -> Any:
        """Return placeholders for a result, or the values that have arrived.

        Args:
            form: Form of the result.
            point: Name under which its leaves are sent between stages.
            name: Description of the result, for errors.
            stage: Virtual stage that computes the result.
        """
        cursor = self.current()

        def one(leaf: Tensor, n: int) -> Tensor:
            leaf_point = f"{point}:{n}"
            if leaf_point in cursor.known:
                return cursor.known[leaf_point]
            result = AbsentTensor.of(leaf, self, name, leaf_point)
            self.crossings.make(cursor, leaf_point, result, stage)
            return result

        return filled(form, one)

    @override
    @contextmanager
    def hidden(self) -> Iterator[None]:
        cursor = self.current()
        held: list[HeldModule | LooseParameter] = [*self.held, *self.loose]
        beside = [one for one in held if cursor.probe or one.stage != self.here]
        for one in beside:
            one.hide()
        for parameter in self.loose:
            self.crossings.make(cursor, parameter.point, parameter.absent, 0)
        try:
            yield
        finally:
            for one in reversed(beside):
                one.show()

    @override
    def note_use(self, tensor: AbsentTensor) -> None:
        cursor = self.current()
        if cursor.probe and cursor.plan is None:
            self.crossings.need(cursor, tensor, self.crossings.last)

    @override
    def plan_of(self, cursor: StageCursor, result: Any) -> StepPlan:
        return self.crossings.plan(cursor, pytree.tree_leaves(result), self.plan)
