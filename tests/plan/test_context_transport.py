"""Transports over cp are chosen by hosts, heads and dropout, and refused where they cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.context_transport import ContextLinks, choose_context_transport
from lightning_megatron.plan.layout import ParallelLayout


@pytest.mark.parametrize(
    ("sizes", "ranks_per_host", "inner", "is_one_host"),
    [
        ({"cp": 4}, 4, 1, True),
        ({"cp": 4}, 2, 2, False),
        ({"cp": 8, "tp": 2}, 8, 4, False),
        ({"cp": 4}, 1, 1, False),
        # Each rank of a sequence lies on another host.
        ({"cp": 4, "dp": 4, "order": "dp-cp-tp-pp"}, 4, 1, False),
        # The hosts have three ranks, which do not divide the ranks of a sequence.
        ({"cp": 4, "dp": 3}, 3, 1, False),
    ],
)
def test_context_links_follow_the_hosts(
    sizes: dict[str, Any], ranks_per_host: int, inner: int, is_one_host: bool
) -> None:
    dp = sizes.pop("dp", 1)
    world_size = sizes["cp"] * sizes.get("tp", 1) * dp
    links = ContextLinks.of("auto", ParallelLayout(world_size, **sizes), ranks_per_host)
    assert (links.inner, links.is_one_host) == (inner, is_one_host)


def test_a_hierarchy_needs_two_levels() -> None:
    assert ContextLinks.of("hierarchical", ParallelLayout(8, cp=8), 8).inner == 4
    assert ContextLinks.of("hierarchical", ParallelLayout(8, cp=8), 2).inner == 2
    with pytest.raises(ParallelPlanError, match="cp is 3, and 3 of its ranks are neighbours"):
        ContextLinks.of("hierarchical", ParallelLayout(3, cp=3), 3)
    with pytest.raises(ParallelPlanError, match="cp is 4, and 1 of its ranks are neighbours"):
        ContextLinks.of("hierarchical", ParallelLayout(4, cp=4), 1)


@pytest.mark.parametrize(
    ("links", "heads", "kv_heads", "dropout", "transport"),
    [
        (ContextLinks(), 8, 4, 0.0, "all_to_all"),
        (ContextLinks(), 8, 2, 0.0, "all_to_all"),
        (ContextLinks(), 6, 6, 0.0, "ring"),
        (ContextLinks(), 6, 1, 0.0, "all_gather"),
        (ContextLinks(), 6, 6, 0.1, "all_to_all"),
        (ContextLinks(is_one_host=False), 8, 4, 0.0, "ring"),
        (ContextLinks(inner=2, is_one_host=False), 8, 4, 0.0, "hierarchical"),
        (ContextLinks(inner=2, is_one_host=False), 7, 7, 0.0, "ring"),
        (ContextLinks("ring"), 8, 4, 0.0, "ring"),
        (ContextLinks("all_to_all"), 8, 4, 0.1, "all_to_all"),
    ],
)
def test_the_transport_follows_links_heads_and_dropout(
    links: ContextLinks, heads: int, kv_heads: int, dropout: float, transport: str
) -> None:
    choice = choose_context_transport(links, 4, heads, kv_heads, dropout)
    assert choice.transport == transport
    assert choice.reason


def test_the_ring_transport_refuses_attention_dropout() -> None:
    with pytest.raises(UnsupportedError, match=r"'ring' cannot be used with attention dropout"):
        choose_context_transport(ContextLinks("ring"), 4, 8, 8, 0.1)
