"""Every Trainer feature takes the same steps and gives the same numbers as under Lightning's own strategies.

Each layout runs all cases in one script, as a user would start it; float64, so that equal means equal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.strategy.run_cases import CASES
from tests.strategy.scripts import run_script

ALL = list(CASES)
SOME = ["plain", "accumulate", "clip_norm", "last_batch_smaller", "checkpoints", "resume", "evaluation"]

# name of the run: settings of the script. The last run also goes on from what the others have saved.
RUNS: dict[str, dict[str, Any]] = {
    "pp2": {"devices": 2, "cases": ALL, "strategies": {"pp2": {"pp": 2, "microbatch_size": 2}}},
    "dp2": {"devices": 2, "cases": ALL, "strategies": {"ddp": "ddp", "dp2": {"microbatch_size": 1}}},
    "tp2pp2": {"devices": 4, "cases": SOME, "strategies": {"tp2pp2": {"tp": 2, "pp": 2, "microbatch_size": 1}}},
    "one": {"devices": 1, "cases": ALL, "strategies": {"plain": None, "one": {"microbatch_size": 2}}},
    "others": {"devices": 1, "cases": ["continue_others"], "strategies": {"others": {"microbatch_size": 4}}},
}
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results by name of the strategy, one for each rank."""
    folder = tmp_path_factory.mktemp("cases")
    found: Results = {}
    for run, settings in RUNS.items():
        done = run_script("run_cases", str(folder / run), str(folder / "checkpoints"), json.dumps(settings))
        assert done.returncode == 0, f"{run}: {done.stderr[-6000:]}"
        for path in sorted(Path(folder).glob(f"{run}.*.json")):
            for name, cases in json.loads(path.read_text()).items():
                found.setdefault(name, []).append(cases)
    return found


def differences(expected: Any, found: Any, path: str = "") -> list[str]:
    """List where two nests of results differ."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        names = sorted(set(expected) | set(found))
        return [
            difference
            for name in names
            for difference in differences(expected.get(name, "absent"), found.get(name, "absent"), f"{path}/{name}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [difference for i, (a, b) in pairs for difference in differences(a, b, f"{path}[{i}]")]
    if isinstance(expected, float) and isinstance(found, float):
        # Lightning keeps its own sums over an epoch in float32.
        same = math.isclose(expected, found, rel_tol=1e-6, abs_tol=1e-7)
        return [] if same else [f"{path}: {expected} but {found}"]
    return [] if expected == found else [f"{path}: {expected} but {found}"]


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize(
    ("reference", "name"), [("plain", "one"), ("plain", "pp2"), ("ddp", "dp2"), ("plain", "tp2pp2")]
)
def test_a_feature_behaves_as_under_lightnings_own_strategy(
    results: Results, reference: str, name: str, case: str
) -> None:
    if case not in results[name][0]:
        pytest.skip(f"{name} runs a selection of the cases")
    for rank, found in enumerate(results[name]):
        # Values that are not synchronised are those of the rank that read the same data.
        expected = results[reference][rank if reference == "ddp" else 0]
        assert not differences(expected[case], found[case]), f"rank {rank}"


@pytest.mark.parametrize("saved_by", ["pp2", "tp2pp2", "one"])
def test_training_goes_on_in_another_layout(results: Results, saved_by: str) -> None:
    assert not differences(results["plain"][0]["resume"], results["others"][0]["continue_others"][saved_by])


@pytest.mark.parametrize("saved_by", ["plain", "ddp"])
def test_weights_of_a_checkpoint_file_are_loaded(results: Results, saved_by: str) -> None:
    expected = results[saved_by][0]["resume"]["validated"]
    assert not differences(expected, results["others"][0]["continue_others"][saved_by]["validated"])
