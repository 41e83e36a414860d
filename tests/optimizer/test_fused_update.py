"""Training with clipping, update and rounding in one kernel matches torch's own optimizer steps."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.optimizer.fused_update import GroupNumbers, numbers_of
from tests.fits import GPT2, Job, run_job
from tests.optimizer.fused_fits import (
    FITS,
    FusedLanguage,
    PlainKernel,
    check_equal,
    fused,
    fused_job,
)


@pytest.mark.parametrize("name", FITS)
def test_fused_kernel_gives_losses_weights_and_states_of_torch(name):
    report = check_equal(FITS[name], "cpu", 1e-3 if FITS[name].precision != "32-true" else 1e-6)
    assert report.outcomes["calls"][-1] > 0


def test_optimizers_without_fused_kernel_use_their_own_step():
    def unfused(groups, fused, **options):
        return torch.optim.AdamW(groups, **options)

    def sgd(groups, fused, eps, lr, **options):
        return torch.optim.SGD(groups, lr=1.0, **options)

    for make in (unfused, partial(torch.optim.AdamW, amsgrad=True), sgd):
        with fused():
            report = run_job(fused_job(partial(FusedLanguage, make=make)))
        assert report.outcomes["calls"][-1] == 0
        assert report.losses[-1] < report.losses[0]


def test_moments_are_stored_in_moments_dtype_by_the_fused_kernel_alone():
    job = replace(fused_job(), strategy={"optimizer.moments_dtype": "bfloat16"})
    with fused():
        report = run_job(job)
    assert report.losses[-1] < report.losses[0]
    for state in report.outcomes["states"]:
        for name in ("exp_avg", "exp_avg_sq"):
            moments = torch.tensor(state[name])
            assert torch.equal(moments, moments.bfloat16().float()), name
    with pytest.raises(UnsupportedError, match="moments_dtype .bfloat16. needs the fused kernel"):
        run_job(Job(GPT2, {"optimizer.moments_dtype": "bfloat16"}, "32-true"))


def dtypes_of_gradients(sums: str) -> set[torch.dtype]:
    """Return the dtypes of the gradients that the kernel gets."""
    dtypes = set()

    class Watched(PlainKernel):
        def __call__(self, parameters: Any, gradients: Any, *more: Any, **options: Any) -> None:
            dtypes.update(gradient.dtype for gradient in gradients)
            super().__call__(parameters, gradients, *more, **options)

    with fused(Watched):
        run_job(replace(fused_job(), strategy={"optimizer.gradient_dtype": sums}))
    return dtypes


def test_the_fused_kernel_reads_sums_in_bfloat16_without_copies_in_float32():
    assert dtypes_of_gradients("bfloat16") == {torch.bfloat16}
    assert dtypes_of_gradients("float32") == {torch.float32}


GROUP = {
    "lr": 0.01,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "decoupled_weight_decay": True,
}


def test_numbers_of_a_group_hold_every_hyperparameter():
    lr, high1, low1, high2, low2, *later_numbers = numbers_of(GROUP)
    assert lr == 0.01
    assert [high1 + low1, high2 + low2] == [math.log(0.9), math.log(0.95)]
    assert high1 == float(torch.tensor(high1)) != math.log(0.9)
    assert later_numbers == [0.9, 1 - 0.9, 0.95, 1 - 0.95, 1e-8, 0.01 * 0.1, 0.0]
    assert numbers_of(GROUP | {"decoupled_weight_decay": False})[10] == 0.1
    assert math.exp(numbers_of(GROUP | {"betas": (0.0, 0.9)})[1]) == 0.0


def test_the_table_is_written_in_place_if_a_number_has_changed():
    numbers = GroupNumbers(torch.device("cpu"))
    groups: list[dict[str, Any]] = [
        dict(GROUP),
        GROUP | {"lr": 0.5, "decoupled_weight_decay": False},
    ]
    numbers.fill(groups)
    first, second = numbers.rows
    expected = list(map(numbers_of, groups))
    assert torch.equal(torch.stack((first, second)), torch.tensor(expected))
    groups[1]["lr"] = 0.25
    numbers.fill(groups)
    assert second[0] == 0.25, "the row is still that of the table"
    second.zero_()
    numbers.fill(groups)
    assert not second.any(), "nothing is copied if no number has changed"
    numbers.fill([*groups, groups[0]])
    assert len(numbers.rows) == 3
    assert numbers.rows[1][0] == 0.25
