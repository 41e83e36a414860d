"""All ranks replay a step or none does, and every rank learns of the failures of other ranks."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_megatron.errors import CaptureError, RankMismatchError
from lightning_megatron.graphs.agreement import (
    KeyAgreement,
    eager_warning,
    failure_of_any,
    is_true_anywhere,
)
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from tests.world import run_world

SINGLE_RANK = MeshAxis("world_cpu")


def _agree_on_three_ranks(rank: int, size: int) -> dict[str, Any]:
    mesh = ParallelMesh.create(ParallelLayout(size))
    world = mesh.world_cpu
    failed = f"layers 4..5, backward, slot {rank}: RuntimeError: no memory"
    keys = KeyAgreement(world)
    outcomes = {
        "none": failure_of_any(None, world),
        "last": failure_of_any(failed if rank == 2 else None, world),
        "two": failure_of_any(failed if rank else None, world),
        "anywhere": is_true_anywhere(rank == 1, world),
        "nowhere": is_true_anywhere(False, world),
        "same": keys.agree([("tokens", (4, 8))] * 2),
        "other shape": keys.agree([("tokens", (4, 8 + rank // 2))]),
        "other number": keys.agree([("tokens", (4, 8))] * (1 + rank)),
    }
    mesh.destroy()
    return outcomes


def test_all_ranks_agree_on_failures_and_shapes() -> None:
    first, *peers = run_world(_agree_on_three_ranks, 3)
    assert peers == [first, first]
    text = "layers 4..5, backward, slot {}: RuntimeError: no memory"
    assert first == {
        "none": None,
        "last": f"rank 2 could not capture {text.format(2)}.",
        "two": f"rank 1 could not capture {text.format(1)}. Ranks that failed, too: 2.",
        "anywhere": True,
        "nowhere": False,
        "same": True,
        "other shape": False,
        "other number": False,
    }


def test_a_capture_failure_is_a_warning_or_an_error_as_configured() -> None:
    failure = failure_of_any("layers 4..5, backward, slot 1: RuntimeError: no.", SINGLE_RANK)
    assert failure == "rank 0 could not capture layers 4..5, backward, slot 1: RuntimeError: no."
    assert eager_warning(failure, raises=False) == (
        "CUDA graphs are off: rank 0 could not capture layers 4..5, backward, slot 1: "
        "RuntimeError: no. All ranks continue eagerly."
    )
    with pytest.raises(CaptureError, match="with on_failure='error': rank 0 .* on_failure='eager'"):
        eager_warning(failure, raises=True)


def test_long_error_texts_are_shortened() -> None:
    failure = failure_of_any("step: RuntimeError: " + "x" * 9999, SINGLE_RANK)
    assert failure is not None
    assert len(failure) < 500
    assert failure.endswith("x ...")


def test_a_rank_that_breaks_the_promise_of_equal_shapes_raises() -> None:
    keys = KeyAgreement(SINGLE_RANK, is_promised=True)
    shape = ("tokens", (4, 8))
    assert keys.agree([shape, shape])
    assert keys.agree([shape, shape])
    with pytest.raises(RankMismatchError, match=r"fixed_shapes=True.* 1 microbatches, .*\(3, 8\)"):
        keys.agree([("tokens", (3, 8))])
