"""Pipeline stages for a list of blocks that the code of the user's model calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.linear.sequence_shard import gather_shard
from lightning_megatron.models.block_proxy import (
    BlockProxy,
    BlockProxyList,
    check_checkpoint,
    check_listing,
    is_recomputing,
)
from lightning_megatron.models.cut_blocks import CutBlocks
from lightning_megatron.models.outer_modules import (
    FirstStageParameter,
    LocalModule,
    RemoteModule,
    convert_meta,
)
from lightning_megatron.models.remote_tensor import RemoteTensor, values_of, with_values
from lightning_megatron.models.shape_inference import flatten
from lightning_megatron.models.stage import StageCursor, StageDone
from lightning_megatron.plan.partition import LayerPartition


class StagedBlocks(CutBlocks):
    """Replacement of a ``ModuleList`` or ``Sequential`` that has only this rank's blocks.

    The code around the list runs unchanged on every stage. Blocks of other stages return
    placeholders. A stage receives the arguments of its first block from the previous stage, whose
    step ends there. It also receives other values of earlier stages that it reads, which the probe
    of the first step has found. The names of blocks are their indices in the whole list.

    ``ends`` are the modules outside of the list that only this stage has, each with whether its
    submodules are included.
    """

    def __init__(
        self,
        name: str,
        source: nn.ModuleList | nn.Sequential,
        twins: Sequence[nn.Module],
        partition: LayerPartition,
        mesh: ParallelMesh,
        ends: Sequence[tuple[nn.Module, bool]] = (),
    ) -> None:
        super().__init__(name, source, twins, partition, mesh)
        self.is_sequential = isinstance(source, nn.Sequential)
        # A tuple keeps nn.Module from registering them as children.
        self.ends = tuple(ends)
        #: Modules outside of the list on this stage, and parameters of modules that contain it.
        self.outer_parts: list[LocalModule | FirstStageParameter] = []
        self.remote_modules: list[RemoteModule] = []

    def __iter__(self) -> Iterator[BlockProxy]:
        """Iterate over proxies of the blocks of all stages."""
        return (BlockProxy(self, index) for index in range(len(self)))

    def __getitem__(self, index: int | slice) -> Any:
        """Return a proxy of a block, or a list of proxies."""
        selected = list(self)[index]
        return (
            BlockProxyList(selected)
            if isinstance(selected, list) and self.is_sequential
            else selected
        )

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
            check_listing(self.name)
        yield from super().named_modules(*args, **kwargs)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StagedBlocks:
        for block in self.meta_blocks.values():
            convert_meta(block, fn)
        for part in self.outer_parts:
            part.convert_meta(fn)
        self.shape_inference.clear()
        super()._apply(fn, recurse)
        return self

    @override
    def stage_parameters(self) -> Iterator[nn.Parameter]:
        yield from self.parameters()
        for end, is_whole in self.ends:
            yield from end.parameters(recurse=is_whole)

    def forward(self, hidden: Any) -> Any:
        """Run all blocks one after the other, if the list was a ``torch.nn.Sequential``."""
        if not self.is_sequential:
            raise NotImplementedError("a torch.nn.ModuleList cannot be called.")
        return BlockProxyList(self)(hidden)

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block if it is on the current virtual stage; otherwise return placeholders.

        Raises:
            StageDone: In the last call, at the first block of the next stage, or in a probe at the
                first block of this stage.
        """
        if self.cursor is None and is_recomputing():
            return self._run_again(index, args, kwargs)
        cursor = self.current()
        self._count(cursor, index)
        stage = self.boundaries.stage_of(index)
        starts = index in self.boundaries.starts[1:]
        leaves, structure = flatten((args, kwargs))
        name = f"{cursor.calls}:{self.name}.{index}"
        for leaf in leaves:
            if isinstance(leaf, RemoteTensor):
                leaf.check_unwritten()
        if cursor.probe:
            check_checkpoint()
            if cursor.plan is not None and starts and stage == self.virtual_stage:
                self._register_arrivals(cursor, cursor.plan.extras.get(stage, ()))
            self.boundaries.record_inputs(
                cursor, self.virtual_stage, f"{name}:in", leaves, stage, starts
            )
        elif stage == self.virtual_stage:
            leaves = (
                self.boundaries.receive_inputs(cursor, f"{name}:in", leaves, stage)
                if starts
                else leaves
            )
            leaves = with_values(leaves, f"block {index} of {self.name!r} reads it")
            for number in self.shape_inference.written.get(index, ()) if starts else ():
                # A received tensor is a leaf of the graph, which the block must not write in place.
                leaves[number] = leaves[number].clone()
            args, kwargs = pytree.tree_unflatten(leaves, structure)
        elif starts and stage == self.virtual_stage + 1:
            self._send_inputs(cursor, index, leaves, stage)
        self.boundaries.keep_values(cursor, f"{name}:in", leaves)
        if cursor.probe or stage != self.virtual_stage:
            spec = self.infer_outputs(f"{self.name}.{index}", self.meta_blocks[index], args, kwargs)
            result = self.placeholders(
                spec, f"{name}:out", f"the result of '{self.name}.{index}'", stage
            )
            self.shape_inference.written[index] = spec.written
            for leaf in (leaves[number] for number in spec.written):
                if isinstance(leaf, RemoteTensor):
                    leaf.writer = f"'{self.name}.{index}'"
        else:
            result = self._run(index, args, kwargs)
            self.keep_stored(cursor, index)
        cursor.may_stop = index == len(self) - 1
        self.boundaries.keep_values(cursor, f"{name}:out", flatten(result)[0])
        if cursor.may_stop and cursor.is_last_call and self.boundaries.is_last_empty:
            self._enter_empty_stage(cursor)
        return result

    def _enter_empty_stage(self, cursor: StageCursor) -> None:
        """Enter, after the last block, a last virtual stage without blocks.

        This stage receives all values by name, because it has no block with inputs. The stage
        before it ends here, and so does the probe of this stage.
        """
        assert cursor.plan is not None, "only a step with a plan knows its last call"
        stage = self.boundaries.last
        names = cursor.plan.extras.get(stage, ())
        if cursor.probe and stage == self.virtual_stage:
            self._register_arrivals(cursor, names)
            self.boundaries.report_extras(cursor, names)
            raise StageDone
        if not cursor.probe and stage == self.virtual_stage + 1:
            cursor.sent += [self._value_to_send(cursor, name) for name in names]
            raise StageDone

    def _run_again(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Recompute a block in a backward pass, because the user's code has checkpointed it."""
        given_leaves, structure = flatten((args, kwargs))
        leaves, absent = values_of(given_leaves)
        if str(index) not in self._modules or absent:
            raise UnsupportedError(
                "a function under torch.utils.checkpoint must call only blocks of one pipeline "
                f"stage: block {index} of {self.name!r} is recomputed on the stage of blocks "
                f"{sorted(self._modules)}. Checkpoint every block separately."
            )
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        return self._run(index, args, kwargs)

    def _register_arrivals(self, cursor: StageCursor, value_names: Sequence[str]) -> None:
        """Register placeholders for values that will arrive, even those read after the blocks."""
        for kind, _, name in (
            value_name.partition(":")
            for value_name in value_names
            if value_name not in cursor.known
        ):
            for module in self.remote_modules if kind == "parameter" else ():
                module.register_arrival(name)
            if kind != "parameter":
                self.register_stored(name)

    def _count(self, cursor: StageCursor, index: int) -> None:
        if index == 0 and cursor.next_block in (0, len(self)):
            cursor.begin_call()
            cursor.next_block = 0
        if index != cursor.next_block:
            raise UnsupportedError(
                f"with pp above 1 the blocks of {self.name!r} must be called once each, in order: "
                f"block {index} was called instead of block {cursor.next_block}. Call every block "
                "once in each call of the model, or use pp=1."
            )
        cursor.next_block += 1

    def _send_inputs(
        self, cursor: StageCursor, index: int, leaves: Sequence[Any], stage: int
    ) -> None:
        plan = cursor.plan
        assert plan is not None, "only a probe has no plan"
        why = f"block {index} of {self.name!r} reads it on the next stage"
        for number in plan.inputs[cursor.calls, stage]:
            value = with_values(leaves[number], why)
            if not isinstance(value, Tensor):
                raise UnsupportedError(
                    f"with pp above 1 the blocks of {self.name!r} must take the same number of "
                    f"tensors in every step: block {index} took {type(value).__name__} instead of "
                    "a tensor, for which another stage waits. Pass a tensor in every step, or use "
                    "pp=1."
                )
            cursor.sent.append(gather_shard(value))
        if cursor.is_last_call:
            names = plan.extras.get(stage, ())
            cursor.sent += [self._value_to_send(cursor, name) for name in names]
            raise StageDone

    def _value_to_send(self, cursor: StageCursor, value_name: str) -> Tensor:
        kind, _, name = value_name.partition(":")
        for part in self.outer_parts if kind == "parameter" else ():
            value = part.tensor(name) if part.stage == self.virtual_stage else None
            if value is not None:
                return value
        if value_name not in cursor.known:
            raise UnsupportedError(
                f"{value_name!r} cannot be sent to a later stage, because it is sharded over tp or "
                "belongs to a submodule that was called outside of its module. Use pp=1."
            )
        return gather_shard(cursor.known[value_name])

    def _run(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.training:
            return self.block(index)(*args, **kwargs)
        # The random numbers of a block must depend on its index, and be equal on all tp ranks.
        self.mesh.random.seek(1 + index)
        with self.mesh.random.fork("replicated"):
            return self.block(index)(*args, **kwargs)

    @override
    @contextmanager
    def without_other_stages(self) -> Iterator[None]:
        cursor = self.current()
        replaced = [
            part for part in self.outer_parts if cursor.probe or part.stage != self.virtual_stage
        ]
        for part in replaced:
            part.hide()
        try:
            yield
        finally:
            for part in reversed(replaced):
                part.show()
