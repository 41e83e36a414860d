"""Values that steps and hooks log reach callbacks and loggers as with Lightning's strategies."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatron import MegatronStrategy
from tests.strategy.log_cases import Logs, run
from tests.world import run_world

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "dp2": MegatronStrategy,
    "tp2": lambda: MegatronStrategy(tp=2, tensor_parallel_plan={}),
    "pp2": lambda: MegatronStrategy(pp=2, pipeline_plan={"blocks": "blocks"}, microbatch_size=4),
}


def silence_warnings() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.CRITICAL)


def two_ranks(rank: int, size: int, folder: Path) -> dict[str, Any]:
    silence_warnings()
    results = {}
    for name, strategy in STRATEGIES.items():
        place = (rank, size) if name in ("ddp", "dp2") else (0, 1)
        results[name] = run(strategy(), size, place, folder / name, of_loss=name != "pp2")
        dist.barrier()
    return results


@pytest.fixture(scope="module")
def results_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(two_ranks, 2, tmp_path_factory.mktemp("two"))


def assert_same_logs(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert len(expected["callbacks"]) > 100
    assert actual["callbacks"] == pytest.approx(expected["callbacks"], rel=1e-6)
    if "rows" in actual:
        assert len(actual["rows"]) == len(expected["rows"])
        for expected_row, actual_row in zip(expected["rows"], actual["rows"], strict=True):
            assert actual_row == pytest.approx(expected_row, rel=1e-6)


def test_logs_of_one_rank_match_one_device(tmp_path: Path) -> None:
    silence_warnings()
    expected = run("auto", 1, (0, 1), tmp_path / "auto")
    assert_same_logs(expected, run(MegatronStrategy(), 1, (0, 1), tmp_path / "one"))


def test_logs_of_data_ranks_match_ddp(results_of_ranks: list[dict[str, Any]]) -> None:
    for results in results_of_ranks:
        assert_same_logs(results["ddp"], results["dp2"])


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_logs_of_tensor_and_pipeline_parallel_models_match_one_device(
    results_of_ranks: list[dict[str, Any]], layout: str, tmp_path: Path
) -> None:
    silence_warnings()
    expected = run("auto", 1, (0, 1), tmp_path, of_loss=layout != "pp2")
    for results in results_of_ranks:
        assert_same_logs(expected, results[layout])


def test_unknown_reduction_raises_lightnings_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: Logs, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("strange", loss, on_epoch=True, reduce_fx=lambda values: values.median())
        return loss

    monkeypatch.setattr(Logs, "training_step", step)
    silence_warnings()
    for strategy in ("auto", MegatronStrategy()):
        with pytest.raises(MisconfigurationException, match="reduce_fx"):
            run(strategy, 1, (0, 1), tmp_path)
