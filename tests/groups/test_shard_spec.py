"""A spec cuts and joins tensors without losing or doubling an element."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_megatron.groups.shard_spec import Box, ShardSpec, set_shard_spec, shard_spec_of, whole_spec
from lightning_megatron.plan.shards import ShardRange, attention_ranges, padded_vocab_size, vocab_range


def test_fused_heads_with_replicated_keys_and_values_come_back_whole():
    full = torch.randn(4 * 8 + 2 * 2 * 8, 6)
    joined, counted = torch.full_like(full, float("nan")), torch.zeros(())
    for rank in range(4):
        spec = ShardSpec(tuple(full.shape), attention_ranges(4, 2, 8, 4, rank))
        local = spec.shard(full)
        assert local.shape == (8 + 8 + 8, 6)
        spec.copy_to_full(local, joined, counted_only=True)
        counted += sum(view.square().sum() for box, view in spec.local_views(local) if box.copy == 0)
    assert torch.equal(joined, full)
    torch.testing.assert_close(counted, full.square().sum())


def test_vocabulary_padding_is_zero_and_never_saved():
    full, padded = torch.randn(300, 4), padded_vocab_size(300, 2)
    specs = [ShardSpec((300, 4), (vocab_range(300, 2, rank),)) for rank in range(2)]
    locals_ = [spec.shard(full, padded // 2) for spec in specs]
    assert torch.equal(torch.cat(locals_)[:300], full)
    assert torch.cat(locals_)[300:].abs().sum() == 0
    assert sum(box.sizes[0] for spec in specs for box in spec.boxes()) == 300


def test_a_cut_along_the_second_dimension_has_its_box_there():
    spec = ShardSpec((3, 8), (ShardRange(4, 8),), dim=1)
    assert spec.boxes() == [Box((0, 4), (3, 4), 0, 0)]
    full = torch.arange(24.0).view(3, 8)
    assert torch.equal(spec.shard(full), full[:, 4:])


def test_a_parameter_without_a_spec_is_whole_on_every_rank():
    weight = nn.Parameter(torch.ones(2, 3))
    assert shard_spec_of(weight) == whole_spec(weight)
    assert shard_spec_of(weight, 1).boxes()[0].copy == 1
    scalar = whole_spec(torch.tensor(3.0))
    assert scalar.is_whole
    assert torch.equal(scalar.shard(torch.tensor(3.0)), torch.tensor(3.0))
    spec = ShardSpec((4, 3), (ShardRange(0, 2),))
    assert shard_spec_of(set_shard_spec(weight, spec)) is spec
    assert not spec.is_whole


def test_a_wrong_full_shape_is_refused():
    with pytest.raises(ValueError, match=r"must have shape \(4, 3\): \(3, 4\)"):
        ShardSpec((4, 3), (ShardRange(0, 2),)).shard(torch.zeros(3, 4))
