"""Every Trainer feature takes the same steps and gives the same numbers as under Lightning's own
strategies.

Each number of processes runs all of its cases in one world; float64, so that equal means equal.
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

ALL = list(CASES)
SOME = chosen(
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
STAGES = chosen(
    ALL,
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
ALONE = chosen(ALL, "val_check_interval", "clip_value", "overfit_batches", "resume")
#: Cases of data parallelism: what ranks read, and what they agree on.
DATA = chosen(
    ALL, "accumulate", "last_batch_smaller", "early_stopping", "resume", "evaluation", "iterable"
)

# Number of processes, cases, strategies. The last world also goes on from what the others have
# saved.
WORLDS: list[tuple[int, list[str], dict[str, Any]]] = [
    (2, STAGES, {"pp2": {"pp": 2, "microbatch_size": 2}}),
    (2, DATA, {"ddp": "ddp", "dp2": {"microbatch_size": 1}}),
    (4, SOME, {"tp2pp2": {"tp": 2, "pp": 2, "microbatch_size": 1}}),
    (1, ALL, {"plain": None}),
    (1, ALONE, {"one": {"microbatch_size": 2}}),
    (1, ["continue_others"], {"others": {"microbatch_size": 4}}),
]
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results by name of the strategy, one for each rank."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found: Results = {}
    for size, cases, strategies in WORLDS:
        for ran in run_world(run_cases, size, folder, cases, strategies):
            for name, outcomes in ran.items():
                found.setdefault(name, []).append(outcomes)
    return found


def differences(expected: Any, found: Any, path: str = "") -> list[str]:
    """List where two nests of results differ."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        names = sorted(set(expected) | set(found))
        return [
            difference
            for name in names
            for difference in differences(
                expected.get(name, "absent"), found.get(name, "absent"), f"{path}/{name}"
            )
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [
            difference for i, (a, b) in pairs for difference in differences(a, b, f"{path}[{i}]")
        ]
    if isinstance(expected, float) and isinstance(found, float):
        # Lightning keeps its own sums over an epoch in float32.
        same = math.isclose(expected, found, rel_tol=1e-6, abs_tol=1e-7)
        return [] if same else [f"{path}: {expected} but {found}"]
    return [] if expected == found else [f"{path}: {expected} but {found}"]


@pytest.mark.parametrize(
    ("reference", "name", "case"),
    [
        *(("plain", "one", case) for case in ALONE),
        *(("plain", "pp2", case) for case in STAGES),
        *(("ddp", "dp2", case) for case in DATA),
        *(("plain", "tp2pp2", case) for case in SOME),
    ],
)
def test_a_feature_behaves_as_under_lightnings_own_strategy(
    results: Results, reference: str, name: str, case: str
) -> None:
    for rank, found in enumerate(results[name]):
        # Values that are not synchronised are those of the rank that read the same data.
        expected = results[reference][rank if reference == "ddp" else 0]
        assert not differences(expected[case], found[case]), f"rank {rank}"


@pytest.mark.parametrize("saved_by", ["pp2", "tp2pp2", "one"])
def test_training_continues_in_another_layout(results: Results, saved_by: str) -> None:
    assert not differences(
        results["plain"][0]["resume"], results["others"][0]["continue_others"][saved_by]
    )


@pytest.mark.parametrize("saved_by", ["plain", "ddp"])
def test_weights_of_a_checkpoint_file_are_loaded(results: Results, saved_by: str) -> None:
    expected = results[saved_by][0]["resume"]["validated"]
    assert not differences(expected, results["others"][0]["continue_others"][saved_by]["validated"])
