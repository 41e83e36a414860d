"""Every way to give data shows each rank the samples that it sees under Lightning's own strategies."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest

from lightning_megatron import MegatronStrategy
from tests.strategy.data_cases import CASES, SHUFFLED, fit
from tests.world import run_world


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def two_ranks(rank: int, size: int) -> dict[str, dict[str, Any]]:
    quiet()
    strategies = {
        "ddp": lambda: "ddp",
        "dp2": MegatronStrategy,
        "tp2": lambda: MegatronStrategy(tp=2),
    }
    return {
        name: {case: fit(case, make(), size) for case in {**CASES, **SHUFFLED}}
        for name, make in strategies.items()
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_world(two_ranks, 2)


@pytest.fixture(scope="module")
def one_device() -> dict[str, Any]:
    quiet()
    return {case: fit(case, "auto") for case in {**CASES, **SHUFFLED}}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert expected["seen"]
    assert {**found, "weight": 0} == {**expected, "weight": 0}
    assert found["weight"] == pytest.approx(expected["weight"], abs=1e-12)


@pytest.mark.parametrize("case", [*CASES, *SHUFFLED])
def test_data_ranks_see_the_samples_that_they_see_under_ddp(
    ranks: list[dict[str, Any]], case: str
) -> None:
    for found in ranks:
        assert_same(found["dp2"][case], found["ddp"][case])


@pytest.mark.parametrize("case", CASES)
def test_one_data_rank_sees_the_samples_that_one_device_sees(
    ranks: list[dict[str, Any]], one_device: dict[str, Any], case: str
) -> None:
    for found in [*(rank["tp2"] for rank in ranks), {case: fit(case, MegatronStrategy())}]:
        assert_same(found[case], one_device[case])


def flat(seen: list[Any]) -> list[float]:
    return [sample for _, batch, _ in seen for sample in batch]


@pytest.mark.parametrize("case", SHUFFLED)
def test_one_data_rank_draws_an_order_of_all_samples_for_every_epoch(
    ranks: list[dict[str, Any]], one_device: dict[str, Any], case: str
) -> None:
    first, second = (flat(rank["tp2"][case]["seen"]) for rank in ranks)
    assert first == second
    expected = flat(one_device[case]["seen"])
    half = len(expected) // 2
    for epoch in (slice(half), slice(half, None)):
        assert sorted(first[epoch]) == sorted(expected[epoch])
        assert first[epoch] != sorted(first[epoch])
    assert first[:half] != first[half:]


def test_a_skipped_batch_is_one_on_one_device() -> None:
    quiet()
    assert_same(
        fit("accumulated", MegatronStrategy(), skips=True), fit("accumulated", "auto", skips=True)
    )


def skipping(rank: int, size: int) -> str:
    quiet()
    with pytest.raises(RuntimeError) as raised:
        fit("in order", MegatronStrategy(), size, skips=True)
    return str(raised.value)


def test_a_skipped_batch_is_refused_on_several_ranks_as_under_ddp() -> None:
    for message in run_world(skipping, 2):
        assert "training_step must return a loss on every rank" in message
        assert "0.0 * output.sum()" in message
