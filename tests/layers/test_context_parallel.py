"""Each transport of context parallelism against attention of one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention_core import attend
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.context_parallel.head_exchange import (
    exchanged_attention,
    hierarchical_attention,
)
from lightning_megatron.layers.context_parallel.partial_attention import PartialSum, add_blocks
from lightning_megatron.layers.context_parallel.ring import gathered_attention, ring_attention
from lightning_megatron.layers.context_parallel.sequence_order import joined_parts, own_part
from lightning_megatron.plan.context import AttentionBlock
from lightning_megatron.plan.layout import ParallelLayout
from tests.world import run_world

S, B, D = 16, 2, 4
#: Query heads, key/value heads, causal, window.
CASES = [
    (8, 1, True, None),
    (8, 2, True, None),
    (8, 8, True, None),
    (8, 2, False, None),
    (6, 3, True, None),
    (3, 1, False, None),
    (4, 2, True, 1),
    (4, 4, True, 3),
    (4, 2, True, 7),
    (4, 1, True, 100),
]


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def transports(mesh: ParallelMesh) -> dict[str, Callable[..., Tensor]]:
    """Return attention by transport, called with queries, keys, values, causal and window."""

    def by_heads(
        query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int | None
    ) -> Tensor:
        core = partial(attend, span=AttentionSpan(causal=causal, window=window))
        return exchanged_attention(query, key, value, mesh.cp, core)

    found = {
        "ring": partial(by_axis, ring_attention, mesh.cp),
        "all_gather": partial(by_axis, gathered_attention, mesh.cp),
        "all_to_all": by_heads,
    }
    if mesh.cp.size == 4:
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        at = mesh.cp.rank
        host, place = divmod(at, 2)
        inner = MeshAxis("cp", (2 * host, 2 * host + 1), place, groups[host])
        outer = MeshAxis("cp", (place, place + 2), host, groups[2 + place])
        found["hierarchical"] = lambda q, k, v, causal, window: hierarchical_attention(
            q, k, v, inner, outer, causal=causal, window=window
        )
    return found


def by_axis(
    attention: Callable[..., Tensor],
    axis: MeshAxis,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    window: int | None,
) -> Tensor:
    return attention(query, key, value, axis, causal=causal, window=window)


def check_transports(rank: int, size: int) -> list[tuple[str, float]]:
    """Return the largest difference of outputs and gradients of each transport and case."""
    mesh = ParallelMesh.create(ParallelLayout(size, cp=size))
    found = []
    for name, attention in transports(mesh).items():
        for heads, kv_heads, causal, window in CASES:
            full = [
                draw(S, B, count, D, seed=at).requires_grad_()
                for at, count in enumerate((heads, kv_heads, kv_heads))
            ]
            expected = attend(*full, AttentionSpan(causal=causal, window=window))
            grad = draw(*expected.shape, seed=9)
            expected.backward(grad)
            local = [own_part(one.detach(), mesh.cp).requires_grad_() for one in full]
            actual = attention(*local, causal, window)
            actual.backward(own_part(grad, mesh.cp))
            pairs = [(actual, own_part(expected, mesh.cp))]
            for one, whole in zip(local, full, strict=True):
                assert one.grad is not None
                assert whole.grad is not None
                pairs.append((one.grad, own_part(whole.grad, mesh.cp)))
            worst = max(float((one - other).detach().abs().max()) for one, other in pairs)
            found.append((f"{name} heads {heads}/{kv_heads} {causal} window {window}", worst))
    found.append(("join of parts", check_join(mesh)))
    return found


def check_join(mesh: ParallelMesh) -> float:
    """Return how far the join of parts is from the whole, in values and gradients."""
    whole = draw(B, S, 3, seed=4).requires_grad_()
    joined = joined_parts(own_part(whole, mesh.cp, 1), mesh.cp, 1)
    grad = draw(B, S, 3, seed=5)
    joined.backward(grad)
    assert whole.grad is not None
    # The rank's own positions have the gradient of every rank's loss, the others none.
    share = torch.zeros_like(grad)
    rows = own_part(torch.arange(S), mesh.cp)
    share[:, rows] = mesh.cp.size * grad[:, rows]
    return max(float((joined - whole).abs().max()), float((whole.grad - share).abs().max()))


@pytest.mark.parametrize("size", [2, 4])
def test_each_transport_equals_one_process(size: int) -> None:
    for found in run_world(check_transports, size):
        assert len(found) == (31 if size == 2 else 41)
        assert [one for one in found if not one[1] < 1e-12] == []


def test_a_query_without_keys_adds_nothing() -> None:
    query, key, value = (draw(4, 1, 2, D, seed=at) for at in range(3))
    total = PartialSum(query)
    early = AttentionBlock(range(4), range(4), is_causal=True, offset=-2)
    add_blocks(total, query, key, value, [early], 0.5)
    assert total.out[:, :, :2].eq(0).all()
    assert total.log_sum[:, :, :2].isneginf().all()
    add_blocks(total, query, key, value, [AttentionBlock(range(2), range(4))], 0.5)
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) * 0.5
    expected = torch.einsum("bhst,tbhd->bhsd", scores.softmax(-1), value)
    torch.testing.assert_close(total.out[:, :, :2], expected[:, :, :2], rtol=0, atol=1e-14)


def test_a_ring_of_one_rank_keeps_half_types() -> None:
    query, key, value = (draw(8, 1, 2, D, seed=at).bfloat16().requires_grad_() for at in range(3))
    mixed = ring_attention(query, key, value, MeshAxis("cp"), causal=True)
    mixed.sum().backward()
    whole = attend(*(one.detach().float() for one in (query, key, value)), AttentionSpan())
    assert mixed.dtype == torch.bfloat16
    assert query.grad is not None
    assert query.grad.dtype == torch.bfloat16
    torch.testing.assert_close(mixed, whole.bfloat16())
