"""What a mixture of experts is: plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.legal_values import divisors, one_of
from lightning_megatron.plan.settings import Count, NotNegative, Positive, Probability, settle

Scoring = Literal["softmax", "sigmoid"]
BalanceScope = Literal["microbatch", "sequence", "global"]
#: ``auto``: static sizes where a token goes to as many experts as there are ranks or more, else all-to-all.
Transport = Literal["auto", "all_gather", "all_to_all", "one_sided"]
ChosenTransport = Literal["none", "all_gather", "all_to_all", "one_sided"]

#: A group of experts is as good as this many of its best together.
BEST_OF_GROUP = 2


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Describe the mixture of experts that takes the place of the MLP in all or some layers.

    A router scores all experts for every token, in float32. The token goes to the ``top_k`` with the highest scores;
    their outputs are added up, each times its score.

    Args:
        num_experts: Experts of a layer (experts).
        top_k: Experts that a token goes to (experts).
        ffn_hidden_size: Inner features of an expert, which has the model's activation and no biases (elements).
        layers: Which layers have experts: an integer n says every n-th, the first of them being layer n - 1; otherwise
            one truth value for every layer. The other layers have an MLP.
        scoring: What makes scores of the router's logits: ``softmax`` over all experts, or ``sigmoid``.
        normalize_top_k: Whether the scores of the chosen experts are divided by their sum. With ``softmax`` they are
            then the softmax over the chosen ones alone.
        score_scale: The scores of the chosen experts are multiplied by it, last.
        num_groups: Equal groups of neighbouring experts; a token goes to experts of its best groups alone (groups).
        top_k_groups: How many groups that is. A group is as good as its two best experts together (groups).
        expert_bias: Whether every expert has a bias that is added to its score where experts are chosen, and there
            alone.
        expert_bias_rate: What is added to the biases of experts with fewer tokens than the mean after every step, and
            taken from those with more; 0 leaves them as they are.
        aux_loss: Coefficient of the loss that grows as tokens are spread unevenly; 0 means none.
        aux_loss_scope: Over which tokens that loss counts the load of experts: those of a microbatch of one data rank,
            of each sequence, or of the whole step before on all ranks (global).
        z_loss: Coefficient of the mean squared logarithm of the sum of the exponentials of logits; 0 means none.
        jitter: In training the router's input, not that of the experts, is multiplied by uniform random numbers of
            1 - jitter to 1 + jitter.
        capacity_factor: An expert takes at most this many times its even share of a microbatch's tokens, rounded up;
            later ones are dropped. None drops none.
        shared_ffn_hidden_size: Inner features of an MLP beside the experts that every token goes through; None means
            there is none (elements).
        shared_gate: Whether its output is multiplied by the sigmoid of a projection of the token to one number.

    Raises:
        ParallelPlanError: If a value is of another type or outside of its range, or numbers contradict each other.

    Source: Shazeer et al. 2017; Fedus et al. 2022 (aux_loss, capacity_factor, jitter); Zoph et al. 2022 (z_loss);
        DeepSeek-AI 2024 (groups, expert_bias, shared experts).
    """

    num_experts: Count
    top_k: Count
    ffn_hidden_size: Count
    layers: Count | tuple[bool, ...] = 1
    scoring: Scoring = "softmax"
    normalize_top_k: bool = True
    score_scale: Positive = 1.0
    num_groups: Count = 1
    top_k_groups: Count = 1
    expert_bias: bool = False
    expert_bias_rate: NotNegative = 0.0
    aux_loss: NotNegative = 0.0
    aux_loss_scope: BalanceScope = "microbatch"
    z_loss: NotNegative = 0.0
    jitter: Probability = 0.0
    capacity_factor: Positive | None = None
    shared_ffn_hidden_size: Count | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        settle(self, "experts.")
        rule = f"be at most num_experts ({self.num_experts})"
        self._require(self.top_k <= self.num_experts, "top_k", rule, "a token goes to each of them once")
        if not isinstance(self.layers, int):
            self._require(any(self.layers), "layers", "have a true value", "no layer would have experts")
        self._check_groups()
        needs_bias = "no expert has a bias (expert_bias is False)"
        self._require(self.expert_bias or not self.expert_bias_rate, "expert_bias_rate", "be 0", needs_bias)
        needs_shared = "there is nothing for it to multiply (shared_ffn_hidden_size is None)"
        is_gate_used = self.shared_ffn_hidden_size is not None or not self.shared_gate
        self._require(is_gate_used, "shared_gate", "be False", needs_shared)

    @property
    def has_losses(self) -> bool:
        """Tell whether routers have losses of their own."""
        return bool(self.aux_loss or self.z_loss)

    def is_in(self, layer: int) -> bool:
        """Tell whether a layer has experts."""
        return (layer + 1) % self.layers == 0 if isinstance(self.layers, int) else self.layers[layer]

    def check_num_layers(self, num_layers: int) -> None:
        """Refuse a model of another number of layers.

        Raises:
            ParallelPlanError: If ``layers`` does not say of every layer whether it has experts, or none has.
        """
        if isinstance(self.layers, int):
            rule = f"be at most num_layers ({num_layers})"
            self._require(self.layers <= num_layers, "layers", rule, "no layer would have experts")
            return
        if len(self.layers) != num_layers:
            raise ParallelPlanError(
                f"layers of experts must have a value for each of num_layers ({num_layers}): it has "
                f"{len(self.layers)}. Each layer has experts or an MLP. Give {num_layers} values, or an integer n for "
                "every n-th layer."
            )

    def _check_groups(self) -> None:
        legal = [n for n in divisors(self.num_experts) if n == 1 or self.num_experts // n >= BEST_OF_GROUP]
        holds = self.num_groups in legal
        self._require(
            holds, "num_groups", f"be {one_of(legal)}", f"num_experts ({self.num_experts}) are cut into equal groups"
        )
        rule = f"be at most num_groups ({self.num_groups})"
        self._require(self.top_k_groups <= self.num_groups, "top_k_groups", rule, "the best of them are taken")
        eligible = self.num_experts // self.num_groups * self.top_k_groups
        rule = f"be at most {eligible}"
        why = f"top_k_groups ({self.top_k_groups}) of num_groups ({self.num_groups}) have that many experts"
        self._require(self.top_k <= eligible, "top_k", rule, why)

    def _require(self, holds: bool, name: str, rule: str, why: str) -> None:
        if not holds:
            value = getattr(self, name)
            raise ParallelPlanError(f"{name} ({value}) of experts must {rule}, because {why}. Change {name}.")


def transport_over_ep(top_k: int, ep: int, transport: Transport = "auto", *, can_put: bool = False) -> ChosenTransport:
    """Say how tokens come to the ranks that share the experts of a layer.

    An all-gather brings a rank the tokens of ep - 1 others, an all-to-all top_k / ep times as many rows, puts those of
    an all-gather that are needed. Behind an all-gather or puts experts have memory for the worst routing, so that
    neither is chosen where an all-to-all brings fewer rows.

    Args:
        top_k: Experts that a token goes to (experts).
        ep: Ranks that share the experts (ranks).
        transport: What was asked for.
        can_put: Whether puts may take the place of an all-gather that is not asked for.
    """
    if ep == 1:
        return "none"
    if transport != "auto":
        return transport
    if top_k < ep:
        return "all_to_all"
    return "one_sided" if can_put else "all_gather"
