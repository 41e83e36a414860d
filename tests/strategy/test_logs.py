"""What steps and hooks log in any way reaches callbacks and loggers as under Lightning's own
strategies.
"""

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
    "tp2": lambda: MegatronStrategy(tp=2),
    "pp2": lambda: MegatronStrategy(pp=2, pipeline_plan={"blocks": "blocks"}, microbatch_size=4),
}


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.CRITICAL)


def two_ranks(rank: int, size: int, folder: Path) -> dict[str, Any]:
    quiet()
    found = {}
    for name, strategy in STRATEGIES.items():
        place = (rank, size) if name in ("ddp", "dp2") else (0, 1)
        found[name] = run(strategy(), size, place, folder / name, of_loss=name != "pp2")
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(two_ranks, 2, tmp_path_factory.mktemp("two"))


def assert_logged_alike(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert len(expected["callbacks"]) > 100
    assert found["callbacks"] == pytest.approx(expected["callbacks"], rel=1e-6)
    if "rows" in found:
        assert len(found["rows"]) == len(expected["rows"])
        for row, other in zip(expected["rows"], found["rows"], strict=True):
            assert other == pytest.approx(row, rel=1e-6)


def test_logs_of_one_rank_are_those_of_one_device(tmp_path: Path) -> None:
    quiet()
    expected = run("auto", 1, (0, 1), tmp_path / "auto")
    assert_logged_alike(expected, run(MegatronStrategy(), 1, (0, 1), tmp_path / "one"))


def test_logs_of_data_ranks_are_those_of_ddp(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert_logged_alike(found["ddp"], found["dp2"])


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_logs_of_a_model_in_parts_are_those_of_one_device(
    ranks: list[dict[str, Any]], layout: str, tmp_path: Path
) -> None:
    quiet()
    expected = run("auto", 1, (0, 1), tmp_path, of_loss=layout != "pp2")
    for found in ranks:
        assert_logged_alike(expected, found[layout])


def test_a_reduction_that_lightning_does_not_know_is_refused_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: Logs, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("strange", loss, on_epoch=True, reduce_fx=lambda values: values.median())
        return loss

    monkeypatch.setattr(Logs, "training_step", step)
    quiet()
    for strategy in ("auto", MegatronStrategy()):
        with pytest.raises(MisconfigurationException, match="reduce_fx"):
            run(strategy, 1, (0, 1), tmp_path)
