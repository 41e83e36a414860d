"""Figures and pictures of the callback ``ExpertLoad``, and what ``experts.rows`` and
``experts.clones`` accept and save.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_megatron import ExpertClones, ExpertLoad, HuggingFaceCausalLM, MegatronStrategy
from lightning_megatron.errors import MissingExtraError, UnsupportedError
from lightning_megatron.experts.routing.statistics import StepStatistics
from lightning_megatron.experts.transport.rank_rows import StepRows
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.strategy.callbacks import expert_load
from lightning_megatron.strategy.callbacks.expert_load import (
    figures_of,
    gather_layers,
    names_of,
    rank_figures_of,
)
from tests.fits import Job, Language, Tokens, run_job, strategy_with, trainer_of
from tests.optimizer.fused_fits import SMALL
from tests.refusals import check_refusals

EXPERTS: Any = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}
MIXTURE = replace(SMALL, mlp_bias=False, ffn_hidden_size=16, experts=EXPERTS)


def fit(
    folder: Path, callback: Any = None, model: Any = MIXTURE, layout: Any = (), **trainer: Any
) -> None:
    callbacks = [callback or ExpertLoad()]
    logger = CSVLogger(folder, name="", version="")
    trainer = {"logger": logger, "log_every_n_steps": 2, **trainer}
    strategy = {} if layout == () else layout
    run_job(Job(model, strategy, "32-true", trainer=trainer, callbacks=lambda: callbacks))


def test_per_expert_loads_can_be_omitted_and_accumulated_batches_log_one_row(tmp_path):
    fit(tmp_path, ExpertLoad(per_expert=False), accumulate_grad_batches=2, log_every_n_steps=1)
    with (tmp_path / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["experts/entropy"]]
    assert [int(row["step"]) for row in rows] == [0, 1, 2]
    assert not [name for name in rows[0] if "/load/" in name]


def step_of(load: list[int], dropped: int = 0) -> StepStatistics:
    config = ExpertsConfig(num_experts=len(load), top_k=2, ffn_hidden_size=8)
    # Dropped choices, sum of the entropies of all tokens, both losses, number of microbatches.
    numbers = [dropped, 0.5 * sum(load) / 2, 1.0, 2.0, 1]
    return StepStatistics(torch.tensor([*numbers, *load], dtype=torch.float64), config, num_parts=1)


def rows_of(before: list[float], after: list[float]) -> StepRows:
    numbers = {"moved": 0.45, "clones": 2.5, "num_microbatches": 2.0, "needed": 7.0}
    return StepRows(
        before=torch.tensor(before),
        after=torch.tensor(after),
        away=torch.tensor([2.5] + [0.0] * (len(before) - 1)),
        **{name: torch.tensor(number) for name, number in numbers.items()},
    )


def values_of(layers: Any, per_expert: bool = False) -> dict[str, float]:
    return {name: float(value) for name, value in names_of(layers, per_expert=per_expert).items()}


def test_figures_of_layers_follow_from_step_statistics():
    steps = {2: step_of([6, 2, 0, 0], 2), 0: step_of([1, 1, 1, 1])}
    layers = gather_layers(steps, ParallelMesh.single())
    assert list(layers) == [0, 2]
    values = values_of(layers, per_expert=True)
    assert len(values) == 7 * 3 + 2 * 4
    expected = {
        "layer_2/max_over_mean": 3.0, "layer_2/dropped": 0.25, "layer_2/load/expert_1": 0.25, "max_over_mean": 2.0,
        "layer_2/p50": 0.5, "layer_2/p95": pytest.approx(2.7), "entropy": 0.5, "balance_loss": 1.0, "z_loss": 2.0,
    }  # fmt: skip
    assert {name: values[f"experts/{name}"] for name in expected} == expected


def test_figures_of_ranks_follow_from_step_rows():
    rows = rows_of([30.0, 10.0, 0.0, 0.0], [12.0, 10.0, 10.0, 8.0])
    layers = {number: figures_of(step_of([5, 5])) for number in (0, 1)}
    assert not [name for name in values_of(layers) if "rank" in name]
    layers[0] |= rank_figures_of(rows)
    layers[1] |= rank_figures_of(replace(rows, before=rows.after))
    values = values_of(layers)
    assert len(values) == (7 + 5) * 3
    expected = {
        "layer_0/rank_max_over_mean": 3.0, "rank_max_over_mean": 2.1, "rank_max_over_mean_after": 1.2,
        "layer_1/moved": 0.45, "layer_1/clones": 2.5, "layer_1/rows_needed": 7.0,
    }  # fmt: skip
    assert {name: values[f"experts/{name}"] for name in expected} == pytest.approx(expected)


def test_training_without_matplotlib_or_a_logger_folder_ends_with_a_message(tmp_path, monkeypatch):
    def missing(module, extra):
        raise MissingExtraError(f'pip install "lightning-megatron[{extra}]"')

    messages: list[str] = []
    monkeypatch.setattr(expert_load, "rank_zero_info", messages.append)
    monkeypatch.setattr(expert_load, "import_extra", missing)
    options: dict[str, Any]
    for options, words in (
        ({}, 'pip install "lightning-megatron[plot]"'),
        ({"logger": False}, "no logger with a folder"),
        ({"log_every_n_steps": 50}, "no step was logged"),
    ):
        fit(tmp_path / words[:2], **options)
        assert words in messages[-1]


def test_strategies_of_lightning_and_models_without_experts_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="the strategy is SingleDeviceStrategy.*Megatron"):
        fit(tmp_path, layout=None)
    with pytest.raises(UnsupportedError, match="needs a model with experts"):
        fit(tmp_path, model=SMALL)


# ---- limits of rows, and clones

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"experts.rows": 0.99, "ep": 2}, "at least 1"),
    ({"experts.rows": 1.25}, "experts.rows (1.25) needs ep above 1"),
    ({"experts.rows": 1.25, "ep": 2, "experts.transport": "all_to_all"}, "needs experts.transport of one_sided, all_gath"),
    ({"experts.clones": -1, "ep": 2}, "it is -1"),
    ({"experts.clones": {"places": 0}, "ep": 2}, "experts.clones.places must be"),
    ({"experts.clones": {"rows": 1}, "ep": 2}, "experts.clones has no setting 'rows'"),
    ({"experts.clones": {"places": 1, "min_rows": 0.5}, "ep": 2}, "experts.clones.min_rows must be"),
    ({"experts.clones": 1}, "experts.clones (1) needs ep above 1"),
    ({"experts.clones": 1, "ep": 2, "experts.transport": "all_gather"}, "needs experts.transport of one_sided or auto"),
]  # fmt: skip


class Counts(Language):
    def on_after_backward(self) -> None:
        self.outcomes["calls"] = self.outcomes.get("calls", 0) + 1


def test_wrong_options_are_refused_before_a_launch(tmp_path):
    check_refusals(strategy_with, REFUSED)

    def launch(module, batches=1, **layout):
        job = Job(strategy=layout, trainer={"accumulate_grad_batches": batches})
        trainer_of(job, layout["ep"]).fit(module, DataLoader(Tokens(), batch_size=8))

    experts: Any = {**EXPERTS, "linear_bias": True}
    biased, manual = Language(replace(MIXTURE, experts=experts)), Language(MIXTURE)
    manual.automatic_optimization = False
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(**sizes, **heads, num_local_experts=4)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    places = "experts.clones (4) must be at most 3: with ep"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"module": Language(MIXTURE), "ep": 4, "experts.clones": 4}, places),
        ({"module": HuggingFaceCausalLM(str(tmp_path)), "ep": 4, "experts.clones": 4}, places),
        ({"module": biased, "ep": 4, "experts.clones": 1}, "needs experts without biases"),
        ({"module": Counts(MIXTURE), "batches": 3, "ep": 2, "experts.rows": 1.25}, "Counts.on_after_backward, which may"),
        ({"module": manual, "ep": 2, "experts.rows": 1.25}, "needs automatic optimization"),
    ]  # fmt: skip
    check_refusals(launch, cases)


def test_expert_clones_accepts_a_number_a_mapping_or_settings():
    def clones_of(value):
        return MegatronStrategy(ep=2, experts={"clones": value}).options.clones

    assert clones_of(0) is None
    assert clones_of(2) == ExpertClones(2)
    for option in ({"places": 2, "min_rows": 7}, ExpertClones(2, 7)):
        assert clones_of(option) == ExpertClones(2, min_rows=7)
    # The speed of a GPU gives the default.
    default, explicit = ExpertClones(1), ExpertClones(3, min_rows=40)
    assert default.on("cuda") == ExpertClones(1, 2476)
    assert default.on("cpu") == ExpertClones(1, 0)
    assert explicit.on("cuda") == explicit.on("cpu") == ExpertClones(3, 40)
