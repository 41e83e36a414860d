"""Memory of CUDA graphs: their private pools, and the tensors from which they read their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_megatron.plan.actions import Action
from lightning_megatron.plan.activations import ActivationCosts
from lightning_megatron.plan.cuda_graphs import CudaGraphs, SegmentScope
from lightning_megatron.plan.graph_slots import GraphSlots
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.plan.step_points import ChunkCosts, moments

#: Size of a token's id or label, and of its loss (bytes).
_ID = 8
_LOSS = 4
_MLP: tuple[SegmentScope, ...] = ("mlp",)
_AROUND_EXPERTS: tuple[SegmentScope, ...] = ("router", "preprocess", "combine")


@dataclass(frozen=True)
class GraphMemory:
    """Memory that the graphs of one stage need (bytes).

    Args:
        pools: Private pools of the graphs, which the allocator uses for nothing else.
        inputs: Tensors from which graphs read inputs, and gradients of their outputs.
    """

    pools: int = 0
    inputs: int = 0

    @property
    def total(self) -> int:
        """Return the sum of both."""
        return self.pools + self.inputs


def graph_memory(
    graphs: CudaGraphs,
    schedule: Schedule,
    stage: int,
    chunks: Sequence[Sequence[ActivationCosts]],
    ends: ActivationCosts,
    *,
    num_tokens: int,
    input_bytes: int,
    transfers: int,
) -> GraphMemory:
    """Estimate the memory of a stage's graphs.

    With mode ``segments`` every slot of a chunk has a pool for one microbatch: the captured
    activations, and the temporary buffers of the layer that needs most. Its inputs are copied into
    separate tensors, once for each set of its graphs. Layers that keep only their inputs have one
    pool for all microbatches if there are several stages. With mode ``full`` the size of the one
    pool is the peak of an eager step without the optimizer, and all microbatches are copied.

    Args:
        chunks: Costs of the blocks of every chunk.
        ends: Costs of the layers outside of the blocks.
        num_tokens: Tokens of a microbatch, those of all ranks of cp included (tokens).
        input_bytes: Size of a microbatch's inputs for each token (bytes).
        transfers: Transfers in flight between stages (bytes).

    Raises:
        UnsupportedError: As for :class:`GraphSlots`.
    """
    placement = schedule.placement
    first = placement.owner(0)
    last = placement.owner(placement.num_virtual_stages - 1)
    if graphs.mode == "full":
        costs = [
            ChunkCosts.of(blocks, ends, has_head=(stage, number) == last)
            for number, blocks in enumerate(chunks)
        ]
        peak = max(moment.size for moment in moments(schedule.actions(stage), costs))
        inputs = schedule.num_microbatches * num_tokens * input_bytes
        return GraphMemory(peak + transfers, inputs)
    parts = [
        _ChunkGraphs(
            graphs,
            blocks,
            ends,
            num_tokens,
            has_embedding=(stage, number) == first,
            has_head=(stage, number) == last,
        )
        for number, blocks in enumerate(chunks)
    ]
    return _segment_memory(schedule, stage, parts)


def _segment_memory(schedule: Schedule, stage: int, parts: Sequence[_ChunkGraphs]) -> GraphMemory:
    """Estimate the memory of graphs of segments, from the captured parts of each chunk."""
    slots = GraphSlots(schedule, stage)
    is_halved = any(action.kind == "W" for action in schedule.actions(stage))
    pools = inputs = shared = 0
    for number, part in enumerate(parts):
        peak = slots.peaks[number]
        # The first backward pass of a step has separate graphs in its slot.
        num_sets = peak + (schedule.num_microbatches > peak)
        if slots.can_share and part.keeps_only_inputs:
            # Activations outside of the graphs use the memory in which eager steps kept them.
            layers = replace(part, has_embedding=False, has_head=False)
            part = replace(part, blocks=())
            pools += layers.pool(is_halved)
            # The graphs of the second microbatch are captured before those of the first one are
            # complete.
            pools += sum(block.kept for block in layers.blocks) if peak > 1 else 0
            inputs += (1 + (schedule.num_microbatches > 1)) * layers.inputs
            shared = max(shared, layers.gradients + part.gradients * part.has_head)
        pools += peak * part.pool(is_halved)
        inputs += num_sets * part.inputs
        if is_halved:
            inputs += num_sets * part.gradients
        else:
            shared = max(shared, part.gradients)
    return GraphMemory(pools, inputs + shared)


@dataclass(frozen=True)
class _ChunkGraphs:
    """Captured parts of a chunk."""

    graphs: CudaGraphs
    blocks: Sequence[ActivationCosts]
    ends: ActivationCosts
    num_tokens: int
    has_embedding: bool
    has_head: bool

    def pool(self, is_halved: bool) -> int:
        """Return the pools of one slot: the memory of one microbatch from its F to its B or W."""
        captured = [self._captured(block) for block in self.blocks]
        costs = ChunkCosts.of(captured, self.ends, has_head=self._captures_head)
        forward = max(moment.size for moment in moments([Action("F", 0, 0)], [costs]))
        parts = (block.captured_attention for block in captured)
        layers = max([0, *parts, *(block.captured_network for block in captured)])
        head = costs.loss_backward + costs.head_backward
        if self.keeps_only_inputs:
            # The head has separate graphs, which have ended when those of the layers run.
            head += costs.loss_kept
            layers -= costs.head
        else:
            head += costs.loss_kept
            layers += costs.loss_kept
        backward = costs.kept + max(head, layers)
        if self._captures_embedding and not any(
            any(self._parts_of(block)) for block in self.blocks
        ):
            # The sum and its terms.
            forward += 2 * self.ends.boundary
        # The residual stream that a graph reads is among its inputs.
        read = self._num_streams * self.ends.boundary
        # Outputs of layers that no graph holds, and gradients of their inputs, have copies.
        has_calls = any(not any(self._parts_of(block)) for block in self.blocks)
        has_calls &= self._captures_embedding or self._captures_head
        pool = max(forward, backward) + 2 * has_calls * self.ends.boundary
        # What weight halves read is kept where the activations of a layer were.
        return pool + costs.weight_half * is_halved - read

    @property
    def keeps_only_inputs(self) -> bool:
        """Return whether the layers are captured, and keep only their inputs."""
        are_whole = bool(self.blocks) and all(block.is_whole for block in self.blocks)
        return are_whole and all(all(self._parts_of(block)) for block in self.blocks)

    @property
    def inputs(self) -> int:
        """Return the copied inputs of one set of graphs."""
        size = self._num_streams * self.ends.boundary
        size += _ID * self.num_tokens * (self._captures_embedding + self._captures_head)
        for block in self.blocks:
            attention, network = self._parts_of(block)
            if network and not attention:
                # The residual stream, and the output of attention that is added to it.
                size += 2 * self.ends.boundary
            if network and block.has_experts and not self._captures_experts(block):
                size += block.returned
        return size

    @property
    def _num_streams(self) -> int:
        """Count the residual streams that attention or the head reads from eager code."""
        # A graph reads the outputs of other graphs of its slot in place.
        is_written = self._captures_embedding
        count = 0
        for block in self.blocks:
            attention, network = self._parts_of(block)
            count += attention and not is_written
            is_written = network
        return count + (self._captures_head and not is_written)

    @property
    def gradients(self) -> int:
        """Return the copies of gradients that eager code, or another stage, computes."""
        if self._captures_head:
            return _LOSS * self.num_tokens
        return self.ends.boundary if any(any(self._parts_of(block)) for block in self.blocks) else 0

    @property
    def _captures_embedding(self) -> bool:
        return self.has_embedding and self.graphs.captures("embedding")

    @property
    def _captures_head(self) -> bool:
        return self.has_head and self.graphs.captures("head")

    def _captures_experts(self, block: ActivationCosts) -> bool:
        return self.graphs.captures("experts") and block.static_transport

    def _parts_of(self, block: ActivationCosts) -> tuple[bool, bool]:
        """Return whether attention is captured, and whether something of the network is."""
        attention = self.graphs.captures("attention")
        names = _AROUND_EXPERTS if block.has_experts else _MLP
        network = any(self.graphs.captures(name) for name in names)
        if block.has_experts and block.is_whole:
            network = network and self._captures_experts(block)
        if block.is_whole:
            attention = network = attention and network
        return attention, network

    def _captured(self, block: ActivationCosts) -> ActivationCosts:
        """Return the costs of the captured parts of a block."""
        attention, network = self._parts_of(block)
        kept = block.kept - block.network if attention else 0
        if network:
            kept += block.network - block.experts
        if block.has_experts and self._captures_experts(block) and not block.is_whole:
            kept += block.experts
        if not kept:
            block = replace(block, layer_forward=0, waiting=0)
        if not attention:
            block = replace(block, captured_attention=0)
        if not network:
            block = replace(block, captured_network=0)
        return replace(block, kept=kept)
