"""What tests on GPUs share: worlds of two and of four ranks, and fits that are near their twins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from tests.fits import BATCH, Job, Report, Tokens
from tests.gpu.shared_gpu import require_gpus
from tests.world import run_world

_SEVERAL = [pytest.param(2, marks=pytest.mark.gpu2), pytest.param(4, marks=pytest.mark.gpu4)]
#: Run a test with these numbers of ranks.
on_two_and_four_gpus = pytest.mark.parametrize("size", _SEVERAL)
on_one_to_four_gpus = pytest.mark.parametrize(
    "size", [pytest.param(1, marks=pytest.mark.gpu), *_SEVERAL]
)


def run_ranks(fn: Callable[..., Any], size: int, *args: Any, needs_nccl: str = "") -> list[Any]:
    """Call a function on ranks with GPUs, and return its results by rank; skip the test if there are
    too few GPUs, or if the ranks share one and must not: ``needs_nccl`` says why.
    """
    require_gpus(size, needs_nccl=needs_nccl)
    return run_world(fn, size, *args, backend="nccl")


def gpu_job(model: Any, strategy: Any = None, precision: Any = "32-true", *, steps: int) -> Job:
    """Return a fit on GPUs."""
    return Job(
        model, strategy, precision, steps, {"accelerator": "gpu"}, partial(Tokens, steps * BATCH)
    )


def assert_losses_near(
    actual: Sequence[float], expected: Sequence[float], tolerance: float, where: str = ""
) -> None:
    """Compare the losses of all steps."""
    gaps = [abs(a - b) for a, b in zip(actual, expected, strict=True)]
    assert max(gaps) < tolerance, f"{where}: {gaps}"


def assert_near(actual: Report, expected: Report, tolerance: float, where: str) -> None:
    """Compare losses, and norms of gradients to ten times the tolerance, relative to the norm."""
    assert_losses_near(actual.losses, expected.losses, tolerance, where)
    norms = [abs(a - b) / b for a, b in zip(actual.norms, expected.norms, strict=True)]
    assert max(norms) < 10 * tolerance, f"{where}: {norms}"
