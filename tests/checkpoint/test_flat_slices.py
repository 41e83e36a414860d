"""A tensor that is saved in one cut loads into any other cut: tensor-parallel ranges, padding and
slices of data ranks.
"""

from __future__ import annotations

import tempfile
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatron.checkpoint import Entry, Header, load_tensors, read_full
from lightning_megatron.checkpoint.entries import boxes_to_write
from lightning_megatron.checkpoint.save import CollectiveSave, RankSnapshot
from lightning_megatron.checkpoint.values import to_bytes
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import FlatSlice, Placement, ShardSpec, copy_from_full
from lightning_megatron.plan.shards import ShardRange
from tests.oracles import copy_to_full

MESH = ParallelMesh.single()
PADDING = -7.0
Cut = list[tuple[Placement, Tensor]]


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> Cut:
    """Cut a tensor into tensor-parallel parts of several ranges each, and cut some parts into
    slices of data ranks.
    """
    if not shape:
        spec = ShardSpec((), (ShardRange(0, 1),))
        sliced = (FlatSlice(spec, (), 0, 1), torch.empty(1))
        return [sliced if draw(st.booleans()) else (spec, torch.empty(()))]
    dim = draw(st.integers(0, len(shape) - 1))
    drawn = sorted(draw(st.sets(st.integers(1, 6), max_size=4)))
    borders = [border for border in drawn if border < shape[dim]]
    ranges = [ShardRange(a, b) for a, b in zip([0, *borders], [*borders, shape[dim]], strict=True)]
    num_parts = draw(st.integers(1, 3))
    pieces: Cut = []
    for part in range(num_parts):
        spec = ShardSpec(shape, tuple(ranges[part::num_parts]), dim)
        extent = spec.local_extent + (draw(st.integers(0, 2)) if dim == 0 else 0)
        local = tuple(extent if d == dim else size for d, size in enumerate(shape))
        if not draw(st.booleans()):
            pieces.append((spec, torch.full(local, PADDING)))
            continue
        size = prod(local)
        inner = sorted(draw(st.sets(st.integers(0, size), max_size=3)))
        for start, stop in zip([0, *inner], [*inner, size], strict=True):
            own = FlatSlice(spec, local, start, stop)
            pieces.append((own, torch.full((stop - start,), PADDING)))
    return pieces


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], Cut, Cut]:
    """Draw a shape and two cuts of it."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    return shape, draw(cuts(shape)), draw(cuts(shape))


@given(st.lists(tensors(), min_size=1, max_size=3))
def test_a_tensor_saved_in_one_cut_loads_into_any_other_cut(drawn):
    fulls, pieces = {}, []
    for number, (shape, saved_cut, _) in enumerate(drawn):
        fulls[str(number)] = full = torch.randn(shape)
        for placement, local in saved_cut:
            copy_from_full(placement, local, full)
            # One process writes the pieces of several ranks.
            pieces += boxes_to_write({str(number): Entry(local, placement, True)}, MESH)
    with tempfile.TemporaryDirectory() as folder:
        header = Header(MESH.layout, torch.__version__)
        content = RankSnapshot(pieces, to_bytes({}), to_bytes({}), header, lambda: None)
        CollectiveSave(f"{folder}/c", MESH, content).run()
        for name, full in read_full(f"{folder}/c").items():
            assert torch.equal(full, fulls[name])
        for number, (shape, _, target_cut) in enumerate(drawn):
            for placement, local in target_cut:
                target = {str(number): Entry(local, placement)}
                load_tensors(f"{folder}/c", target, MESH, strict=False)
                restored = torch.full(shape, PADDING)
                copy_to_full(placement, local, restored)
                for box in placement.boxes():
                    sides = zip(box.offsets, box.sizes, strict=True)
                    region = tuple(slice(start, start + size) for start, size in sides)
                    assert torch.equal(restored[region], fulls[str(number)][region])
                # Padding, which belongs to no full tensor, stays unchanged.
                num_loaded = sum(prod(box.sizes) for box in placement.boxes())
                assert int((local == PADDING).sum()) == local.numel() - num_loaded
