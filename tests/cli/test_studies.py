"""The commands ``scaling-study``, ``tune`` and ``profile``: studies, the search for the fastest
settings, and where the time of a step goes.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from lightning_megatron.cli.tune import (
    TunedRun,
    Tuning,
    advice_of,
    candidates_of,
)
from lightning_megatron.cli.tune import table_of as table_of_runs
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.tasks.scaling import measured_job
from lightning_megatron.tasks.scaling.measured_job import reason_in
from tests.fits import nested
from tests.forked_script import run_python

TINY = "scaling-study --size tiny --steps 2 --warmup 1"


@pytest.fixture
def quick_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fork jobs from a process that has done their imports."""

    def start(command: Sequence[str], timeout: int = 280, **_: Any) -> CompletedProcess[str]:
        return run_python(list(command[1:]), tmp_path, dict(os.environ), timeout)

    def run(command: Sequence[str], log: Path, timeout: int) -> str | None:
        ended = start(command, timeout)
        text = f"{ended.stdout}\n{ended.stderr}"
        log.write_text(text)
        return reason_in(text, ended.returncode) if ended.returncode else None

    monkeypatch.setattr(measured_job, "run_job", run)
    for command in ("tune", "profile"):
        processes = SimpleNamespace(run=start)
        monkeypatch.setattr(f"lightning_megatron.cli.{command}.subprocess", processes)


@pytest.mark.usefixtures("quick_jobs")
def test_a_study_runs_its_jobs_and_writes_their_rows(tmp_path, printed):
    settings = '{"optimizer":{"zero":0},"sequence_parallel":true}'
    command = f"{TINY} --devices 2 --studies strong --output {tmp_path}"
    text = printed(command, "--strategy", settings)
    study = json.loads((tmp_path / "study.json").read_text())
    assert study["strategy"] == json.loads(settings)
    assert study["precision"] == ("bf16-mixed" if torch.cuda.is_available() else "32-true")
    # One device has no tokens to divide: the strategy refuses sequence parallelism there.
    rows = study["rows"]
    assert "sequence_parallel" in rows[0]["failure"]
    assert [row["failure"] for row in rows[1:3]] == ["", "needs 4 devices: there are 2"]
    with (tmp_path / "study.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert float(read[1]["seconds_per_step"]) == rows[1]["seconds_per_step"]
    assert "strong scaling of the first model (table 8)" in text
    assert (tmp_path / "study.png").is_file() or "No picture" in text


def test_invalid_options_of_a_study_and_of_its_strategy_are_refused(tmp_path, refused):
    for options, message in (
        (["--replicas", "1"], "--replicas must be at least 2"),
        (["--strategy", '{"tp": 2}'], "got ['tp']"),
    ):
        assert message in refused(TINY, *options, "--output", tmp_path)


STRATEGY: dict[str, Any] = {"tp": 1, "sequence_parallel": None}
STRATEGY |= {"linear.overlap": False, "cuda_graphs": None}


def test_options_are_tried_only_where_they_have_an_effect():
    for on_gpu, changes, tried in (
        (False, {}, {}),
        (True, {}, {"cuda_graphs": ["segments"]}),
        (False, {"tp": 2}, {"linear.overlap": [True]}),
        (False, {"tp": 4, "sequence_parallel": False}, {}),
    ):
        assert candidates_of(nested({**STRATEGY, **changes}), on_gpu) == tried


def tuning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[dict[str, Any]], float | str]
) -> Tuning:
    """Return a tuning whose runs take times, or fail for reasons, that a function returns."""

    def run(command: Sequence[str], log: Path, timeout: int) -> str | None:
        start = "--trainer.strategy."
        texts = (text[len(start) :].split("=") for text in command if text.startswith(start))
        result = seconds({name: yaml.safe_load(value) for name, value in texts})
        if isinstance(result, str):
            return result
        content = {"seconds_per_step": result, "peak_gib": 2.0}
        log.with_suffix(".json").write_text(json.dumps(content))
        return None

    monkeypatch.setattr(measured_job, "run_job", run)
    return Tuning([], folder, steps=2, warmup=1, timeout=60, gain=0.01)


