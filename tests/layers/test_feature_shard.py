"""Outputs of sharded layers that user code sees in full: every function has the result for all
features, and what treats heads separately runs on this rank's part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.layers.linear import feature_shard
from lightning_megatron.layers.linear.feature_shard import (
    FeatureShard,
    ShardUse,
    functions_get_all_features,
    gathered,
    take_part,
)
from lightning_megatron.layers.linear.shard_functions import reshaped_sections

RANKS = 2
B, T, H, K = 3, 5, 4, 6


def part_of(full: Tensor, dim: int, sections: tuple[int, ...], rank: int) -> Tensor:
    """Return the part of a rank by indices."""
    rows: list[int] = []
    for start, size in zip(
        [sum(sections[:n]) for n in range(len(sections))], sections, strict=True
    ):
        rows += range(start + rank * size // RANKS, start + (rank + 1) * size // RANKS)
    return full.index_select(dim, torch.tensor(rows))


def shards_of(full: Tensor, dim: int, sections: tuple[int, ...]) -> list[FeatureShard]:
    """Return the shards of both ranks, without process groups."""
    return [
        FeatureShard.of(
            part_of(full, dim, sections, rank),
            SimpleNamespace(size=RANKS, rank=rank, group=None),  # type: ignore[arg-type]
            dim,
            sections,
            ShardUse(draws_on_parts=True),
        )
        for rank in range(RANKS)
    ]


HEADS = ((B, T, H * K), (H * K,))
FUSED = ((B, T, 3 * H * K), (H * K,) * 3)
UNEQUAL = ((B, T, 8 * K), (4 * K, 2 * K, 2 * K))
MASK = torch.randn(1, 1, T, T)


def heads(x: Tensor) -> Tensor:
    return x.view(B, T, H, K).transpose(1, 2)


def explicit(x: Tensor) -> Tensor:
    q = heads(x)
    scores = (q @ q.transpose(-2, -1) / q.size(-1) ** 0.5 + MASK).masked_fill(MASK > 1, -9.0)
    return (F.softmax(scores.float(), dim=-1).type_as(q) @ q).transpose(1, 2).reshape(B, T, -1)


def rotary(x: Tensor) -> Tensor:
    q = heads(x)
    angles = torch.linspace(0, 1, K).cos()
    first, second = q.chunk(2, dim=-1)
    return (
        q * angles + torch.cat((-second, q[..., : K // 2]), dim=-1) + torch.cat((first, first), -1)
    )


def complex_rotary(x: Tensor) -> Tensor:
    q = torch.view_as_complex(x.reshape(B, T, H, -1, 2))
    return torch.view_as_real(q * torch.ones(T, 1, K // 2, dtype=torch.complex64)).flatten(3)


def fused(x: Tensor) -> Tensor:
    q, k, v = (heads(part) for part in x.split(H * K, dim=2))
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)
    return y.transpose(1, 2).contiguous().view(x.shape[0], x.shape[1], H * K)


def unbound(x: Tensor) -> Tensor:
    q, k, v = x.reshape(B, T, 3, H, -1).permute(2, 0, 3, 1, 4).unbind(0)
    q = F.layer_norm(q, (K,), torch.ones(K), torch.zeros(K))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def grouped(x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (-1, K)).transpose(1, 2) for part in x.split((24, 12, 12), -1))
    k = k.repeat_interleave(2, dim=1)
    v = v[:, :, None].expand(B, 2, 2, T, K).reshape(B, H, T, K)
    q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-5) * torch.ones(K)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def grouped_in_kernel(x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (-1, K)).transpose(1, 2) for part in x.split((24, 12, 12), -1))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def in_batches(x: Tensor) -> Tensor:
    q = heads(x).reshape(B * H, T, K)
    return torch.bmm(q, q.transpose(1, 2)).view(B, H, T, T).sum(dim=(-1,)).amax(-1)


def summed(x: Tensor) -> Tensor:
    q = torch.einsum("bthk,kj->bhtj", x.view(B, T, H, K), torch.eye(K))
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, torch.ones(B, H, T, K) + q)
    return torch.einsum("bhij,bhjd->bihd", scores.tril(), q)


def stacked(x: Tensor) -> Tensor:
    return torch.stack((x, 2 * x), dim=0).sum(0) + torch.cat([x, x], dim=1)[:, :T]


def written(x: Tensor) -> Tensor:
    y = x * 1.0
    y[..., :5] = 0.5
    return y.cumsum_(dim=-1)


def in_place(x: Tensor) -> Tensor:
    y = x * 1.0
    y += 1
    return y.mul_(torch.arange(H * K)).clamp_(min=-1)


#: Code that runs on parts: shape and sections, function.
ON_PARTS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "an activation": (HEADS, lambda x: F.gelu(x) * torch.sigmoid(x) + torch.arange(H * K)),
    "scores written out": (HEADS, explicit),
    "rotary positions": (HEADS, rotary),
    "rotary positions of complex numbers": (HEADS, complex_rotary),
    "fused projections, split": (FUSED, fused),
    "fused projections, unbound": (FUSED, unbound),
    "groups of keys": (UNEQUAL, grouped),
    "groups of keys, repeated by the kernel": (UNEQUAL, grouped_in_kernel),
    "gated": (((B, T, 16), (8, 8)), lambda x: F.silu(x.chunk(2, dim=-1)[0]) * x[..., 8:]),
    "batches of heads": (HEADS, in_batches),
    "sums of products": (HEADS, summed),
    "stacks": (HEADS, stacked),
    "in place": (HEADS, in_place),
    "a layer of each head": (HEADS, lambda x: F.linear(heads(x), torch.ones(2, K), torch.ones(2))),
    "a squeeze": (HEADS, lambda x: x[:, :1].squeeze(1)),
    "dropped in evaluation": (HEADS, lambda x: F.dropout(x, 0.5, training=False)),
}


@pytest.mark.parametrize("name", ON_PARTS)
def test_code_for_each_head_runs_on_the_parts_of_both_ranks(name, monkeypatch):
    monkeypatch.setattr(feature_shard, "gather_sections", lambda *_: pytest.fail("gathered"))
    (shape, sections), function = ON_PARTS[name]
    full = torch.randn(shape)
    expected = function(full.clone())
    for rank, shard in enumerate(shards_of(full, len(shape) - 1, sections)):
        result = function(shard)
        assert isinstance(result, FeatureShard)
        assert result.shape == expected.shape
        cut = part_of(expected, result.dim_cut, result.sections, rank)
        torch.testing.assert_close(result.part, cut)


#: Code that needs all features.
ON_ALL: dict[str, Callable[[Tensor], Any]] = {
    "a softmax over features": lambda x: x.softmax(-1),
    "a norm of features": lambda x: F.layer_norm(x, (H * K,)),
    "a sum": lambda x: x.sum(),
    "a variance": lambda x: x.var(True),
    "a concatenation of features": lambda x: torch.concat((x, 2 * x), dim=-1).cumsum(-1),
    "views by tensors": lambda x: x.narrow(2, torch.tensor(2), 12) + x[..., : torch.tensor(12)],
    "a mean over features": lambda x: x.mean(dim=(1, 2)),
    "a flip": lambda x: x.flip(-1),
    "some features": lambda x: x[..., 1:7] * 2,
    "a chosen feature": lambda x: x[..., 3],
    "an index of a list": lambda x: x[..., [0, 5]],
    "heads that do not divide": lambda x: x.view(B, T, 3, 8).sum(-1),
    "a linear layer": lambda x: F.linear(x, torch.ones(2, H * K)),
    "parts cut apart": lambda x: x * heads(x).reshape(B, H, T * K)[:, :1, :24],
    "another layout": lambda x: heads(x).transpose(1, 3).reshape(B, T, -1) + x,
    "a sum over heads": lambda x: torch.einsum("bthk->btk", x.view(B, T, H, K)),
    "features written in place": written,
    "numbers": lambda x: torch.tensor(x[0, 0].tolist()),
}


class Exchange:
    """Gather between two threads, each of which is a rank."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=20)
        self.parts: dict[int, Tensor] = {}

    def gather(self, part: Tensor, axis: Any, dim: int, sections: Sequence[int]) -> Tensor:
        self.parts[axis.rank] = part
        self.barrier.wait()
        sizes = [size // RANKS for size in sections]
        by_rank = [self.parts[rank].split(sizes, dim) for rank in range(RANKS)]
        pieces = [piece for section in zip(*by_rank, strict=True) for piece in section]
        full = torch.cat(pieces, dim)
        self.barrier.wait()
        return full


@pytest.mark.parametrize("name", ON_ALL)
def test_other_code_gets_all_features(name, monkeypatch):
    full = torch.randn(HEADS[0])
    monkeypatch.setattr(feature_shard, "gather_sections", Exchange().gather)
    with ThreadPoolExecutor(RANKS) as ranks:
        shards = shards_of(full, 2, (H * K,))
        for result in ranks.map(lambda shard: gathered(ON_ALL[name](shard)), shards):
            torch.testing.assert_close(result, ON_ALL[name](full))


def test_reshapes_cut_the_dimension_that_has_whole_parts_of_each_section():
    cases = [
        ((B, T, 24), 2, (24,), (B, T, 4, 6)),
        ((B, T, 24), 2, (24,), (B * T, 4, 1, 6)),
        ((B, T, 24), 2, (8, 8, 8), (B, T, 3, 4, 2)),
        ((B, T, 24), 2, (8, 8, 8), (B, T, 12, 2)),
        ((B, T, 24), 2, (12, 8, 4), (B, T, 12, 2)),
        ((B, T, 3, 4, 2), 3, (4,), (B, T, 24)),
        ((2, 4, T, 6), 1, (4,), (8, T, 6)),
        ((B, 4, 2, 5), 1, (4,), (B, 8, 5)),
        ((1, 1, 4), 2, (4,), (4, 1, 1)),
        ((B, T, 24), 2, (24,), (B, T, 3, 8)),
        ((B, T, 24), 2, (24,), (B, T * 24)),
        ((B, T, 24), 2, (8, 16), (B, T, 3, 8)),
    ]
    for old, dim, sections, new in cases:
        full = torch.arange(prod(old)).reshape(old)
        found = reshaped_sections(old, dim, sections, new, RANKS)
        for rank in range(RANKS) if found else ():
            where, cuts = found
            local = [*new[:where], sum(cuts) // RANKS, *new[where + 1 :]]
            part = part_of(full, dim, sections, rank).reshape(local)
            assert torch.equal(part, part_of(full.reshape(new), where, cuts, rank)), (old, new)
    kept = [reshaped_sections(*case, RANKS) for case in cases]
    assert [found is None for found in kept] == [False] * 9 + [True, False, True]
    assert kept[2] == (3, (4,))


def test_shards_say_their_full_size_and_refuse_to_be__parts_do_not_suffice():
    shard = shards_of(torch.randn(2, 8), 1, (8,))[1]
    assert (shard.size(-1), len(shard), shard.numel(), shard.ndim) == (8, 2, 16, 2)
    assert repr(shard) == "FeatureShard((2, 8))"
    assert take_part(shard, shard.axis) is not shard
    assert take_part(shard, shard.axis).shape == (2, 4)
    with pytest.raises(UnsupportedError, match="column_gather"):
        shard.unsqueeze_(0)


def test_own_autograd_functions_get_all_features(monkeypatch):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            assert type(x) is Tensor
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return 2 * grads[0]

    monkeypatch.setattr(feature_shard, "gather_sections", lambda part, *_: part.repeat(1, 2))
    shard = shards_of(torch.randn(2, 8), 1, (8,))[0]
    with functions_get_all_features():
        assert Doubled.apply(shard).shape == (2, 8)
    assert Doubled.apply(torch.ones(1)).item() == 2


@pytest.mark.parametrize("read", [Tensor.data_ptr, Tensor.untyped_storage])
def test_the_memory_of_a_part_is_not_given_as_that_of_all_features(
    read: Callable[[Tensor], Any],
) -> None:
    shard = shards_of(torch.zeros(B, T, H * K), 2, (H * K,))[0]
    with pytest.raises(UnsupportedError, match="this rank's part.*\n.*column_gather"):
        read(shard)
