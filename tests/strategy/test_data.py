"""Each rank gets the same samples as under Lightning's strategies for every kind of data."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
from torch.utils.data import DataLoader, RandomSampler

from lightning_megatron import MegatronStrategy
from lightning_megatron.strategy.process.dataloaders import seed_dataloader
from tests.strategy.data_cases import CASES, SHUFFLED, fit
from tests.world import run_world


def silence_warnings() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def two_ranks(rank: int, size: int) -> dict[str, dict[str, Any]]:
    silence_warnings()
    strategies = {
        "ddp": lambda: "ddp",
        "dp2": MegatronStrategy,
        "tp2": lambda: MegatronStrategy(tp=2, tensor_parallel_plan={}),
    }
    return {
        name: {case: fit(case, make_strategy(), size) for case in {**CASES, **SHUFFLED}}
        for name, make_strategy in strategies.items()
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_world(two_ranks, 2)


@pytest.fixture(scope="module")
def one_device() -> dict[str, Any]:
    silence_warnings()
    return {case: fit(case, "auto") for case in {**CASES, **SHUFFLED}}


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert expected["seen"]
    assert {**actual, "weight": 0} == {**expected, "weight": 0}
    assert actual["weight"] == pytest.approx(expected["weight"], abs=1e-12)


@pytest.mark.parametrize("case", [*CASES, *SHUFFLED])
def test_data_ranks_get_the_same_samples_as_under_ddp(
    ranks: list[dict[str, Any]], case: str
) -> None:
    for results in ranks:
        assert_same(results["dp2"][case], results["ddp"][case])


@pytest.mark.parametrize("case", CASES)
def test_ranks_of_one_data_rank_get_the_same_samples_as_one_device(
    ranks: list[dict[str, Any]], one_device: dict[str, Any], case: str
) -> None:
    for results in [*(rank["tp2"] for rank in ranks), {case: fit(case, MegatronStrategy())}]:
        assert_same(results[case], one_device[case])


def samples_of(batches: list[Any]) -> list[float]:
    return [sample for _, batch, _ in batches for sample in batch]


@pytest.mark.parametrize("case", SHUFFLED)
def test_one_data_rank_shuffles_all_samples_anew_in_every_epoch(
    ranks: list[dict[str, Any]], one_device: dict[str, Any], case: str
) -> None:
    first, second = (samples_of(rank["tp2"][case]["seen"]) for rank in ranks)
    assert first == second
    expected = samples_of(one_device[case]["seen"])
    half = len(expected) // 2
    for epoch in (slice(half), slice(half, None)):
        assert sorted(first[epoch]) == sorted(expected[epoch])
        assert first[epoch] != sorted(first[epoch])
    assert first[:half] != first[half:]


def test_skipped_batches_on_one_device_match_lightning() -> None:
    silence_warnings()
    assert_same(
        fit("accumulated", MegatronStrategy(), skips=True), fit("accumulated", "auto", skips=True)
    )


def skip_batches_on_ranks(rank: int, size: int) -> str:
    silence_warnings()
    with pytest.raises(RuntimeError) as raised:
        fit("in order", MegatronStrategy(), size, skips=True)
    return str(raised.value)


def test_a_skipped_batch_raises_on_several_ranks() -> None:
    for message in run_world(skip_batches_on_ranks, 2):
        assert "training_step must return a loss on every rank" in message
        assert "0.0 * output.sum()" in message


def test_samplers_that_users_divide_have_one_order_on_all_data_ranks() -> None:
    loaders = [DataLoader(range(32), sampler=RandomSampler(range(32))) for _ in range(3)]
    for loader, seed, data_rank in zip(loaders, (1, 1, 2), (0, 1, 0), strict=True):
        seed_dataloader(loader, seed, data_rank)
    first, second, reseeded = (list(loader.sampler) for loader in loaders)
    assert first == second != reseeded
    assert [loader.generator.initial_seed() for loader in loaders].count(
        loaders[0].generator.initial_seed()
    ) == 1