def test_the_search_keeps_the_best_values_so_far(tmp_path, monkeypatch):
    def seconds(settings: dict[str, Any]) -> float | str:
        if settings.get("cuda_graphs"):
            return "out of memory"
        return 0.9 if settings.get("linear.overlap") else 1.0

    search = tuning(tmp_path, monkeypatch, seconds)
    best = search.search(nested({**STRATEGY, "tp": 2}))
    assert best.settings == {"linear.overlap": True}
    assert search.trials[-1].settings == {**best.settings, "cuda_graphs": "segments"}
    table = table_of_runs(search.trials)
    assert "| the recipe's | 1000.0 | 1.000 | 2.0 |" in table
    assert "| `linear.overlap=true` | 900.0 | 0.900 | 2.0 |" in table
    search = tuning(tmp_path, monkeypatch, lambda settings: 0.995 if settings else 1.0)
    assert search.search(nested({**STRATEGY, "tp": 2})).settings == {}, (
        "the gains are below the threshold"
    )
    advice = yaml.safe_load(advice_of(best).removeprefix("Set in the recipe:\n\n"))
    assert advice == {"trainer": {"strategy": {"init_args": nested(best.settings)}}}
    assert advice_of(TunedRun({}, 1.0, 2.0, "")).startswith("No setting is faster")


@pytest.mark.usefixtures("quick_jobs")
def test_recipes_that_fail_or_have_another_strategy_are_refused(tmp_path, monkeypatch, refused):
    search = tuning(tmp_path, monkeypatch, lambda settings: "out of memory")
    with pytest.raises(UnsupportedError, match="recipe must run .* out of memory"):
        search.search(nested(STRATEGY))
    path = tmp_path / "job.yaml"
    model = {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"}
    for trainer, reason in (
        ({"max_step": 3}, "options that fit accepts: error:"),
        ({"strategy": "ddp"}, "its strategy is 'ddp'"),
    ):
        path.write_text(yaml.safe_dump({"trainer": trainer, "model": model}))
        assert reason in refused("tune -c", path)


RECIPE = """
seed_everything: 1
trainer: {accelerator: cpu, devices: 2, strategy: {class_path: lightning_megatron.MegatronStrategy, init_args: {tp: 2, sequence_parallel: true}}}
model: {init_args: {config: {vocab_size: 20, max_seq_length: 8, num_layers: 1, hidden_size: 16, num_heads: 2}}}
data: {class_path: tests.cli_modules.Counting}
"""


@pytest.mark.usefixtures("quick_jobs")
def test_a_recipe_is_tuned_with_real_runs(tmp_path, printed):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    text = printed(f"tune --steps=2 --warmup=1 --output {tmp_path / 'tune'} -c", path)
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("tune/*.json"))]
    assert [result["num_ranks"] for result in results] == [2, 2]
    # The overlap does not change the training.
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-5)
    assert f"| the recipe's | {results[0]['seconds_per_step'] * 1e3:.1f} | 1.000 |" in text


@pytest.mark.usefixtures("quick_jobs")
def test_steps_of_a_recipe_are_profiled(tmp_path, printed, refused):
    path, output = tmp_path / "recipe.yaml", tmp_path / "profile"
    path.write_text(RECIPE)
    printed(f"profile --step=1 --count=1 --output {output} -c", path)
    parts = json.loads((output / "parts_step1.json").read_text())
    assert len(parts["stages"]) == 1
    assert parts["stages"][0]["communication, exposed"] > 0
    assert (output / "trace_step1.json.gz").is_file()
    assert "count" in refused("profile --count=0 -c", path)
    refused(f"profile --output {path}/folder -c", path)
