"""A warning names code that takes the number of processes for the number of data ranks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_megatron import MegatronStrategy
from tests.strategy.log_cases import Logs, make_loader
from tests.world import run_world


class ScalesRate(Logs):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01 * self.trainer.world_size)

    def on_train_epoch_end(self) -> None:
        assert self.trainer.world_size == 2


class AsksTorch(Logs):
    def on_train_start(self) -> None:
        assert dist.get_world_size() == 2
        assert dist.get_world_size(dist.group.WORLD) == 2


def line_after(function: Any) -> str:
    return f"test_world_notice.py:{function.__code__.co_firstlineno + 1}"


LAYOUTS: dict[str, Callable[[], Any]] = {
    "tp2": lambda: MegatronStrategy(tp=2, tensor_parallel_plan={"first": "column_gather"}),
    "pp2": lambda: MegatronStrategy(pp=2, pipeline_plan={"blocks": "blocks"}),
    "dp2": MegatronStrategy,
}


def notices(kind: type[Logs], strategy: Any) -> list[str]:
    """Return the warnings of a fit about the number of processes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(kind(), make_loader((0, 1)))
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if "reads the number of processes" in text]


def two_ranks(rank: int, size: int) -> dict[str, list[str]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    original = dist.get_world_size
    found = {
        f"{kind.__name__} {name}": notices(kind, strategy())
        for kind in (ScalesRate, AsksTorch)
        for name, strategy in LAYOUTS.items()
    }
    assert dist.get_world_size is original
    return found


def test_the_first_read_by_user_code_is_named_once_where_ranks_share_their_data() -> None:
    first, second = run_world(two_ranks, 2)
    assert not any(second.values())
    for layout in ("tp2", "pp2"):
        (of_rate,) = first[f"ScalesRate {layout}"]
        assert f"{line_after(ScalesRate.configure_optimizers)} reads the number of" in of_rate
        assert "The number of data-parallel ranks, which read different data, is 1" in of_rate
        assert "Use trainer.strategy.data_parallel_size" in of_rate
        (of_torch,) = first[f"AsksTorch {layout}"]
        assert f"{line_after(AsksTorch.on_train_start)} reads the number of" in of_torch
    assert first["ScalesRate dp2"] == first["AsksTorch dp2"] == []
