"""Peak memory of one rank of a pipeline stage, by category."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Peak memory of one rank of a stage, by category (bytes).

    Args:
        stage: Position on the pp axis.
        moment: Moment of the peak: "forward", "backward" or "optimizer step".
        in_flight: Microbatches, over all chunks, whose activations exist at the peak.
        num_parameters: Elements of this rank's parameters.
        parameters: Parameters of the model.
        gradients: Buffers of the summed gradients.
        main_parameters: Main parameters of the optimizer.
        optimizer: Optimizer state.
        activations: Activations that layers keep for backward.
        loss: Logits, and tensors that the loss derives from them.
        workspace: Temporary buffers of the running layer or optimizer.
        communication: Transfers in flight between stages, symmetric buffers for tokens, and clones
            of experts with their gradients.
        libraries: Workspaces of libraries.
        casts: Weights in 8 bits that microbatches share, and magnitudes of earlier steps.
        graphs: Memory of CUDA graphs. The allocator also keeps the memory of the eager steps before
            the captures, which the other parts describe.
        host: Pinned host memory for inputs of blocks, which the peak does not include.
    """

    stage: int
    moment: str
    in_flight: int
    num_parameters: int
    parameters: int
    gradients: int
    main_parameters: int
    optimizer: int
    activations: int = 0
    loss: int = 0
    workspace: int = 0
    communication: int = 0
    libraries: int = 0
    casts: int = 0
    graphs: int = 0
    host: int = 0

    @property
    def static(self) -> int:
        """Return the bytes that are allocated during the whole training."""
        return self.parameters + self.gradients + self.main_parameters + self.optimizer

    @property
    def peak(self) -> int:
        """Return the sum of all categories."""
        return (
            self.static
            + self.activations
            + self.loss
            + self.workspace
            + self.communication
            + self.libraries
            + self.casts
            + self.graphs
        )
