"""Tensor maps fill any shard from foreign tensors, also in concurrent pieces, and split full tensors into
foreign tensors.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatron.groups.shard_spec import FlatSlice, ShardSpec
from lightning_megatron.plan.shards import ShardRange, attention_ranges, gated_ranges
from lightning_megatron.swap.tensors.mapping import Slices, Source, TensorMap, TensorsInMemory
from lightning_megatron.swap.weights import load
from lightning_megatron.swap.weights.load import Copy, copies_of, copy_all

BY_HEADS = tuple(Source("a", 8, first=n * 2, strip=2, step=6) for n in range(3))
MAPS = {
    "whole": TensorMap("w", (24, 10), (Source("a", 24),)),
    "transposed": TensorMap("w", (24, 10), (Source("a", 24, is_transposed=True),)),
    "joined": TensorMap("w", (24, 10), (Source("a", 12), Source("b", 8), Source("c", 4))),
    "joined transposed": TensorMap("w", (24, 10), (Source("a", 14, True), Source("b", 10, True))),
    "by heads": TensorMap("w", (24, 10), BY_HEADS),
    "vector by heads": TensorMap("w", (24,), BY_HEADS),
}


class CountingReader(TensorsInMemory):
    """Record the name and the number of elements of every read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        object.__setattr__(self, "parts", [])

    def read(self, name: str, slices: Slices) -> Tensor:
        part = super().read(name, slices)
        self.parts.append((name, part.numel()))
        return part


def values_of(tensor: TensorMap) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = tensor.source_shapes.items()
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes}


def full_of(tensor: TensorMap, reader: TensorsInMemory) -> Tensor:
    return tensor.full(reader, torch.float32)


def test_split_restores_the_joined_tensors():
    for tensor in MAPS.values():
        theirs = values_of(tensor)
        back = tensor.split(full_of(tensor, TensorsInMemory(theirs)))
        assert back.keys() == theirs.keys()
        assert all(torch.equal(back[name], theirs[name]) for name in theirs)
    with pytest.raises(ValueError, match="w has 24, its sources have 20"):
        TensorMap("w", (24, 10), (Source("a", 20),))
    with pytest.raises(ValueError, match=r"w must have shape \(24, 10\): \(10, 24\)"):
        MAPS["whole"].split(torch.zeros(10, 24))


def test_rows_by_heads_become_all_query_then_key_then_value_rows():
    full = full_of(MAPS["vector by heads"], TensorsInMemory({"a": torch.arange(24.0)}))
    parts = torch.arange(24.0).view(4, 3, 2).unbind(1)
    assert torch.equal(full, torch.cat([part.flatten() for part in parts]))


@given(data=st.data(), kind=st.sampled_from(sorted(MAPS)))
@settings(deadline=None)
def test_any_shard_is_read_without_other_elements(data, kind):
    tensor = MAPS[kind]
    dim = data.draw(st.integers(0, len(tensor.shape) - 1))
    ends = sorted(data.draw(st.lists(st.integers(0, tensor.shape[dim]), min_size=2, max_size=6)))
    ranges = (ShardRange(a, b) for a, b in zip(ends[::2], ends[1::2], strict=False))
    spec = ShardSpec(tensor.shape, tuple(ranges), dim)
    reader = CountingReader(values_of(tensor))
    expected = spec.shard(full_of(tensor, TensorsInMemory(reader.tensors)))
    local = torch.zeros_like(expected)
    for box, view in spec.local_views(local):
        tensor.fill(view, box.offsets, box.sizes, reader)
    assert torch.equal(local, expected)
    assert sum(size for _, size in reader.parts) == expected.numel()


def test_flat_slices_and_gated_rows_are_filled_like_shards():
    tensor = MAPS["by heads"]
    reader = TensorsInMemory(values_of(tensor))
    for tp_rank in range(2):
        spec = ShardSpec(tensor.shape, attention_ranges(4, 4, 2, 2, tp_rank))
        local = spec.shard(full_of(tensor, reader))
        part = FlatSlice(spec, tuple(local.shape), 7, 71)
        flat = torch.zeros(part.size)
        for box, view in part.local_views(flat):
            tensor.fill(view, box.offsets, box.sizes, reader)
        assert torch.equal(flat, local.flatten()[7:71])
    tensor = TensorMap("w", (24, 10), (Source("gate", 12), Source("up", 12)))
    theirs, half = values_of(tensor), torch.empty(8, 10, dtype=torch.bfloat16)
    for box, view in ShardSpec(tensor.shape, gated_ranges(12, 3, 1)).local_views(half):
        tensor.fill(view, box.offsets, box.sizes, TensorsInMemory(theirs))
    assert torch.equal(half, torch.cat([theirs["gate"][4:8], theirs["up"][4:8]]).bfloat16())


# ---- concurrent pieces


@pytest.mark.parametrize("kind", MAPS)
def test_copied_pieces_make_the_full_tensor(kind, monkeypatch):
    tensor = MAPS[kind]
    reader = TensorsInMemory(values_of(tensor))
    monkeypatch.setattr(load, "PIECE_BYTES", 3 * 10 * 4)
    full = torch.full(tensor.shape, torch.nan)
    copies = list(copies_of(tensor, full, [0] * full.dim(), tensor.shape, reader))
    piece_sizes = [reader.tensors[copy.name][copy.slices[0]].nbytes for copy in copies]
    assert max(piece_sizes) <= load.PIECE_BYTES
    copy_all(copies, reader)
    copy_all([], reader)
    assert torch.equal(full, full_of(tensor, reader))


def test_error_of_a_failed_read_reaches_the_caller():
    copies = [Copy(name, (slice(0, 1),), torch.empty(1)) for name in "ab"]
    with pytest.raises(KeyError, match="b"):
        copy_all(copies, TensorsInMemory({"a": torch.ones(1)}))
