"""Shared expert: an MLP for all tokens, in addition to the routed experts."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fp8.magnitude import Magnitude
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.parameters.init import Initializer
from lightning_megatron.layers.replicated import ReplicatedLinear
from lightning_megatron.plan.model_shape import Activation
from lightning_megatron.shapes import Float


class SharedExpert(MLP):
    """MLP that is applied to every token, with an optional sigmoid gate.

    Equal to ``MLP(x)`` without biases. With a gate it equals ``sigmoid(gate(x)) * MLP(x)``, as in
    Qwen2-MoE, where ``gate`` projects a token to one number.

    Raises:
        ParallelPlanError: If the inner features do not divide by tp.

    Communication: that of the MLP.

    Source: DeepSeek-AI 2024, section 2.1.2; the gate is Qwen2-MoE's.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        mesh: ParallelMesh,
        *,
        has_gate: bool = False,
        activation: Activation = "swiglu",
        initializer: Initializer | None = None,
        output_initializer: Initializer | None = None,
    ) -> None:
        super().__init__(
            hidden_size,
            ffn_hidden_size,
            mesh,
            activation=activation,
            bias=False,
            initializer=initializer,
            output_initializer=output_initializer,
        )
        self.gate: ReplicatedLinear | None = None
        if has_gate:
            # Under sequence parallelism each rank applies the gate to its own tokens only.
            self.gate = ReplicatedLinear(
                hidden_size,
                1,
                mesh,
                partial=mesh.sequence_parallel,
                bias=False,
                initializer=initializer,
            )

    def forward(
        self,
        hidden: Float[Tensor, "seq_local batch hidden"],
        magnitude: Magnitude | None = None,
    ) -> Float[Tensor, "seq_local batch hidden"]:
        """Return the output for each token; ``magnitude`` is that of the MLP."""
        output = super().forward(hidden, magnitude)
        return output if self.gate is None else F.sigmoid(self.gate(hidden)) * output
