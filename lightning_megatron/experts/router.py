"""The router of a mixture of experts: which experts each token goes to, and how much each of them counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_megatron.experts.balance import (
    balance_loss,
    entropy,
    microbatch_shares,
    num_choices,
    num_choices_of_sequences,
    update_bias_,
    z_loss,
)
from lightning_megatron.experts.choice import balanced_experts, choose_experts, expert_capacity, within_capacity
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.gradient_slot import slot_of
from lightning_megatron.layers.init import Initializer, sharded_parameter
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.shards import whole_range

#: Keeps scores that are all zero from being divided by zero.
_TINY = 1e-20


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
        entropy: Mean entropy of the tokens' scores, as parts of their sum (nats). A number.
        balance_loss: This rank's part of the auxiliary loss, coefficient included; None where there is none. The rule
            of parts, and what gives it a gradient, is in ``experts.balance``. A number.
        z_loss: The same of the loss of logits. A number.
    """

    probabilities: Tensor
    experts: Tensor
    counts: Tensor
    load: Tensor
    dropped: Tensor | None
    entropy: Tensor
    balance_loss: Tensor | None
    z_loss: Tensor | None


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
        logits = _ExactLinear.apply(self._jittered(hidden), self.weight).flatten(0, 1)
        scores = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()
        chosen = self._choose(scores)
        load = num_choices(chosen, config.num_experts)
        shares = scores if config.scoring == "softmax" else scores / (scores.sum(-1, keepdim=True) + _TINY)
        probabilities, experts, counts, dropped = self._weigh(logits, scores, chosen), chosen, load, None
        if config.capacity_factor is not None:
            capacity = expert_capacity(num_tokens, config)
            is_out = ~within_capacity(chosen, load, capacity, self.mesh)
            probabilities, experts = probabilities.masked_fill(is_out, 0.0), chosen.masked_fill(is_out, -1)
            counts, dropped = num_choices(experts, config.num_experts), is_out.sum(dtype=torch.int32)
        return Routing(
            probabilities=probabilities,
            experts=experts,
            counts=counts,
            load=load,
            dropped=dropped,
            entropy=entropy(shares),
            balance_loss=self._balance_loss(scores, shares, chosen, places) if self.training else None,
            z_loss=config.z_loss * z_loss(logits, num_tokens) if self.training and config.z_loss else None,
        )

    @torch.no_grad()
    def update_(self, load: Tensor) -> None:
        """Take in how the tokens of a whole step were spread, after it: change the biases and the shares of experts.

        Shapes: load ``(E,)`` integers.

        Args:
            load: The sum of ``Routing.load`` over all microbatches and ranks of the step, as ``step_load`` gives it;
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
        wide = hidden.to(_exact_dtype(hidden))
        num_places = wide.shape[0] * self._num_parts
        with self.mesh.random.fork("replicated", "router"):
            # For the places of all ranks, so that each token's numbers do not depend on who has it.
            uniform = torch.rand(num_places, *wide.shape[1:], dtype=wide.dtype, device=wide.device)
        if self.mesh.sequence_parallel:
            uniform = uniform.chunk(self._num_parts)[self.mesh.tp.rank]
        return wide * (1.0 + self.config.jitter * (2.0 * uniform - 1.0))

    def _choose(self, scores: Tensor) -> Tensor:
        if self.forced_balance:
            return balanced_experts(scores.shape[0], self.config, self.mesh)
        return choose_experts(scores, self.expert_bias, self.config)

    def _weigh(self, logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return what the outputs of chosen experts are multiplied by."""
        if not self.config.normalize_top_k:
            weights = scores.gather(-1, chosen)
        elif self.config.scoring == "softmax":
            # Equal to dividing by the sum, which biases or groups could make zero.
            weights = logits.gather(-1, chosen).softmax(-1)
        else:
            weights = scores.gather(-1, chosen)
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        return weights * self.config.score_scale

    def _balance_loss(self, scores: Tensor, shares: Tensor, chosen: Tensor, places: torch.Size) -> Tensor | None:
        config = self.config
        if not config.aux_loss:
            return None
        if self.step_shares is not None:
            of_choices = self.step_shares.to(shares.dtype)[None]
        else:
            if self.expert_bias is not None and not self.forced_balance:
                chosen = choose_experts(scores, None, config)
            if config.aux_loss_scope == "sequence":
                load = num_choices_of_sequences(chosen.unflatten(0, places), config.num_experts)
            else:
                load = num_choices(chosen, config.num_experts)[None]
            of_choices = microbatch_shares(load, self.mesh, shares.dtype)
        return config.aux_loss * balance_loss(shares.unflatten(0, places), of_choices, places.numel() * self._num_parts)


def _exact_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    kind = x.device.type
    # Meta has none.
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


class _ExactLinear(torch.autograd.Function):
    """Multiply in float32 or wider, and keep the operands in the dtype that they have."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.slot = slot_of(weight)
        dtype = torch.promote_types(_exact_dtype(hidden), weight.dtype)
        with _without_autocast(hidden):
            return F.linear(hidden.to(dtype), weight.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        grad, grad_hidden, grad_weight = grads[0], None, None
        with _without_autocast(grad):
            if ctx.needs_input_grad[0]:
                grad_hidden = (grad @ weight.to(grad.dtype)).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                rows = hidden.to(grad.dtype).flatten(0, -2)
                grad_weight = grad.flatten(0, -2).t() @ rows
        if grad_weight is not None and ctx.slot is not None:
            ctx.slot.add(grad_weight)
            return grad_hidden, None
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)
