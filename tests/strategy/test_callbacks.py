"""Callbacks, loggers and settings of Lightning give the same results as without the strategy, or
are refused by name.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import ModelPruning, ThroughputMonitor
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from lightning_megatron import MegatronStrategy, UnsupportedError
from lightning_megatron.strategy.private.callback_patches import count_replicas_once
from tests.strategy.callback_cases import CASES, Bench, Net
from tests.sweeps import chosen
from tests.world import run_world

#: Cases that are refused if a rank holds a part of the model, and the beginnings of the messages.
REFUSED = {
    "pruned": "ModelPruning needs the whole model on every rank",
    "graphed": "Graphs(log_graph=True) cannot be used with tp",
}
WITH_STAGES = {
    **REFUSED,
    "lambdas": "LambdaCallback.on_before_backward cannot be called with pp (2) above 1",
    "averaged with statistics": "StochasticWeightAveraging cannot be used with pp (2) above 1 and",
}
STRATEGIES: dict[str, tuple[Callable[[], Any], bool]] = {
    "ddp": (lambda: "ddp", True),
    "dp2": (MegatronStrategy, True),
    "tp2": (
        lambda: MegatronStrategy(tp=2, tensor_parallel_plan={"*.up": "column", "*.down": "row"}),
        False,
    ),
    "pp2": (
        lambda: MegatronStrategy(pp=2, pipeline_plan={"blocks": "blocks"}, microbatch_size=4),
        False,
    ),
}
IN_PARTS = chosen(
    [
        "averaged",
        "finetuned",
        "summarized",
        "device statistics",
        "excepted",
        "rate found",
        "fitted twice",
        "profiled",
        "rate found in the fit",
        "accumulated by a schedule",
    ],
    "averaged",
    "finetuned",
    "summarized",
    "device statistics",
    "excepted",
    "rate found in the fit",
)
ALONE = ("anomalies", "clipped by value")
#: Cases for which one rank is enough.
SETTINGS = (
    "profiled",
    "profiled simply",
    "profiled at length",
    "bar",
    "rich bar",
    "summary",
    "timer",
    "barebones",
)
ON_DATA_RANKS = chosen(
    [case for case in CASES if case not in SETTINGS],
    "averaged with statistics",
    "pruned",
    "finetuned",
    "throughput",
    "rate found",
    "fitted twice",
    "accumulated by a schedule",
)
ON_ONE_RANK = chosen(
    list(CASES),
    *SETTINGS,
    *("averaged", "pruned", "lambdas", "graphed", "no inference mode", "fitted twice"),
)


def silence_warnings() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.CRITICAL)


def run(
    case: str, strategy: Callable[[], Any], devices: int, place: tuple[int, int], folder: Path
) -> Any:
    """Return the results of a case, or the message of its refusal."""
    try:
        return CASES[case](Bench(strategy, devices, place, folder))
    except UnsupportedError as error:
        return {"refused": str(error)}


def two_ranks(rank: int, size: int, folder: Path) -> dict[tuple[str, str], Any]:
    silence_warnings()
    results = {}
    for name, (strategy, is_data) in STRATEGIES.items():
        cases = ON_DATA_RANKS if is_data else (*IN_PARTS, *ALONE, *WITH_STAGES)
        for case in cases:
            place = (rank, size) if is_data else (0, 1)
            results[name, case] = run(case, strategy, size, place, folder / name / case)
            dist.barrier()
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Any]]:
    return run_world(two_ranks, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    silence_warnings()
    folder = tmp_path_factory.mktemp("one")
    return {
        case: run(case, lambda: "auto", 1, (0, 1), folder / case)
        for case in {*ON_ONE_RANK, *IN_PARTS, *ALONE}
    }


def assert_same(expected: Any, actual: Any, ignored: tuple[str, ...] = ()) -> None:
    if isinstance(expected, Mapping):
        assert set(actual) == set(expected)
        for name in set(expected) - set(ignored):
            assert_same(expected[name], actual[name])
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-5, abs=2e-6)
    elif isinstance(expected, list):
        for expected_item, actual_item in zip(expected, actual, strict=True):
            assert_same(expected_item, actual_item)
    else:
        assert actual == expected


@pytest.mark.parametrize("case", ON_ONE_RANK)
def test_features_on_one_rank_match_a_fit_without_the_strategy(
    one_device: dict[str, Any], case: str, tmp_path: Path
) -> None:
    silence_warnings()
    assert_same(one_device[case], run(case, MegatronStrategy, 1, (0, 1), tmp_path))


@pytest.mark.parametrize("case", ON_DATA_RANKS)
def test_features_on_data_ranks_match_ddp(ranks: list[dict[Any, Any]], case: str) -> None:
    for results in ranks:
        assert_same(results["ddp", case], results["dp2", case])


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
@pytest.mark.parametrize("case", [*IN_PARTS, *ALONE])
def test_features_match_one_device_when_ranks_hold_parts_of_the_model(
    ranks: list[dict[Any, Any]], one_device: dict[str, Any], case: str, layout: str
) -> None:
    # A summary of a stage has no sizes, ranks hold parts of weights, and only rank 0 writes files.
    ignored = ("weights", "names", "rows", *(("notes",) if layout == "pp2" else ()))
    for results in ranks:
        expected = {k: v for k, v in one_device[case].items() if k not in ignored}
        assert_same(expected, {k: v for k, v in results[layout, case].items() if k not in ignored})


@pytest.mark.parametrize(("layout", "refused"), [("tp2", REFUSED), ("pp2", WITH_STAGES)])
def test_features_that_need_the_full_model_are_refused_by_name(
    ranks: list[dict[Any, Any]], layout: str, refused: dict[str, str]
) -> None:
    for results in ranks:
        for case, message in refused.items():
            assert results[layout, case]["refused"].startswith(message), case


def test_pruning_that_resets_weights_is_refused(tmp_path: Path) -> None:
    bench = Bench(MegatronStrategy, 1, (0, 1), tmp_path)
    with pytest.raises(UnsupportedError, match="Use use_lottery_ticket_hypothesis=False"):
        bench.fit(callbacks=[ModelPruning("l1_unstructured", amount=0.5)])


def test_batch_size_search_is_refused_as_under_ddp(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not supported with distributed strategies"):
        Tuner(Bench(MegatronStrategy, 1, (0, 1), tmp_path).trainer()).scale_batch_size(Net())


def test_throughput_counts_the_operations_of_a_replica_once() -> None:
    monitor = ThroughputMonitor(len)
    monitor._throughputs = {
        RunningStage.TRAINING: Throughput(available_flops=100.0, world_size=8, window_size=2)
    }
    trainer: Any = SimpleNamespace(callbacks=[monitor])
    count_replicas_once(trainer, ranks_per_replica=4)
    for number in range(2):
        monitor._throughputs[RunningStage.TRAINING].update(
            time=float(number), batches=number, samples=3 * number, lengths=6 * number, flops=200
        )
    metrics = monitor._throughputs[RunningStage.TRAINING].compute()
    per_second = {name: value for name, value in metrics.items() if name.endswith("_per_sec")}
    assert per_second == {
        "device/batches_per_sec": 1.0,
        "batches_per_sec": 2.0,
        "device/samples_per_sec": 3.0,
        "samples_per_sec": 6.0,
        "device/items_per_sec": 6.0,
        "items_per_sec": 12.0,
        "device/flops_per_sec": 50.0,
        "flops_per_sec": 400.0,
    }
    assert metrics["device/mfu"] == 0.5
