"""A list of blocks of any model, whose stages are on several ranks while the model's own code calls them."""

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
from lightning_megatron.models.beside_blocks import Elsewhere, HeldModule, LooseParameter, follow
from lightning_megatron.models.crossings import Crossings
from lightning_megatron.models.forms import Form, flatten
from lightning_megatron.models.stage import PipelinedModule, StageCursor, StageDone, StepPlan
from lightning_megatron.models.turns import Turn, Turns, check_checkpoint, check_listing, is_recomputing


class StagedBlocks(PipelinedModule):
    """Stand in the place of a torch.nn.ModuleList or torch.nn.Sequential, and hold only this rank's blocks of it.

    The code around it runs on every stage, as it was written. Blocks of other stages give tensors without values. The
    arguments of a stage's first block travel to it from the stage before, which ends its step there. Whatever else a
    stage reads of earlier ones travels with them, if a probe of the first step has found it.

    Blocks are named by their index, as before.

    Args:
        name: Name of the list, for errors.
        source: The list; the blocks of other stages lose their values.
        twins: A copy of every block on the meta device.
        layers: The blocks of each chunk of each stage, by index.
        mesh: The groups of this rank.
        ends: Modules beside the list that this stage alone holds, and whether with all that is in them.
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
        self.name, self.layers, self.calls_in_turn = (
            name,
            tuple(layers[mesh.pp.rank]),
            isinstance(source, nn.Sequential),
        )
        order = [layers[rank][chunk] for chunk in range(self.num_chunks) for rank in range(mesh.pp.size)]
        self.crossings = Crossings([blocks.start for blocks in order], len(source))
        # Not registered: neither are parameters of this list.
        self.ends, self.elsewhere = tuple(ends), dict(enumerate(twins))
        #: What would cut the module as it is cut, for errors.
        self.plan = {name: "blocks"}
        self.held: list[HeldModule] = []
        self.stand_ins: list[Elsewhere] = []
        self.loose: list[LooseParameter] = []
        for index, block in enumerate(source):
            if any(index in chunk for chunk in self.layers):
                self.add_module(str(index), block)
            else:
                # Whoever else holds the block shall not keep its values alive.
                block.to("meta")
        self.train(source.training)

    def __len__(self) -> int:
        """Count the blocks of all stages."""
        return len(self.elsewhere)

    def __iter__(self) -> Iterator[Turn]:
        """List the blocks of all stages."""
        return (Turn(self, index) for index in range(len(self)))

    def __getitem__(self, index: int | slice) -> Any:
        """Return a block, or a list of them."""
        found = list(self)[index]
        return Turns(found) if isinstance(found, list) and self.calls_in_turn else found

    @override
    def named_children(self) -> Iterator[tuple[str, Any]]:
        # Code of a step calls the blocks of all stages.
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
        """Return a block; one of another stage has no values."""
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
        """Run all blocks in turn, where the list was a torch.nn.Sequential."""
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
        """Return what is to be run.

        Raises:
            UnsupportedError: If nothing is, because the model is called outside of a step.
        """
        self.check_callable_whole()
        assert self.cursor is not None, "lists are cut only where there are several stages"
        self.crossings.open(self.cursor, self.here)
        return self.cursor

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block if it is one of the current virtual stage.

        Raises:
            UnsupportedError: If it is not its turn, or needs what is on another stage.
            StageDone: At the first block of the next stage in the last call, and when probed, at that of this stage.
        """
        if self.cursor is None and is_recomputing():
            return self._run_again(index, args, kwargs)
        cursor = self.current()
        self._count(cursor, index)
        stage, starts = self.crossings.stage_of(index), index in self.crossings.starts[1:]
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
            leaves = self.crossings.arrive(cursor, f"{name}:in", leaves, stage) if starts else leaves
            leaves = self._values(index, leaves)
            for n in self.forms.written.get(index, ()) if starts else ():
                # What has been received is a leaf of the graph.
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
        """Run a block in a backward pass, because code around it has put it into a checkpoint of torch."""
        found, structure = flatten((args, kwargs))
        leaves = [leaf.settled() if isinstance(leaf, AbsentTensor) else leaf for leaf in found]
        is_known = all((value is None) == (leaf is None) for value, leaf in zip(leaves, found, strict=True))
        if str(index) not in self._modules or not is_known:
            raise UnsupportedError(
                f"a function under torch.utils.checkpoint must call blocks of one pipeline stage only: block {index} "
                f"of {self.name!r} is run again where {sorted(self._modules)} are. Checkpoint every block by itself."
            )
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        return self._run(index, args, kwargs)

    def weight(self, index: int, path: str, found: nn.Parameter) -> Tensor:
        """Return a parameter of a block as it is for the code around the blocks: elsewhere it has a form alone."""
        if self.cursor is None or (not self.cursor.probe and str(index) in self._modules):
            return found
        name = f"the parameter '{self.name}.{index}.{path}', which is read at {line_of_user()},"
        return AbsentTensor.of(found.detach(), self, name)

    def left_behind(self, index: int, path: str, found: Tensor) -> Tensor:
        """Return a tensor that a block has left in itself, as it is for the code around the blocks.

        Args:
            index: The block.
            path: Name of the tensor in the block.
            found: The tensor of the block, or of its copy without values.

        Raises:
            UnsupportedError: If the block has not run in this call of the model.
        """
        cursor, name = self.cursor, f"'{self.name}.{index}.{path}'"
        if cursor is None:
            return found
        owner, _, key = path.rpartition(".")
        if key not in self.elsewhere[index].get_submodule(owner)._buffers and index >= cursor.turn:
            raise UnsupportedError(
                f"{name} is read before block {index} has run in this call of the model: {line_of_user()}. What the "
                "last call has left is on one stage alone. Read it after the block, or use pp=1."
            )
        point, stage = f"{cursor.calls}:{self.name}.{index}.{path}", self.crossings.stage_of(index)
        if not cursor.probe and stage == self.here:
            return found
        if point in cursor.known:
            return cursor.known[point]
        form = torch.empty(found.shape, dtype=found.dtype, device="meta")
        result = AbsentTensor.of(form, self, name, point)
        self.crossings.make(cursor, point, result, stage, at_start=True)
        return result

    def _foresee(self, cursor: StageCursor, points: Sequence[str]) -> None:
        """Know the forms of values that come, also of those that only code behind the blocks will read."""
        for kind, _, name in (point.partition(":") for point in points if point not in cursor.known):
            for one in self.stand_ins if kind == "parameter" else ():
                one.foresee(name)
            if kind != "parameter":
                self._foresee_left_behind(name)

    def _foresee_left_behind(self, name: str) -> None:
        if name.startswith(f"{self.name}.") and ":" not in name:
            index, _, path = name.removeprefix(f"{self.name}.").partition(".")
            owner, _, key = path.rpartition(".")
            self.left_behind(int(index), path, getattr(self.elsewhere[int(index)].get_submodule(owner), key))

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
                f"the blocks of {self.name!r} must be called once each, in order, where pp is above 1: {index} was "
                f"called where it was the turn of {cursor.turn}. Call all of them before the model is called again, "
                "without skipping blocks, or use pp=1."
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
                    f"the blocks of {self.name!r} must take as many tensors in every step where pp is above 1: block "
                    f"{index} took {type(found).__name__} in place of one. Another stage waits for it. Use pp=1."
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
        for found in (held.tensor(name) for held in self.held if name != point and held.stage == self.here):
            if found is not None:
                return found
        if point not in cursor.known:
            raise UnsupportedError(
                f"{point!r} must travel to a later stage, and is not whole here or not known by this name: a part of a "
                "module beside the blocks was called, or a weight that is cut over tp is read. Use pp=1."
            )
        return whole_of(cursor.known[point])

    def _run(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.training:
            return self.block(index)(*args, **kwargs)
        # What blocks draw must not repeat on every stage, nor differ over tp.
        self.mesh.random.seek(1 + index)
        with self.mesh.random.fork("replicated"):
            return self.block(index)(*args, **kwargs)

    def form_of(self, name: str, twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
        """Return the form of what a module gives that has no values here.

        Raises:
            UnsupportedError: If it depends on values.
        """
        try:
            form = self.forms.of_module(twin, self.mesh.device, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise UnsupportedError(
                f"{name!r} must give results whose shapes follow from those of its inputs, because another stage "
                f"computes them: without values it fails with {error}. Use pp=1."
            ) from error
        if form.problem:
            raise UnsupportedError(
                f"{name!r} must tell other pipeline stages all that it does by what it returns: it {form.problem}, or "
                "use pp=1."
            )
        return form

    def absent(self, form: Form, point: str, name: str, stage: int) -> Any:
        """Return a result without values, or the values where they have come.

        Args:
            form: Its form.
            point: The name under which its leaves travel.
            name: What it is, for errors.
            stage: The virtual stage that computes it.
        """
        cursor = self.current()

        def one(leaf: Tensor, n: int) -> Tensor:
            place = f"{point}:{n}"
            if place in cursor.known:
                return cursor.known[place]
            result = AbsentTensor.of(leaf, self, name, place)
            self.crossings.make(cursor, place, result, stage)
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
