"""Settings of the fused router, and the settings that its kernels support."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_megatron.kernels.triton.launch import power_of_two

# Scores in one iteration of a program, and the largest number of tokens in it.
_TILE = 256
_MAX_TOKENS = 32
# With one warp, the maximum of the scores needs no shared memory.
_WARPS = 1
# Limits of the registers of a program.
_MAX_EXPERTS = 512
_MAX_SELECTED = 16
# Largest number of scores in the score of a group.
_MAX_BEST_OF_GROUP = 2


@dataclass(frozen=True, kw_only=True)
class RouteSettings:
    """Rules of scoring and selecting experts; see ``plan.experts.ExpertsConfig`` for details.

    Args:
        num_experts: Number of experts of the layer (experts).
        top_k: Number k of experts that each token chooses (experts).
        num_groups: Number of groups of experts; only experts of the best groups are eligible. 1
            makes all eligible.
        top_k_groups: Number of eligible groups.
        best_of_group: Number of a group's best scores that are summed as its own score.
        is_softmax: Whether scores are a softmax of the logits; otherwise they are sigmoids.
        is_normalized: Whether the scores of the selected experts are divided by their sum.
        scale: Factor of the probabilities of the selected experts.
        num_sequences: Number of sequences with sums of their own; token t belongs to sequence
            ``t % num_sequences``.
        round_robin_start: Number of the first token's first expert, if experts are assigned
            round-robin regardless of their scores; None selects by score.
        counts_unbiased: Whether to also count the selections by scores without biases.
    """

    num_experts: int
    top_k: int
    num_groups: int
    top_k_groups: int
    best_of_group: int
    is_softmax: bool
    is_normalized: bool
    scale: float
    num_sequences: int
    round_robin_start: int | None
    counts_unbiased: bool

    def is_served(self) -> bool:
        """Return whether the kernels support these settings.

        A row of scores must fit into registers.
        """
        if self.num_experts > _MAX_EXPERTS or self.top_k > _MAX_SELECTED:
            return False
        if self.num_groups == 1:
            return True
        # Groups are a dimension of a tile, whose sizes are powers of two.
        is_tile = power_of_two(self.num_experts) == self.num_experts
        return is_tile and self.best_of_group <= _MAX_BEST_OF_GROUP

    def constants(self) -> dict[str, Any]:
        """Return the compile-time constants of the forward and backward kernels."""
        block = power_of_two(self.num_experts)
        return {
            "E": self.num_experts, "K": self.top_k, "SOFTMAX": self.is_softmax,
            "NORMALIZE": self.is_normalized, "TOKENS": max(min(_TILE // block, _MAX_TOKENS), 1),
            "BLOCK": block, "num_warps": _WARPS,
        }  # fmt: skip
