"""Capacity of experts: its size, and the tokens that it drops."""

from __future__ import annotations

import torch

from lightning_megatron.experts.routing.selection import expert_capacity
from tests.experts.routed_by_hand import B, D, S, config_of, draw, router_of


def test_the_capacity_is_rounded_up_from_the_exact_decimal_factor() -> None:
    config = config_of(num_experts=1, top_k=1, capacity_factor=1.1)
    assert expert_capacity(10, config) == 11
    assert expert_capacity(11, config) == 13


def test_experts_of_a_token_do_not_depend_on_later_tokens() -> None:
    router = router_of(config_of(capacity_factor=0.7))
    hidden = draw(S, B, D, seed=4)
    changed = hidden.clone()
    changed[S // 2 :] = draw(S - S // 2, B, D, seed=6)
    before, after = router(hidden), router(changed)
    earlier = slice(0, S // 2 * B)
    assert torch.equal(before.experts[earlier], after.experts[earlier])
    assert not torch.equal(before.experts, after.experts)
    assert int((before.experts[earlier] == -1).sum()) > 0
    assert int(before.counts.max()) == expert_capacity(S * B, router.config)
