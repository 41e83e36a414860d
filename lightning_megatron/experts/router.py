"""The router of a mixture of experts: which experts each token goes to, and how much each of them counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from lightning_megatron.experts.balance import microbatch_load, num_choices, update_bias_
from lightning_megatron.experts.choice import expert_capacity, within_capacity
from lightning_megatron.experts.exact_linear import exact_dtype, exact_linear
from lightning_megatron.experts.router_losses import RouterLosses
from lightning_megatron.experts.scores import Scored, score_tokens
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.init import Initializer, sharded_parameter
from lightning_megatron.layers.kernel_choice import fused_kernels
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.shards import whole_range


@dataclass(frozen=True, eq=False)
class Routing:
    """Say where the tokens of this rank go. Everything is on the device.

    Letters: T tokens of this rank, by position and then by sequence; k choices of a token; E experts.

    Args:
        probabilities: What the outputs of a token's experts are multiplied by, in float32 (or float64); 0 where a
            choice is dropped. Shape ``(T, k)``.
        experts: The choices, best first; -1 where one is dropped. Shape ``(T, k)``, int64.
        counts: How many tokens each expert gets from this rank. Shape ``(E,)``, int32.
        load: How many would have gone there if none were dropped; what balances the experts. Shape ``(E,)``, int32.
        dropped: How many choices are dropped; None where experts take all. A number, int32.
        entropy_sum: Sum over tokens of the entropy of their scores, as parts of those of a token (nats). A number.
        losses: What the losses are made of. In evaluation there are none.
    """

    probabilities: Tensor
    experts: Tensor
    counts: Tensor
    load: Tensor
    dropped: Tensor | None
    entropy_sum: Tensor
    losses: RouterLosses

    @property
    def balance_loss(self) -> Tensor | None:
        """Compute this rank's part of the auxiliary loss, coefficient included; None where there is none. A number."""
        return self.losses.balance

    @property
    def z_loss(self) -> Tensor | None:
        """Compute the same of the loss of logits. A number."""
        return self.losses.z


