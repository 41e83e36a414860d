"""Base class of lists of blocks that are cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.remote_tensor import RemoteTensor, fill_outputs
from lightning_megatron.models.shape_inference import OutputSpec
from lightning_megatron.models.stage import PipelinedModule, StageCursor
from lightning_megatron.models.stage_boundaries import StageBoundaries
from lightning_megatron.models.step_plan import StepPlan
from lightning_megatron.plan.partition import LayerPartition
from lightning_megatron.user_code import line_of_user


def leave_to_other_stage(twin: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Remove the tensors of a module of another stage from a state dict that is being loaded.

    Names that the module does not have stay, so that torch reports them as unexpected. The stage
    that holds the module reports missing ones. ``prefix`` ends with a dot.
    """
    for name in twin.state_dict(prefix=prefix):
        state.pop(name, None)


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
