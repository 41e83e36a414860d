"""Shard specs split and join tensors without losing or duplicating an element."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_megatron.groups.shard_spec import (
    Box,
    FlatSlice,
    ShardSpec,
    copy_from_full,
    replicated_spec,
    set_shard_spec,
    shard_spec_of,
)
from lightning_megatron.plan.shards import (
    ShardRange,
    attention_ranges,
    padded_vocab_size,
    vocab_range,
)
from tests.oracles import copy_to_full


def test_shards_of_fused_heads_with_replicated_keys_and_values_join_to_the_full_tensor():
    full = torch.randn(4 * 8 + 2 * 2 * 8, 6)
    joined, counted = torch.full_like(full, float("nan")), torch.zeros(())
    for rank in range(4):
        spec = ShardSpec(tuple(full.shape), attention_ranges(4, 2, 8, 4, rank))
        local = spec.shard(full)
        assert local.shape == (8 + 8 + 8, 6)
        copy_to_full(spec, local, joined, counted_only=True)
        counted += sum(
            view.square().sum() for box, view in spec.local_views(local) if box.copy == 0
        )
    assert torch.equal(joined, full)
    torch.testing.assert_close(counted, full.square().sum())


def test_vocabulary_padding_is_zero_and_never_saved():
    full, padded = torch.randn(300, 4), padded_vocab_size(300, 2)
    specs = [ShardSpec((300, 4), (vocab_range(300, 2, rank),)) for rank in range(2)]
    locals_ = [spec.shard(full, padded // 2) for spec in specs]
    assert torch.equal(torch.cat(locals_)[:300], full)
    assert torch.cat(locals_)[300:].abs().sum() == 0
    assert sum(box.sizes[0] for spec in specs for box in spec.boxes()) == 300


def test_a_parameter_without_a_spec_is_replicated():
    weight = nn.Parameter(torch.ones(2, 3))
    assert shard_spec_of(weight) == replicated_spec(weight)
    assert shard_spec_of(weight, 1).boxes()[0].copy == 1
    scalar = replicated_spec(torch.tensor(3.0))
    assert scalar.is_whole
    assert torch.equal(scalar.shard(torch.tensor(3.0)), torch.tensor(3.0))
    spec = ShardSpec((4, 3), (ShardRange(0, 2),))
    assert shard_spec_of(set_shard_spec(weight, spec)) is spec
    assert not spec.is_whole


@st.composite
def sharded_tensors(draw: st.DrawFn) -> tuple[list[FlatSlice], torch.Tensor]:
    """Draw a local tensor of several ranges and padding, and a partition of its flattened elements."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    edges = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=2, max_size=6)))
    ranges = [
        ShardRange(a, b, draw(st.integers(0, 1))) for a, b in pairwise(edges) if draw(st.booleans())
    ]
    spec = ShardSpec(tuple(shape), tuple(draw(st.permutations(ranges))), dim)
    local = (*shape[:dim], spec.local_extent + draw(st.integers(0, 2)), *shape[dim + 1 :])
    inner = draw(st.lists(st.integers(0, prod(local)), max_size=5))
    borders = sorted([0, *inner, prod(local)])
    full = torch.arange(1, prod(shape) + 1, dtype=torch.float64).view(shape)
    return [FlatSlice(spec, local, a, b) for a, b in pairwise(borders)], full


@given(sharded_tensors())
def test_flat_slices_equal_slices_of_the_flattened_shard(
    case: tuple[list[FlatSlice], torch.Tensor],
):
    slices, full = case
    spec, local_shape = slices[0].spec, slices[0].local_shape
    expected = spec.shard(full, local_shape[spec.dim]).flatten()
    for piece in slices:
        flat = torch.zeros(piece.size, dtype=full.dtype)
        copy_from_full(piece, flat, full)
        assert torch.equal(flat, expected[piece.start : piece.stop])
        assert [box for box, _ in piece.local_views(flat)] == piece.boxes()
        for box, view in piece.local_views(flat):
            index = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            assert torch.equal(view, full[index])
            assert view.data_ptr() == flat[box.local_start :].data_ptr()


@given(sharded_tensors())
def test_flat_slices_of_a_partition_cover_each_local_element_once(
    case: tuple[list[FlatSlice], torch.Tensor],
):
    slices, full = case
    spec, reached, joined = slices[0].spec, torch.zeros_like(full), torch.zeros_like(full)
    for piece in slices:
        flat = torch.full((piece.size,), -1.0, dtype=full.dtype)
        for box in piece.boxes():
            reached[
                tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            ] += 1
        for _, view in piece.local_views(flat):
            view.fill_(7.0)  # a view: the flat tensor sees it, and padding does not change
        assert (flat == 7.0).sum() == sum(prod(box.sizes) for box in piece.boxes())
        copy_from_full(piece, flat, full)
        copy_to_full(piece, flat, joined, counted_only=True)
    held, counted = torch.zeros_like(full), torch.zeros_like(full)
    for piece in spec.ranges:
        held.narrow(spec.dim, piece.start, piece.size).fill_(1)
        counted.narrow(spec.dim, piece.start, piece.size).fill_(piece.copy == 0)
    assert torch.equal(reached, held)
    assert torch.equal(joined, full * counted)


def test_scalars_and_huge_tensors_are_sliced():
    scalar = FlatSlice(replicated_spec(torch.tensor(3.0), copy=1), (), 0, 1)
    assert scalar.boxes() == [Box((), (), 0, 1)]
    flat = torch.zeros(1)
    copy_from_full(scalar, flat, torch.tensor(3.0))
    assert flat.item() == 3.0
    spec = ShardSpec((131072, 32768), (ShardRange(0, 8192), ShardRange(16384, 24576)), dim=1)
    flat = torch.empty(2**30, device="meta")
    views = FlatSlice(spec, (131072, 16384), 5, 5 + 2**30).local_views(flat)
    assert sum(view.numel() for _, view in views) == 2**30
    assert len(views) <= 6


def test_wrong_shapes_and_slices_beyond_their_tensor_are_refused():
    spec = ShardSpec((4, 3), (ShardRange(0, 2),))
    for call, message in (
        (lambda: spec.shard(torch.zeros(3, 4)), r"must have shape \(4, 3\): it has \(3, 4\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