class Router(nn.Module):
    """Choose experts for every token, in float32 or, for float64 inputs, in float64; also under autocast.

    Equal to Hugging Face's MixtralTopKRouter and Qwen3MoeTopKRouter (``softmax``), and DeepseekV3TopkRouter
    (``sigmoid``, groups, ``expert_bias``), for settings that mean the same.

    Losses are computed in training alone. Which choices the auxiliary loss counts depends on its scope:

    * ``microbatch`` and ``sequence``: those of this microbatch, chosen by scores without biases, dropped ones included.
    * ``global``: those of the whole step before this one, which the caller gives to :meth:`update_`. So a microbatch
      need not wait for later ones, and the loss depends neither on the layout nor on the schedule. In the first step
      the shares are even, and the loss has no gradient.

    Choices beyond an expert's capacity, if there is one, are dropped in the order of positions; the capacity is that of
    the tokens that the tp ranks have together.

    Shapes: input ``(S, B, D)`` or, under sequence parallelism, ``(S/tp, B, D)``; output a :class:`Routing`.

    Args:
        config: What the mixture is.
        hidden_size: Size of each token's vector (elements).
        mesh: The groups and random streams of this rank.
        initializer: How the weight starts.
        forced_balance: Whether experts are dealt out in turn instead of being chosen, for benchmarks.

    Communication: under sequence parallelism, or with cp, an all-reduce of counts over tp and cp for the auxiliary loss
    of a microbatch or sequence; under sequence parallelism an all-gather of counts over tp for a capacity.
    """

    expert_bias: Tensor | None
    step_shares: Tensor | None

    def __init__(
        self,
        config: ExpertsConfig,
        hidden_size: int,
        mesh: ParallelMesh,
        *,
        initializer: Initializer | None = None,
        forced_balance: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.mesh, self.forced_balance = config, mesh, forced_balance
        num_experts = config.num_experts
        self.weight = sharded_parameter(
            (num_experts, hidden_size),
            [whole_range(num_experts, mesh.tp.rank)],
            initializer or Initializer.normal(),
            # Under sequence parallelism each rank routes its own tokens only.
            partial=mesh.sequence_parallel,
        )
        # On a device by name: a model that is built on meta draws its parameters later, and has these already.
        even = torch.full((num_experts,), 1.0 / num_experts, dtype=torch.float32, device=mesh.device)
        self.register_buffer("expert_bias", torch.zeros_like(even) if config.expert_bias else None)
        counts_steps = config.aux_loss > 0.0 and config.aux_loss_scope == "global"
        #: How much of the choices of the last step each expert had.
        self.register_buffer("step_shares", even if counts_steps else None)

    def forward(self, hidden: Tensor) -> Routing:
        """Return where the tokens go."""
        config, places = self.config, hidden.shape[:2]
        # On all tp ranks together.
        num_tokens = places.numel() * self._num_parts
        kernels = fused_kernels(hidden)
        scored = self._score(hidden, kernels)
        load = scored.load[0] if scored.load.shape[0] == 1 else scored.load.sum(0, dtype=torch.int32)
        probabilities, experts, counts, dropped = scored.probabilities, scored.experts, load, None
        if config.capacity_factor is not None:
            capacity = expert_capacity(num_tokens, config)
            is_out = ~within_capacity(experts, load, capacity, self.mesh)
            probabilities, experts = probabilities.masked_fill(is_out, 0.0), experts.masked_fill(is_out, -1)
            counts, dropped = num_choices(experts, config.num_experts), is_out.sum(dtype=torch.int32)
        return Routing(
            probabilities=probabilities,
            experts=experts,
            counts=counts,
            load=load,
            dropped=dropped,
            entropy_sum=scored.entropy_sum,
            losses=self._losses(scored, num_tokens, kernels),
        )

    @property
    def follows_load(self) -> bool:
        """Tell whether the load of a step changes anything here."""
        return self.step_shares is not None or (self.expert_bias is not None and self.config.expert_bias_rate > 0.0)

    @torch.no_grad()
    def update_(self, load: Tensor) -> None:
        """Take in how the tokens of a whole step were spread, after it: change the biases and the shares of experts.

        Shapes: load ``(E,)`` integers.

        Args:
            load: The sum of ``Routing.load`` over all microbatches and ranks of the step, as ``StepStatistics`` has it;
                the same on all ranks.
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
                # The steps of biases would be rounded away in a half type.
                setattr(self, name, buffer.to(after.device))
        return self

    @property
    def _num_parts(self) -> int:
        # How many ranks have the tokens of one cp rank between them.
        return self.mesh.tp.size if self.mesh.sequence_parallel else 1

    def _jittered(self, hidden: Tensor) -> Tensor:
        if not self.training or not self.config.jitter:
            return hidden
        wide = hidden.to(exact_dtype(hidden))
        num_places = wide.shape[0] * self._num_parts
        with self.mesh.random.fork("replicated", "router"):
            # For the places of all ranks, so that each token's numbers do not depend on who has it.
            uniform = torch.rand(num_places, *wide.shape[1:], dtype=wide.dtype, device=wide.device)
        if self.mesh.sequence_parallel:
            uniform = uniform.chunk(self._num_parts)[self.mesh.tp.rank]
        return wide * (1.0 + self.config.jitter * (2.0 * uniform - 1.0))

    def _score(self, hidden: Tensor, kernels: ModuleType | None) -> Scored:
        config, (length, num_sequences) = self.config, hidden.shape[:2]
        logits = exact_linear(self._jittered(hidden), self.weight).flatten(0, 1)
        first_turn = None
        if self.forced_balance:
            # The ranks that have the other tokens of a sequence deal out the turns before and after.
            first_turn = length * num_sequences * config.top_k * self.mesh.tp.rank if self._num_parts > 1 else 0
        classes = num_sequences if config.aux_loss_scope == "sequence" else 1
        return score_tokens(logits, self.expert_bias, config, classes, first_turn, kernels)

    def _losses(self, scored: Scored, num_tokens: int, kernels: ModuleType | None) -> RouterLosses:
        of_choices, coefficient = self._of_choices(scored, num_tokens)
        square_coefficient = self.config.z_loss / num_tokens if self.training and self.config.z_loss else 0.0
        is_served = kernels is not None and scored.share_sums.dtype == torch.float32
        sums = scored.share_sums, of_choices, coefficient, scored.square_sum, square_coefficient
        return RouterLosses(*sums, kernels if is_served else None)

    def _of_choices(self, scored: Scored, num_tokens: int) -> tuple[Tensor | None, float]:
        """Return what sums of shares are multiplied by in the auxiliary loss, if there is one, and its coefficient."""
        config = self.config
        if not (self.training and config.aux_loss):
            return None, 0.0
        coefficient = config.aux_loss * config.num_experts / num_tokens
        if self.step_shares is not None:
            return self.step_shares, coefficient
        load = microbatch_load(scored.unbiased_load, self.mesh)
        # Every token has as many, so that nothing need be added up to turn counts into shares.
        return load, coefficient / (num_tokens * self.mesh.cp.size * config.top_k / load.shape[0])
