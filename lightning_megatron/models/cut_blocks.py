"""Base class of lists of blocks that are cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.remote_tensor import RemoteTensor, fill_outputs
from lightning_megatron.models.shape_inference import OutputSpec
from lightning_megatron.models.stage import PipelinedModule, StageCursor, StepPlan
from lightning_megatron.models.stage_boundaries import StageBoundaries
from lightning_megatron.plan.partition import LayerPartition
from lightning_megatron.user_code import line_of_user


def leave_to_other_stage(twin: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Remove the tensors of a module of another stage from a state dict that is being loaded.

    Names that the module does not have stay, so that torch reports them as unexpected. The stage
    that holds the module reports missing ones. ``prefix`` ends with a dot.
    """
    for name in twin.state_dict(prefix=prefix):
        state.pop(name, None)


def _attribute(module: nn.Module, path: str) -> Tensor:
    owner, _, key = path.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(owner), key)
    return tensor


class CutBlocks(PipelinedModule):
    """Blocks of this rank, named by their indices, and copies of all blocks on the meta device.

    Placeholders represent modules and tensors of other stages. A subclass runs the blocks. The
    blocks of ``source`` that are on other stages move to the meta device, where ``twins`` are
    copies.
    """

    def __init__(
        self,
        name: str,
        source: nn.ModuleList | nn.Sequential,
        twins: Sequence[nn.Module],
        partition: LayerPartition,
        mesh: ParallelMesh,
    ) -> None:
        super().__init__(mesh)
        self.name = name
        self.partition = partition
        self.layers = partition.by_stage(mesh.layout.placement)[mesh.pp.rank]
        starts = [blocks.start for blocks in partition.ranges]
        self.boundaries = StageBoundaries(starts, len(source))
        # A dictionary keeps nn.Module from registering them as children.
        self.meta_blocks = dict(enumerate(twins))
        #: The current pipeline_plan of the model, for errors.
        self.plan = {name: "blocks"}
        for index, block in enumerate(source):
            if any(index in chunk for chunk in self.layers):
                self.add_module(str(index), block)
            else:
                # Other references to the block would otherwise keep its values in memory.
                block.to("meta")
        self.train(source.training)

    def __len__(self) -> int:
        """Return the number of blocks of all stages."""
        return len(self.meta_blocks)

    def block(self, index: int) -> nn.Module:
        """Return a block; a block of another stage is on the meta device."""
        block = self._modules.get(str(index))
        return self.meta_blocks[index] if block is None else block

    @override
    def train(self, mode: bool = True) -> CutBlocks:
        for block in self.meta_blocks.values():
            block.train(mode)
        super().train(mode)
        return self

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for index, twin in self.meta_blocks.items():
            if str(index) not in self._modules:
                leave_to_other_stage(twin, state_dict, f"{prefix}{index}.")
        super()._load_from_state_dict(state_dict, prefix, *args)

    @override
    def chunk_of(self, name: str) -> int | None:
        index = int(name.partition(".")[0])
        return next(chunk for chunk, layers in enumerate(self.layers) if index in layers)

    @property
    def virtual_stage(self) -> int:
        """Return the virtual stage that is running."""
        assert self.cursor is not None, "a step runs"
        return self.mesh.layout.placement.virtual_stage(self.mesh.pp.rank, self.cursor.chunk)

    def current(self) -> StageCursor:
        """Return the cursor of the running step, or raise if no step runs."""
        self.check_has_all_stages()
        assert self.cursor is not None, "lists are cut only if there are several stages"
        self.boundaries.receive_extras(self.cursor, self.virtual_stage)
        return self.cursor

    def parameter_of(self, index: int, path: str, parameter: nn.Parameter) -> Tensor:
        """Return a parameter of a block, or a placeholder if another stage has the block."""
        if self.cursor is None or (not self.cursor.probe and str(index) in self._modules):
            return parameter
        name = f"the parameter '{self.name}.{index}.{path}', which is read at {line_of_user()},"
        return RemoteTensor.of(parameter.detach(), self, name)

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block if it is on the current virtual stage; otherwise return placeholders."""
        raise NotImplementedError

    def stored_tensor(self, index: int, path: str, target: Tensor) -> Tensor:
        """Return a tensor that a block stores, or a placeholder if another stage has the block.

        Args:
            path: Name of the tensor in the block.
            target: Tensor of the block, or of its copy on the meta device.
        """
        cursor = self.cursor
        name = f"'{self.name}.{index}.{path}'"
        if cursor is None:
            return target
        owner, _, key = path.rpartition(".")
        is_buffer = key in self.meta_blocks[index].get_submodule(owner)._buffers
        if not is_buffer and index >= cursor.next_block:
            raise UnsupportedError(
                f"{name} is read before block {index} has run in this call of the model: "
                f"{line_of_user()}. Only one stage has the value of the previous call. Read it "
                "after the call of the block, or use pp=1."
            )
        value_name = f"{cursor.calls}:{self.name}.{index}.{path}"
        stage = self.boundaries.stage_of(index)
        if not cursor.probe and stage == self.virtual_stage:
            return target
        if value_name in cursor.known:
            return cursor.known[value_name]
        like = torch.empty(target.shape, dtype=target.dtype, device="meta")
        result = RemoteTensor.of(like, self, name, value_name)
        self.boundaries.record_origin(cursor, value_name, result, stage, at_start=True)
        return result

    def register_stored(self, name: str) -> None:
        """Register a placeholder for a tensor that a block stores and the step will receive.

        The name is that of a value between stages, without the number of the call; values that no
        block stores are ignored.
        """
        prefix = f"{self.name}."
        if name.startswith(prefix) and ":" not in name:
            index, _, path = name.removeprefix(prefix).partition(".")
            self.stored_tensor(int(index), path, _attribute(self.meta_blocks[int(index)], path))

    def keep_stored(self, cursor: StageCursor, index: int) -> None:
        """Keep the tensors that a block has stored, if later stages will read them."""
        prefix = f"{cursor.calls}:{self.name}.{index}."
        for value_name in cursor.plan.extra_names if cursor.plan is not None else ():
            if value_name.startswith(prefix):
                value = _attribute(self.block(index), value_name.removeprefix(prefix))
                cursor.known[value_name] = value

    def infer_outputs(
        self, name: str, twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OutputSpec:
        """Return the specification of the outputs of a module that is on another stage."""
        try:
            spec = self.shape_inference.of_module(twin, self.mesh.device, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise UnsupportedError(
                f"the shapes of the results of {name!r} must depend only on the shapes of its "
                "inputs, because another stage computes the values: a run without values fails "
                f"with {error}. Use pp=1."
            ) from error
        if spec.problem:
            raise UnsupportedError(
                f"{name!r} must return all its results, because pipeline stages send only returned "
                f"tensors to each other: it {spec.problem}, or use pp=1."
            )
        return spec

    def placeholders(self, spec: OutputSpec, value_name: str, name: str, stage: int) -> Any:
        """Return placeholders for a result of a virtual stage, or the values that have arrived.

        Stages send its tensors under ``value_name``; errors describe it by ``name``.
        """
        cursor = self.current()

        def placeholder_of(leaf: Tensor, number: int) -> Tensor:
            leaf_name = f"{value_name}:{number}"
            if leaf_name in cursor.known:
                return cursor.known[leaf_name]
            result = RemoteTensor.of(leaf, self, name, leaf_name)
            self.boundaries.record_origin(cursor, leaf_name, result, stage)
            return result

        return fill_outputs(spec, placeholder_of)

    @override
    def note_use(self, tensor: Tensor) -> None:
        cursor = self.current()
        if cursor.probe and cursor.plan is None:
            self.boundaries.record_use(cursor, tensor, self.boundaries.last)

    @override
    def plan_of(self, cursor: StageCursor, result: Any) -> StepPlan:
        return self.boundaries.plan(cursor, pytree.tree_leaves(result), self.plan)
