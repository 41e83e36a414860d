"""Router of a mixture of experts: selected experts of each token, and their probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from lightning_megatron.experts.routing.balance import microbatch_load, update_bias_
from lightning_megatron.experts.routing.exact_linear import exact_dtype, exact_linear
from lightning_megatron.experts.routing.router_losses import RouterLosses
from lightning_megatron.experts.routing.scores import RouterOutput, score_tokens
from lightning_megatron.experts.routing.selection import expert_capacity, within_capacity
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.layers.parameters.init import Initializer, sharded_parameter
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.shards import full_range
from lightning_megatron.shapes import Float, Int, Shaped


@dataclass(frozen=True, eq=False)
class Routing:
    """Routing of this rank's tokens, on the device. Experts are int64, counts int32.

    Args:
        probabilities: Factors of the experts' outputs, in float32 (or float64); 0 for dropped
            selections.
        experts: Selected experts, best first; -1 for dropped selections.
        load: Number of selections of each expert, including dropped ones.
        dropped: Number of dropped selections; None without a capacity.
        entropy_sum: Sum over tokens of the entropy of their normalized scores (nats).
        losses: Losses of the router for this microbatch; there are none outside of training.
    """

    probabilities: Float[Tensor, "tokens top_k"]
    experts: Int[Tensor, "tokens top_k"]
    load: Int[Tensor, "experts"]
    dropped: Int[Tensor, ""] | None
    entropy_sum: Float[Tensor, ""]
    losses: RouterLosses


class Router(nn.Module):
    """Choose the experts of each token.

    The router computes in float32, or in float64 for float64 inputs, also under autocast. Equal to
    Hugging Face's MixtralTopKRouter, Qwen3MoeTopKRouter and GptOssTopKRouter (``softmax``, the last
    with ``router_bias``) and DeepseekV3TopkRouter (``sigmoid``, groups, ``expert_bias``) for the
    corresponding settings.

    Losses are computed in training only. The scope of the auxiliary loss sets which selections it
    counts:

    * ``microbatch`` and ``sequence``: the selections of this microbatch by scores without biases,
      including dropped ones.
    * ``global``: the selections of the whole previous step, which the caller passes to
      :meth:`update_`. A microbatch then need not wait for later ones, and the loss depends neither
      on the layout nor on the schedule. In the first step the shares are even, and the loss has no
      gradient.

    If experts have a capacity, selections beyond it are dropped, those of later positions first.
    The capacity is computed from the tokens of all tp ranks together.

    Communication: for the auxiliary loss of a microbatch or sequence, an all-reduce of counts over
        tp (under sequence parallelism) and cp. For a capacity, under sequence parallelism, an
        all-gather of counts over tp.
    """

    expert_bias: Float[Tensor, "experts"] | None
    step_shares: Float[Tensor, "experts"] | None
    bias: nn.Parameter | None

    def __init__(
        self,
        config: ExpertsConfig,
        hidden_size: int,
        mesh: ParallelMesh,
        *,
        initializer: Initializer | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh
        num_experts = config.num_experts
        here = [full_range(num_experts, mesh.tp.rank)]
        drawn = initializer or Initializer.normal()
        # Under sequence parallelism each rank routes its own tokens only.
        of_tokens = {"partial": mesh.sequence_parallel}
        self.weight = sharded_parameter((num_experts, hidden_size), here, drawn, **of_tokens)
        self.bias = None
        if config.router_bias:
            self.bias = sharded_parameter((num_experts,), here, drawn, **of_tokens)
        # The tensor is on an explicit device: a model on the meta device initialises its parameters
        # later, but not its buffers.
        equal_shares = torch.full(
            (num_experts,), 1.0 / num_experts, dtype=torch.float32, device=mesh.device
        )
        self.register_buffer(
            "expert_bias", torch.zeros_like(equal_shares) if config.expert_bias else None
        )
        counts_steps = config.aux_loss > 0.0 and config.aux_loss_scope == "global"
        #: Share of the last step's selections that each expert had.
        self.register_buffer("step_shares", equal_shares if counts_steps else None)

    def forward(self, hidden: Float[Tensor, "seq_local batch hidden"]) -> Routing:
        """Return the routing of the tokens."""
        config = self.config
        # Under sequence parallelism the losses and the capacity refer to the tokens of all tp
        # ranks.
        num_tokens = hidden.shape[:2].numel() * self._num_parts
        kernels = fused_kernels(hidden)
        scored = self._score(hidden, kernels)
        load = (
            scored.load[0] if scored.load.shape[0] == 1 else scored.load.sum(0, dtype=torch.int32)
        )
        probabilities = scored.probabilities
        experts = scored.experts
        dropped = None
        if config.capacity_factor is not None:
            capacity = expert_capacity(num_tokens, config)
            is_out = ~within_capacity(experts, load, capacity, self.mesh)
            probabilities = probabilities.masked_fill(is_out, 0.0)
            experts = experts.masked_fill(is_out, -1)
            dropped = is_out.sum(dtype=torch.int32)
        return Routing(
            probabilities=probabilities,
            experts=experts,
            load=load,
            dropped=dropped,
            entropy_sum=scored.entropy_sum,
            losses=self._losses(scored, num_tokens, kernels),
        )

    @property
    def follows_load(self) -> bool:
        """Return whether :meth:`update_` changes anything."""
        return self.step_shares is not None or (
            self.expert_bias is not None and self.config.expert_bias_rate > 0.0
        )

    @torch.no_grad()
    def update_(self, load: Shaped[Tensor, "experts"]) -> None:
        """Update the expert biases and the shares of selections from the load of a whole step.

        ``load`` is the sum of ``Routing.load`` over all microbatches and ranks of the step, from
        ``StepStatistics``; the same on all ranks.
        """
        if self.expert_bias is not None and self.config.expert_bias_rate:
            update_bias_(self.expert_bias, load, self.config.expert_bias_rate)
        if self.step_shares is not None:
            self.step_shares.copy_(load / load.sum().clamp(min=1))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = getattr(self, name)
            if after.dtype.itemsize < buffer.dtype.itemsize:
                # In a half type the small updates of biases would be rounded away.
                setattr(self, name, buffer.to(after.device))
        return self

    @property
    def _num_parts(self) -> int:
        # Number of ranks that share the tokens of one cp rank.
        return self.mesh.tp.size if self.mesh.sequence_parallel else 1

    def _jittered(self, hidden: Tensor) -> Tensor:
        if not self.training or not self.config.jitter:
            return hidden
        wide = hidden.to(exact_dtype(hidden))
        num_positions = wide.shape[0] * self._num_parts
        with self.mesh.random.fork("replicated", "router"):
            # Draws for the tokens of all ranks make each token's noise independent of the layout.
            uniform = torch.rand(
                num_positions, *wide.shape[1:], dtype=wide.dtype, device=wide.device
            )
        if self.mesh.sequence_parallel:
            uniform = uniform.chunk(self._num_parts)[self.mesh.tp.rank]
        return wide * (1.0 + self.config.jitter * (2.0 * uniform - 1.0))

    def _score(self, hidden: Tensor, kernels: ModuleType | None) -> RouterOutput:
        config = self.config
        logits = exact_linear(self._jittered(hidden), self.weight).flatten(0, 1)
        if self.bias is not None:
            logits = logits + self.bias.to(logits.dtype)
        classes = hidden.shape[1] if config.aux_loss_scope == "sequence" else 1
        return score_tokens(logits, self.expert_bias, config, classes, kernels)

    def _losses(
        self, scored: RouterOutput, num_tokens: int, kernels: ModuleType | None
    ) -> RouterLosses:
        load_factors, coefficient = self._load_factors(scored, num_tokens)
        square_coefficient = (
            self.config.z_loss / num_tokens if self.training and self.config.z_loss else 0.0
        )
        is_served = kernels is not None and scored.share_sums.dtype == torch.float32
        return RouterLosses(
            scored.share_sums,
            load_factors,
            coefficient,
            scored.square_sum,
            square_coefficient,
            kernels if is_served else None,
        )

    def _load_factors(self, scored: RouterOutput, num_tokens: int) -> tuple[Tensor | None, float]:
        """Return the auxiliary loss's factors of ``share_sums``, or None, and its coefficient."""
        config = self.config
        if not (self.training and config.aux_loss):
            return None, 0.0
        coefficient = config.aux_loss * config.num_experts / num_tokens
        if self.step_shares is not None:
            return self.step_shares, coefficient
        load = microbatch_load(scored.unbiased_load, self.mesh)
        # Every token has top_k selections, so the total that turns counts into shares is known
        # without a sum.
        return load, coefficient / (num_tokens * self.mesh.cp.size * config.top_k / load.shape[0])
