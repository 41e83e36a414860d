"""Tests that clones of experts change losses of long trainings by no more than rounding does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_megatron.experts.transport import peer_clones
from tests.fits import MIXTURE, run_job
from tests.gpu.ranks import gpu_job
from tests.gpu.shared_gpu import require_gpus
from tests.world import run_world

#: Clones of every size, so that as many rows as possible move.
CLONES = {"experts.clones": {"places": 2, "min_rows": 1}}
ONE_SIDED: dict[str, Any] = {"ep": 2, "experts.transport": "one_sided"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "without": ONE_SIDED,
    # The gradients of a step are summed in another order.
    "other order": {**ONE_SIDED, "microbatch_size": 1},
    "clones": {**ONE_SIDED, **CLONES},
}
#: Trainings by graphs, which captured collectives would prevent.
BY_GRAPHS = {"clones by graphs": {**ONE_SIDED, **CLONES, "cuda_graphs": "segments"}}


def _losses(
    rank: int, size: int, accelerator: str, layouts: dict[str, Any], steps: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the losses of all trainings, and how many rows eager steps moved to clones."""
    losses, moved = {}, dict.fromkeys(layouts, 0)
    for name, layout in layouts.items():
        with pytest.MonkeyPatch.context() as patch:
            place = peer_clones.place_clones

            def counted(*sizes: Any, place: Any = place, name: str = name) -> Any:
                clones = place(*sizes)
                is_captured = accelerator == "gpu" and torch.cuda.is_current_stream_capturing()
                moved[name] += 0 if is_captured else int(clones.amounts.sum())
                return clones

            patch.setattr(peer_clones, "place_clones", counted)
            job = gpu_job(MIXTURE, layout, "bf16-mixed", steps=steps)
            job = replace(job, trainer={"accelerator": accelerator})
            losses[name] = run_job(job, size).losses
    return losses, moved


def compare(accelerator: str, layouts: dict[str, Any], steps: int, backend: str) -> None:
    """Assert that losses with clones stay within the spread of two orders of summation."""
    for losses, moved in run_world(_losses, 2, accelerator, layouts, steps, backend=backend):
        plain = losses["without"]
        gaps = {
            name: sum(abs(a - b) for a, b in zip(layout_losses, plain, strict=True)) / steps
            for name, layout_losses in losses.items()
        }
        assert len(plain) == steps
        assert plain[-1] < 0.95 * plain[0], "the training learns"
        assert gaps["other order"] > 0, "the orders of sums differ"
        for name in layouts:
            has_clones = name.startswith("clones")
            assert (moved[name] > 0) == has_clones, (name, moved)
            if has_clones:
                # Both gaps are single samples of rounding errors.
                assert gaps[name] <= 3 * gaps["other order"], gaps


@pytest.mark.slow
def test_clones_by_collectives_keep_the_losses_of_fits_without_clones():
    compare("cpu", LAYOUTS, 6, "gloo")


@pytest.mark.gpu2
def test_two_hundred_steps_with_clones_keep_the_losses_of_steps_without_clones():
    require_gpus(2)
    compare("gpu", LAYOUTS | BY_GRAPHS, 200, "nccl")
