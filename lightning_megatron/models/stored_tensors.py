"""Tensors that blocks store as attributes, which the user's code may read on other stages."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.cut_blocks import CutBlocks
from lightning_megatron.models.remote_tensor import RemoteTensor
from lightning_megatron.models.stage import StageCursor
from lightning_megatron.user_code import line_of_user


class StoredTensors:
    """Reads of tensors that blocks store as attributes, on a block's stage or on later ones."""

    def __init__(self, blocks: CutBlocks) -> None:
        self.blocks = blocks

    def read(self, index: int, path: str, target: Tensor) -> Tensor:
        """Return a tensor that a block stores, or a placeholder if another stage has the block.

        Args:
            path: Name of the tensor in the block.
            target: Tensor of the block, or of its copy on the meta device.
        """
        blocks = self.blocks
        cursor = blocks.cursor
        name = f"'{blocks.name}.{index}.{path}'"
        if cursor is None:
            return target
        owner, _, key = path.rpartition(".")
        is_buffer = key in blocks.meta_blocks[index].get_submodule(owner)._buffers
        if not is_buffer and index >= cursor.next_block:
            raise UnsupportedError(
                f"{name} is read before block {index} has run in this call of the model: "
                f"{line_of_user()}. Only one stage has the value of the previous call. Read it "
                "after the call of the block, or use pp=1."
            )
        value_name = f"{cursor.calls}:{blocks.name}.{index}.{path}"
        stage = blocks.boundaries.stage_of(index)
        if not cursor.probe and stage == blocks.virtual_stage:
            return target
        if value_name in cursor.known:
            return cursor.known[value_name]
        like = torch.empty(target.shape, dtype=target.dtype, device="meta")
        result = RemoteTensor.of(like, blocks, name, value_name)
        blocks.boundaries.record_origin(cursor, value_name, result, stage, at_start=True)
        return result

    def register_arrival(self, name: str) -> None:
        """Register a placeholder for a stored tensor that the step will receive.

        The name is that of a value between stages, without the number of the call; values that no
        block stores are ignored.
        """
        prefix = f"{self.blocks.name}."
        if name.startswith(prefix) and ":" not in name:
            index, _, path = name.removeprefix(prefix).partition(".")
            owner, _, key = path.rpartition(".")
            block = self.blocks.meta_blocks[int(index)]
            self.read(int(index), path, getattr(block.get_submodule(owner), key))

    def keep(self, cursor: StageCursor, index: int) -> None:
        """Keep the tensors that a block has stored, if later stages will read them."""
        prefix = f"{cursor.calls}:{self.blocks.name}.{index}."
        for value_name in cursor.plan.extra_names if cursor.plan is not None else ():
            if value_name.startswith(prefix):
                owner, _, key = value_name.removeprefix(prefix).rpartition(".")
                block = self.blocks.block(index)
                cursor.known[value_name] = getattr(block.get_submodule(owner), key)
