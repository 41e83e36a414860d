"""Configuration of a mixture of experts, the rows that transports of its tokens move, and the sizes
of the buffers that contain them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.settings import (
    Count,
    NotNegative,
    Positive,
    Probability,
    coerce_fields,
    divisors,
    join_or,
)

Scoring = Literal["softmax", "sigmoid"]
BalanceScope = Literal["microbatch", "sequence", "global"]
#: ``auto`` means puts between GPUs that can, else an all-gather; an all-to-all if top_k < ep.
Transport = Literal["auto", "all_gather", "all_to_all", "one_sided"]
ChosenTransport = Literal["none", "all_gather", "all_to_all", "one_sided"]
#: Limits are multiples of the tile of a grouped product (rows).
ROW_MULTIPLE = 128
#: Growth of a factor relative to the one that would have been enough.
_GROWTH = 1.1
#: Alignment of the widest load of a GPU (bytes).
_ALIGNMENT = 16
#: Size of an expert index, an int64 (bytes).
_NUMBER = 8


class RoutingSum:
    """Index of a sum; the number of selections of each expert starts at :attr:`LOAD`.

    The indices are plain integers, because ``torch.compile`` cannot index with the members of an
    enumeration.
    """

    DROPPED: Final = 0
    ENTROPY: Final = 1
    BALANCE_LOSS: Final = 2
    Z_LOSS: Final = 3
    NUM_MICROBATCHES: Final = 4
    LOAD: Final = 5


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Mixture of experts that replaces the MLP in all or some layers.

    A router scores all experts for every token, in float32. The token is sent to the ``top_k``
    experts with the highest scores. Their outputs are summed, each multiplied by its score.

    Args:
        num_experts: Number of experts of a layer (experts).
        top_k: Number of experts for each token (experts).
        ffn_hidden_size: Inner features of an expert, which has the model's activation (elements).
        layers: Layers with experts. An integer n means every n-th layer, starting with layer n - 1.
            A tuple has one truth value for each layer. All other layers have an MLP.
        scoring: Function that turns the router's logits into scores: ``softmax`` over all experts,
            or ``sigmoid``.
        normalize_top_k: Whether the scores of the selected experts are divided by their sum. With
            ``softmax`` this equals a softmax over the selected experts alone.
        score_scale: Factor that the scores of the selected experts are multiplied by, after
            normalization.
        num_groups: Number of equal groups of neighbouring experts; a token is sent only to experts
            of its best groups (groups).
        top_k_groups: Number of groups that are selected for a token (groups).
        best_of_group: Number of its best experts whose scores are summed as the score of a group
            (experts).
        expert_bias: Whether every expert has a bias that is added to its score only for the
            selection of experts.
        expert_bias_rate: Step by which biases change after every optimizer step: up for experts
            with fewer tokens than the mean, down for those with more. 0 leaves them unchanged.
        aux_loss: Coefficient of the load-balancing loss, which grows with the imbalance of the
            experts; 0 disables it.
        aux_loss_scope: Tokens over which that loss counts the load of experts: those of a
            ``microbatch`` of one data rank, of each ``sequence``, or of the whole previous step on
            all ranks (``global``).
        z_loss: Coefficient of the mean squared log-sum-exp of the router's logits; 0 disables it.
        jitter: In training the input of the router, but not that of the experts, is multiplied by
            uniform random numbers between 1 - jitter and 1 + jitter.
        capacity_factor: Limit on the tokens of an expert, as a multiple of its even share of a
            microbatch's tokens, rounded up. Later tokens are dropped. None drops none.
        linear_bias: Whether both projections of every expert add a bias.
        router_bias: Whether the router adds a bias to its logits.
        shared_ffn_hidden_size: Inner features of a shared MLP that every token passes through in
            addition to its experts; None disables it (elements).
        shared_gate: Whether the output of the shared MLP is multiplied by the sigmoid of a
            projection of the token to one number.

    Raises:
        ParallelPlanError: If a value has the wrong type or is out of its range, or if values
            contradict each other.

    Source: Shazeer et al. 2017; Fedus et al. 2022 (aux_loss, capacity_factor, jitter); Zoph et al.
        2022 (z_loss); DeepSeek-AI 2024 (groups, expert_bias, shared experts).
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
    best_of_group: Count = 2
    expert_bias: bool = False
    expert_bias_rate: NotNegative = 0.0
    aux_loss: NotNegative = 0.0
    aux_loss_scope: BalanceScope = "microbatch"
    z_loss: NotNegative = 0.0
    jitter: Probability = 0.0
    capacity_factor: Positive | None = None
    linear_bias: bool = False
    router_bias: bool = False
    shared_ffn_hidden_size: Count | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        coerce_fields(self, "experts.")
        rule = f"be at most num_experts ({self.num_experts})"
        self._require(self.top_k <= self.num_experts, "top_k", rule)
        holds = isinstance(self.layers, int) or any(self.layers)
        self._require(holds, "layers", "have a true value, or no layer has experts")
        holds = self.expert_bias or not self.expert_bias_rate
        self._require(holds, "expert_bias_rate", "be 0 without expert_bias")
        holds = self.shared_ffn_hidden_size is not None or not self.shared_gate
        self._require(holds, "shared_gate", "be False without shared_ffn_hidden_size")
        self._check_groups()

    @property
    def has_losses(self) -> bool:
        """Return whether the routers have losses: load balancing or z-loss."""
        return bool(self.aux_loss or self.z_loss)

    def is_in(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return (
            (layer + 1) % self.layers == 0 if isinstance(self.layers, int) else self.layers[layer]
        )

    def check_clones(self) -> None:
        """Check that experts can have clones on other ranks.

        Raises:
            UnsupportedError: If experts have biases.
        """
        if self.linear_bias:
            raise UnsupportedError(
                "experts.clones needs experts without biases, because only weight matrices are "
                "copied to clones: linear_bias of experts is True. Leave experts.clones out, or "
                "use linear_bias=False."
            )

    def check_num_layers(self, num_layers: int) -> None:
        """Check that ``layers`` fits a model with this number of layers.

        Raises:
            ParallelPlanError: If ``layers`` has another length than the model, or no layer would
                have experts.
        """
        if isinstance(self.layers, int):
            rule = f"be at most num_layers ({num_layers})"
            self._require(self.layers <= num_layers, "layers", rule)
            return
        if len(self.layers) != num_layers:
            raise ParallelPlanError(
                f"layers of experts must have a value for each of num_layers ({num_layers}): it "
                f"has {len(self.layers)} values. Use {num_layers} values, or an integer n for "
                "every n-th layer."
            )

    def _check_groups(self) -> None:
        legal = [
            n
            for n in divisors(self.num_experts)
            if n == 1 or self.num_experts // n >= self.best_of_group
        ]
        rule = f"be {join_or(legal)}, to cut num_experts ({self.num_experts}) into equal groups"
        self._require(self.num_groups in legal, "num_groups", rule)
        rule = f"be at most num_groups ({self.num_groups})"
        self._require(self.top_k_groups <= self.num_groups, "top_k_groups", rule)
        eligible = self.num_experts // self.num_groups * self.top_k_groups
        rule = f"be at most {eligible}, the experts of top_k_groups ({self.top_k_groups})"
        self._require(self.top_k <= eligible, "top_k", rule)

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ParallelPlanError(
                f"{name} ({getattr(self, name)}) of experts must {rule}. Change {name}."
            )


def rows_received(transport: ChosenTransport, config: ExpertsConfig, ep: int) -> float:
    """Return the rows of features that a rank receives from others for each of its own tokens.

    This is the mean over ranks if all experts are equally popular. An all-gather brings the tokens
    of all ranks, an all-to-all one row for each selection, and puts each token once to every rank
    that has some of its experts, which is never more than either.
    """
    others = ep - 1
    if transport == "none":
        return 0.0
    if transport == "all_gather":
        return float(others)
    if transport == "all_to_all":
        return config.top_k * others / ep
    elsewhere = config.num_experts - config.num_experts // ep
    without = math.comb(elsewhere, config.top_k) / math.comb(config.num_experts, config.top_k)
    return others * (1.0 - without)


def collective_over_ep(
    top_k: int, ep: int, needs_static: bool
) -> Literal["all_gather", "all_to_all"]:
    """Return the transport that "auto" means where GPUs do not put.

    An all-gather keeps buffers for the worst routing in every layer. If ``top_k`` is below ``ep``,
    it replaces an all-to-all only where sizes must be static.
    """
    return "all_gather" if top_k >= ep or needs_static else "all_to_all"


def worst_factor(config: ExpertsConfig, ep: int) -> float:
    """Return the rows that a rank has in the worst routing, as a multiple of the even share."""
    return ep * min(config.top_k, config.num_experts // ep) / config.top_k


def limited_rows(factor: float, share: int) -> int:
    """Return the rows of a buffer: the factor times an even share, to the next multiple of 128."""
    return -(-math.ceil(factor * share) // ROW_MULTIPLE) * ROW_MULTIPLE


def smallest_factor(needed: int, share: int) -> float:
    """Return the smallest factor in hundredths that has room for a number of rows."""
    return -(-needed * 100 // share) / 100


def grown_factor(needed: int, share: int) -> float:
    """Return a factor in hundredths with a tenth more room than a number of rows needs."""
    return math.ceil(_GROWTH * needed / share * 100) / 100


@dataclass(frozen=True, kw_only=True)
class TokenBuffer:
    """Layout of one row for every token of all ranks: features, probabilities, selected experts.

    Row ``rank * num_tokens + t`` belongs to token t of a rank. The buffer contains the features of
    all rows, then the probabilities of all rows, then the selected experts of all rows.

    Args:
        element: Size of a feature (bytes).
        scale: Size of a probability (bytes).
    """

    num_ranks: int
    num_tokens: int
    width: int
    top_k: int
    element: int
    scale: int

    @property
    def count(self) -> int:
        """Count the rows."""
        return self.num_ranks * self.num_tokens

    @property
    def scales_at(self) -> int:
        """Return the offset of the probabilities (bytes)."""
        return _aligned(self.count * self.width * self.element)

    @property
    def experts_at(self) -> int:
        """Return the offset of the selected experts (bytes)."""
        return self.scales_at + _aligned(self.count * self.top_k * self.scale)

    @property
    def num_bytes(self) -> int:
        """Return the size of the buffer (bytes)."""
        return self.experts_at + self.count * self.top_k * _NUMBER


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
