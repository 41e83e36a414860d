"""Graphs end where a bucket of gradients is complete in the backward pass."""

from __future__ import annotations

from torch import nn

from lightning_megatron.graphs.bucket_cuts import bucket_cuts
from lightning_megatron.layers.segments import Segment, SegmentList


def chain(*modules: nn.Module) -> SegmentList:
    """Return a list with one segment for each module. Names are numbers."""
    return SegmentList(
        [
            Segment(str(number), module, ("x",), ("x",), modules=(module,))
            for number, module in enumerate(modules)
        ],
        ("x",),
        ("x",),
    )


def test_a_graph_begins_where_a_bucket_is_first_read() -> None:
    first, second, third, fourth = (nn.Linear(2, 2) for _ in range(4))
    segments = chain(first, second, third, fourth)
    # Buckets are filled in the order of the backward pass.
    buckets = [
        [fourth.weight, fourth.bias, third.weight],
        [third.bias, second.weight, second.bias],
        [first.weight, first.bias],
    ]
    assert bucket_cuts(segments, buckets) == ("0", "1")
    assert bucket_cuts(segments, [sum(buckets, [])]) == ()


def test_a_shared_parameter_counts_where_it_is_first_read() -> None:
    tied = nn.Linear(2, 2)
    untied = nn.Linear(2, 2)
    segments = chain(untied, tied, untied, tied)
    assert bucket_cuts(segments, [list(tied.parameters()), list(untied.parameters())]) == ("0",)
    assert bucket_cuts(segments, [list(nn.Linear(2, 2).parameters())]) == ()
