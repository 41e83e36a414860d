"""Places at which graphs must end, so that gradients are reduced while later graphs run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_megatron.graphs.segments import SegmentList


def bucket_cuts(
    segments: SegmentList, buckets: Sequence[Sequence[nn.Parameter]]
) -> tuple[str, ...]:
    """Return the names of the segments after which graphs end.

    A backward pass runs the segments in reverse order, and the reduction of a bucket can start when
    the graph with its last gradient has ended. So a graph must begin, in forward order, at the
    first segment that reads a parameter of the bucket. The first forward pass waits for a gathered
    bucket there, too.

    Args:
        segments: Opened list of a chunk.
        buckets: Parameters of each bucket that several ranks reduce or gather.
    """
    read_first: dict[int, int] = {}
    for number, segment in enumerate(segments):
        for module in segment.modules:
            for parameter in module.parameters():
                read_first.setdefault(id(parameter), number)
    begins = set[int]()
    for bucket in buckets:
        places = [read_first[id(parameter)] for parameter in bucket if id(parameter) in read_first]
        if places:
            begins.add(min(places))
    return tuple(segments.segments[number - 1].name for number in sorted(begins) if number > 0)
