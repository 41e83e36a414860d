"""Moments of a step at which a stage may need most memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_megatron.plan.actions import Action
from lightning_megatron.plan.activations import ActivationCosts


@dataclass(frozen=True)
class StepPoint:
    """Moment of a step, with the memory in addition to parameters and optimizer state.

    Args:
        name: "forward", "backward" or "optimizer step".
        in_flight: Microbatches, over all chunks, whose activations exist.
        activations: Activations that layers keep for backward (bytes).
        loss: Logits, and tensors that the loss derives from them (bytes).
        workspace: Temporary buffers of the running layer or optimizer (bytes).
    """

    name: str
    in_flight: int
    activations: int
    loss: int
    workspace: int

    @property
    def size(self) -> int:
        """Return the sum of all parts (bytes)."""
        return self.activations + self.loss + self.workspace


@dataclass(frozen=True)
class ChunkCosts:
    """Bytes that one microbatch needs in one chunk of a stage.

    Args:
        kept: Activations that the chunk keeps for backward, those of its head included.
        waiting: What it keeps from the input half of a backward pass to the weight half.
        forward: Temporary buffers of the blocks' forward passes, in addition to ``kept``.
        backward: Temporary buffers of the blocks' backward passes, in addition to ``kept``.
        weight_half: Temporary buffers of the weight half.
        head: Activations that the final norm and the head keep; 0 without a head, like all others.
        head_backward: Temporary buffers of the head's backward pass.
        loss_kept: Activations that the loss keeps.
        loss_forward: Temporary buffers of the loss in forward, in addition to ``loss_kept``.
        loss_backward: Temporary buffers of the loss in backward, in addition to ``loss_kept``.
    """

    kept: int
    waiting: int
    forward: int
    backward: int
    weight_half: int
    head: int = 0
    head_backward: int = 0
    loss_kept: int = 0
    loss_forward: int = 0
    loss_backward: int = 0

    @classmethod
    def of(
        cls, blocks: Sequence[ActivationCosts], ends: ActivationCosts, *, has_head: bool
    ) -> ChunkCosts:
        """Return the costs of a chunk.

        Args:
            blocks: Costs of its blocks, in order.
            ends: Costs of the layers outside of the blocks.
            has_head: Whether the chunk ends with the model's head.
        """
        kept = sum(block.kept for block in blocks) + (ends.masks if blocks else 0)
        waiting = sum(block.waiting for block in blocks)
        forward, backward = _workspaces(blocks)
        if not has_head:
            return cls(kept, waiting, forward, backward, ends.weight_half)
        # The last inputs are still being copied to the host.
        leaving = 2 * max((block.on_host for block in blocks), default=0)
        return cls(
            kept + ends.head,
            waiting + ends.head_waiting,
            forward,
            backward,
            ends.weight_half,
            head=ends.head,
            head_backward=ends.head_backward,
            loss_kept=ends.loss_kept,
            loss_forward=ends.loss_forward + leaving,
            loss_backward=ends.loss_backward + leaving,
        )


def moments(actions: Iterable[Action], chunks: Sequence[ChunkCosts]) -> Iterator[StepPoint]:
    """Yield the moments of some actions of a stage, which starts without activations.

    Args:
        actions: Actions in execution order.
        chunks: Costs of the stage's chunks.
    """
    kept = 0
    num_kept = 0
    losses = 0
    for action in actions:
        costs = chunks[action.chunk]
        loss = costs.loss_kept
        # While the blocks run, the head has not started yet (forward) or is done (backward).
        not_kept = costs.head
        if action.kind == "W":
            yield StepPoint("backward", num_kept, kept, losses, costs.weight_half)
            kept -= costs.waiting
            num_kept -= 1
            continue
        if action.kind == "F":
            kept += costs.kept
            num_kept += 1
            losses += loss
            yield StepPoint("forward", num_kept, kept - not_kept, losses - loss, costs.forward)
            if loss:
                yield StepPoint("forward", num_kept, kept, losses + costs.loss_forward, 0)
            continue
        if loss:
            workspace = costs.head_backward
            yield StepPoint("backward", num_kept, kept, losses + costs.loss_backward, workspace)
        yield StepPoint("backward", num_kept, kept - not_kept, losses - loss, costs.backward)
        kept -= costs.kept
        losses -= loss
        if action.kind == "I":
            kept += costs.waiting
            yield StepPoint("backward", num_kept, kept, losses, costs.backward)
        else:
            num_kept -= 1


def _workspaces(blocks: Sequence[ActivationCosts]) -> tuple[int, int]:
    """Return the temporary bytes of a chunk's forward and backward pass.

    They are in addition to the activations that all blocks of the chunk keep.
    """
    # While a block runs, later blocks keep nothing: not yet in forward, no longer in backward.
    kept_bytes = [block.kept for block in blocks]
    later = [sum(kept_bytes[number + 1 :]) for number in range(len(blocks))]
    pairs = list(zip(blocks, later, strict=True))
    forward = max((block.layer_forward - kept for block, kept in pairs), default=0)
    return forward, max((block.layer_backward - kept for block, kept in pairs), default=0)
