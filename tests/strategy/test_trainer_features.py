"""Every Trainer feature gives the same steps and numbers as with Lightning's own strategies.

Each number of processes runs all of its cases in one world. The cases compute in float64, so that
rounding does not hide differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from tests.strategy.run_cases import CASES, run_cases
from tests.sweeps import chosen
from tests.world import run_world

pytestmark = pytest.mark.slow

ALL_CASES = list(CASES)
TENSOR_AND_PIPELINE_CASES = chosen(
    [
        "plain",
        "accumulate",
        "clip_norm",
        "last_batch_smaller",
        "checkpoints",
        "resume",
        "evaluation",
    ],
    "resume",
    "evaluation",
)
PIPELINE_CASES = chosen(
    ALL_CASES,
    "plain",
    "limits",
    "val_check_by_step",
    "accumulate",
    "clip_norm",
    "epoch_schedule",
    "plateau",
    "fast_dev_run",
    "checkpoints",
    "resume",
    "second_fit",
)
ONE_PROCESS_CASES = chosen(
    ALL_CASES, "val_check_interval", "clip_value", "overfit_batches", "resume"
)
#: Cases of data parallelism: samples that ranks read, and decisions that ranks agree on.
DATA_CASES = chosen(
    ALL_CASES,
    "accumulate",
    "last_batch_smaller",
    "early_stopping",
    "resume",
    "evaluation",
    "iterable",
)

# Number of processes, cases, strategies. The last world also resumes from checkpoints of the other
# worlds.
WORLDS: list[tuple[int, list[str], dict[str, Any]]] = [
    (2, PIPELINE_CASES, {"pp2": {"pp": 2, "microbatch_size": 2}}),
    (2, DATA_CASES, {"ddp": "ddp", "dp2": {"microbatch_size": 1}}),
    (4, TENSOR_AND_PIPELINE_CASES, {"tp2pp2": {"tp": 2, "pp": 2, "microbatch_size": 1}}),
    (1, ALL_CASES, {"plain": None}),
    (1, ONE_PROCESS_CASES, {"one": {"microbatch_size": 2}}),
    (1, ["continue_others"], {"others": {"microbatch_size": 4}}),
]
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return the results of all ranks by name of the strategy."""
    folder = tmp_path_factory.mktemp("checkpoints")
    by_strategy: Results = {}
    for size, cases, strategies in WORLDS:
        for outcomes_of_rank in run_world(run_cases, size, folder, cases, strategies):
            for name, outcomes in outcomes_of_rank.items():
                by_strategy.setdefault(name, []).append(outcomes)
    return by_strategy


def differences(expected: Any, actual: Any, path: str = "") -> list[str]:
    """List the places at which two nested results differ."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        names = sorted(set(expected) | set(actual))
        return [
            difference
            for name in names
            for difference in differences(
                expected.get(name, "absent"), actual.get(name, "absent"), f"{path}/{name}"
            )
        ]
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        pairs = enumerate(zip(expected, actual, strict=True))
        return [
            difference for i, (a, b) in pairs for difference in differences(a, b, f"{path}[{i}]")
        ]
    if isinstance(expected, float) and isinstance(actual, float):
        # Lightning keeps its own sums over an epoch in float32.
        is_close = math.isclose(expected, actual, rel_tol=1e-6, abs_tol=1e-7)
        return [] if is_close else [f"{path}: {expected} but {actual}"]
    return [] if expected == actual else [f"{path}: {expected} but {actual}"]


@pytest.mark.parametrize(
    ("reference", "name", "case"),
    [
        *(("plain", "one", case) for case in ONE_PROCESS_CASES),
        *(("plain", "pp2", case) for case in PIPELINE_CASES),
        *(("ddp", "dp2", case) for case in DATA_CASES),
        *(("plain", "tp2pp2", case) for case in TENSOR_AND_PIPELINE_CASES),
    ],
)
def test_trainer_feature_gives_the_results_of_lightnings_own_strategy(
    results: Results, reference: str, name: str, case: str
) -> None:
    for rank, actual in enumerate(results[name]):
        # Values that are not synchronised are those of the rank that read the same data.
        expected = results[reference][rank if reference == "ddp" else 0]
        assert not differences(expected[case], actual[case]), f"rank {rank}"


@pytest.mark.parametrize("saved_by", ["pp2", "tp2pp2", "one"])
def test_training_continues_in_another_layout(results: Results, saved_by: str) -> None:
    assert not differences(
        results["plain"][0]["resume"], results["others"][0]["continue_others"][saved_by]
    )


@pytest.mark.parametrize("saved_by", ["plain", "ddp"])
def test_weights_of_checkpoint_files_of_lightnings_strategies_are_loaded(
    results: Results, saved_by: str
) -> None:
    expected = results[saved_by][0]["resume"]["validated"]
    assert not differences(expected, results["others"][0]["continue_others"][saved_by]["validated"])
