"""Callbacks, loggers and settings of Lightning's own do what they do without the strategy, or are
refused by name.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from lightning_megatron import MegatronStrategy, UnsupportedError
from tests.strategy.callback_cases import CASES, Bench, Net
from tests.sweeps import chosen
from tests.world import run_world

#: Cases that are refused where a rank holds a part of the model, and what the messages say.
REFUSED = {
    "averaged": "StochasticWeightAveraging needs the whole model on every rank",
    "averaged with statistics": "StochasticWeightAveraging needs the whole model on every rank",
    "pruned": "ModelPruning needs the whole model on every rank",
    "graphed": "Graphs(log_graph=True) cannot be used with tp",
}
WITH_STAGES = {
    **REFUSED,
    "lambdas": "LambdaCallback.on_before_backward cannot be called with pp (2) above 1",
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
    "finetuned",
    "summarized",
    "device statistics",
    "excepted",
    "rate found in the fit",
)
ALONE = ("anomalies", "clipped by value")
#: What one rank tells as well as two.
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


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.CRITICAL)


def run(
    case: str, strategy: Callable[[], Any], devices: int, place: tuple[int, int], folder: Path
) -> Any:
    """Return what came of a case, or the message of a refusal."""
    try:
        return CASES[case](Bench(strategy, devices, place, folder))
    except UnsupportedError as error:
        return {"refused": str(error)}


def two_ranks(rank: int, size: int, folder: Path) -> dict[tuple[str, str], Any]:
    quiet()
    found = {}
    for name, (strategy, is_data) in STRATEGIES.items():
        cases = ON_DATA_RANKS if is_data else (*IN_PARTS, *ALONE, *WITH_STAGES)
        for case in cases:
            place = (rank, size) if is_data else (0, 1)
            found[name, case] = run(case, strategy, size, place, folder / name / case)
            dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Any]]:
    return run_world(two_ranks, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    quiet()
    folder = tmp_path_factory.mktemp("one")
    return {
        case: run(case, lambda: "auto", 1, (0, 1), folder / case)
        for case in {*ON_ONE_RANK, *IN_PARTS, *ALONE}
    }


def assert_alike(expected: Any, found: Any, leave_out: tuple[str, ...] = ()) -> None:
    if isinstance(expected, Mapping):
        assert set(found) == set(expected)
        for name in set(expected) - set(leave_out):
            assert_alike(expected[name], found[name])
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=2e-6)
    elif isinstance(expected, list):
        for one, other in zip(expected, found, strict=True):
            assert_alike(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("case", ON_ONE_RANK)
def test_a_feature_does_on_one_rank_what_it_does_without_the_strategy(
    one_device: dict[str, Any], case: str, tmp_path: Path
) -> None:
    quiet()
    assert_alike(one_device[case], run(case, MegatronStrategy, 1, (0, 1), tmp_path))


@pytest.mark.parametrize("case", ON_DATA_RANKS)
def test_a_feature_does_on_data_ranks_what_it_does_under_ddp(
    ranks: list[dict[Any, Any]], case: str
) -> None:
    for found in ranks:
        assert_alike(found["ddp", case], found["dp2", case])


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
@pytest.mark.parametrize("case", [*IN_PARTS, *ALONE])
def test_a_feature_goes_with_parts_of_a_model(
    ranks: list[dict[Any, Any]], one_device: dict[str, Any], case: str, layout: str
) -> None:
    # A stage shows no sizes, and ranks hold parts of weights; only rank 0 has files.
    leave_out = ("weights", "names", "rows", *(("notes",) if layout == "pp2" else ()))
    for found in ranks:
        expected = {k: v for k, v in one_device[case].items() if k not in leave_out}
        assert_alike(expected, {k: v for k, v in found[layout, case].items() if k not in leave_out})


@pytest.mark.parametrize(("layout", "refused"), [("tp2", REFUSED), ("pp2", WITH_STAGES)])
def test_what_needs_the_whole_model_is_refused_by_name(
    ranks: list[dict[Any, Any]], layout: str, refused: dict[str, str]
) -> None:
    for found in ranks:
        for case, message in refused.items():
            assert found[layout, case]["refused"].startswith(message), case


def test_resetting_pruned_weights_is_refused(tmp_path: Path) -> None:
    bench = Bench(MegatronStrategy, 1, (0, 1), tmp_path)
    with pytest.raises(UnsupportedError, match="Use use_lottery_ticket_hypothesis=False"):
        bench.fit(callbacks=[ModelPruning("l1_unstructured", amount=0.5)])


def test_a_search_for_the_batch_size_is_refused_as_under_ddp(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not supported with distributed strategies"):
        Tuner(Bench(MegatronStrategy, 1, (0, 1), tmp_path).trainer()).scale_batch_size(Net())
