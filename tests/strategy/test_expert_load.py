"""Figures and pictures of the callback ``ExpertLoad``."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron import ExpertLoad, MegatronStrategy, UnsupportedError
from lightning_megatron.errors import MissingExtraError
from lightning_megatron.experts.routing.statistics import StepStatistics
from lightning_megatron.experts.transport.rank_rows import StepRows
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.strategy.callbacks import expert_load, expert_load_picture
from lightning_megatron.strategy.callbacks.expert_load import (
    figures_of,
    gather_layers,
    names_of,
    rank_figures_of,
)
from lightning_megatron.strategy.callbacks.expert_load_picture import draw_load
from tests.strategy.tiny import TinyLM, loader

# A mapping, as in the hyperparameters of a module.
EXPERTS = {
    "num_experts": 4,
    "top_k": 2,
    "ffn_hidden_size": 8,
    "layers": 2,
    "aux_loss": 0.01,
    "z_loss": 0.001,
    "capacity_factor": 1.0,
}


def module_of(**options: Any) -> TinyLM:
    return TinyLM(
        num_layers=4, mlp_bias=False, ffn_hidden_size=16, **{"experts": EXPERTS, **options}
    )


def fit(
    folder: Path | str,
    callback: ExpertLoad | None = None,
    module: TinyLM | None = None,
    **options: Any,
) -> None:
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    settings = {"accelerator": "cpu", "devices": 1, "max_steps": 5, "log_every_n_steps": 2, **quiet}
    # With one sequence in a microbatch, every layout has the same microbatches.
    strategy = options.pop("strategy", None) or MegatronStrategy(
        microbatch_size=1, **options.pop("layout", {})
    )
    batch_size = options.pop("batch_size", 4)
    logger = options.pop("logger", CSVLogger(folder, name="", version=""))
    callbacks = [callback or ExpertLoad()]
    trainer = Trainer(
        **{**settings, **options}, strategy=strategy, logger=logger, callbacks=callbacks
    )
    # With shuffling, one and several data ranks take the samples in the same order.
    trainer.fit(module or module_of(), loader(batch_size=batch_size, shuffle=True))


def logged(folder: Path | str) -> dict[int, dict[str, float]]:
    """Read the logged values of experts, by step."""
    rows: dict[int, dict[str, float]] = {}
    with Path(folder, "metrics.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            values = {
                name: float(value)
                for name, value in row.items()
                if name.startswith("experts/") and value
            }
            if values:
                rows[int(row["step"])] = values
    return rows


def test_per_expert_loads_can_be_omitted_and_accumulated_batches_log_one_row(
    tmp_path: Path,
) -> None:
    fit(
        tmp_path,
        ExpertLoad(per_expert=False),
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        max_steps=3,
    )
    rows = logged(tmp_path)
    assert list(rows) == [0, 1, 2]
    assert not [name for row in rows.values() for name in row if "/load/" in name]


def step_of(load: list[int], dropped: int = 0) -> StepStatistics:
    config = ExpertsConfig(num_experts=len(load), top_k=2, ffn_hidden_size=8)
    # Dropped choices, sum of the entropies of all tokens, both losses, number of microbatches.
    numbers = [dropped, 0.5 * sum(load) / 2, 1.0, 2.0, 1]
    return StepStatistics(torch.tensor([*numbers, *load], dtype=torch.float64), config, num_parts=1)


def test_figures_of_layers_follow_from_step_statistics() -> None:
    layers = gather_layers(
        {2: step_of([6, 2, 0, 0], 2), 0: step_of([1, 1, 1, 1])}, ParallelMesh.single()
    )
    assert list(layers) == [0, 2]
    values = {name: float(value) for name, value in names_of(layers, per_expert=True).items()}
    assert values["experts/layer_2/max_over_mean"] == 3.0
    assert values["experts/layer_2/dropped"] == 0.25
    assert values["experts/layer_2/load/expert_1"] == 0.25
    assert values["experts/max_over_mean"] == 2.0
    assert (
        values["experts/entropy"],
        values["experts/balance_loss"],
        values["experts/z_loss"],
    ) == (0.5, 1.0, 2.0)
    assert len(values) == 5 * 3 + 2 * 4


def test_loads_of_one_step_and_figures_of_ranks_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason='needs pip install "lightning-megatron[plot]"')
    layers = gather_layers({7: step_of([5, 5])}, ParallelMesh.single())
    draw_load(layers, {99: torch.ones(1)}, tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000
    even = StepRows(
        before=torch.ones(2),
        after=torch.ones(2),
        moved=torch.tensor(0.0),
        clones=torch.tensor(0.0),
        away=torch.zeros(2),
        num_microbatches=torch.tensor(1.0),
        needed=torch.tensor(1.0),
    )
    layers[7] |= rank_figures_of(even)
    draw_load(layers, {99: torch.ones(1)}, tmp_path / "ranks.png")
    layers[7] |= rank_figures_of(replace(even, before=torch.tensor([2.0, 0.0])))
    draw_load(layers, {99: torch.ones(1)}, tmp_path / "clones.png")
    sizes = [(tmp_path / f"{name}.png").stat().st_size for name in ("one", "ranks", "clones")]
    assert sizes == sorted(set(sizes)), "each has more to show"


def test_figures_of_ranks_follow_from_step_rows() -> None:
    rows = StepRows(
        before=torch.tensor([30.0, 10.0, 0.0, 0.0]),
        after=torch.tensor([12.0, 10.0, 10.0, 8.0]),
        moved=torch.tensor(0.45),
        clones=torch.tensor(2.5),
        away=torch.tensor([2.5, 0.0, 0.0, 0.0]),
        num_microbatches=torch.tensor(2.0),
        needed=torch.tensor(7.0),
    )
    layers = {number: figures_of(step_of([5, 5])) for number in (0, 1)}
    assert not [name for name in names_of(layers, per_expert=False) if "rank" in name]
    layers[0] |= rank_figures_of(rows)
    layers[1] |= rank_figures_of(replace(rows, before=rows.after))
    values = {name: float(value) for name, value in names_of(layers, per_expert=False).items()}
    assert values["experts/layer_0/rank_max_over_mean"] == 3.0
    assert values["experts/rank_max_over_mean"] == pytest.approx(2.1)
    assert values["experts/rank_max_over_mean_after"] == pytest.approx(1.2)
    assert values["experts/layer_1/moved"] == pytest.approx(0.45)
    assert values["experts/layer_1/clones"] == 2.5
    assert values["experts/layer_1/rows_needed"] == 7.0
    assert len(values) == (5 + 5) * 3


@pytest.fixture
def logged_messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the messages of the callback to the user."""
    messages: list[str] = []
    monkeypatch.setattr(expert_load, "rank_zero_info", messages.append)
    return messages


def test_training_without_matplotlib_or_a_logger_folder_ends_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged_messages: list[str]
) -> None:
    def missing(module: str, extra: str) -> None:
        raise MissingExtraError(f'pip install "lightning-megatron[{extra}]"')

    monkeypatch.setattr(expert_load_picture, "import_extra", missing)
    fit(tmp_path)
    assert 'pip install "lightning-megatron[plot]"' in logged_messages[-1]
    fit(tmp_path, logger=False)
    assert "no logger with a folder" in logged_messages[-1]
    fit(tmp_path / "silent", max_steps=1)
    assert "no step was logged" in logged_messages[-1]


def test_strategies_of_lightning_and_models_without_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"the strategy is SingleDeviceStrategy.*MegatronStrategy"
    ):
        fit(tmp_path, strategy="auto")
    with pytest.raises(UnsupportedError, match="needs a model with experts"):
        fit(tmp_path, module=module_of(experts=None))
