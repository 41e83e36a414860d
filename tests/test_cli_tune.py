"""Tests of the subcommand `tune`: the search, the options that it tries, and runs of a recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron.cli import separate_job
from lightning_megatron.cli.main import main
from lightning_megatron.cli.tune import TunedRun, Tuning, advice_of, table_of
from lightning_megatron.cli.tune_candidates import Machine, candidates_of
from lightning_megatron.errors import UnsupportedError

STRATEGY: dict[str, Any] = {
    "tp": 1,
    "pp": 1,
    "zero": 1,
    "sequence_parallel": None,
    "bucket_size": 40_000_000,
    "overlap_parameters": None,
    "overlap_tensor_parallel": False,
    "cuda_graphs": None,
    "nccl_options": None,
}


def tried_values(machine: Machine, **changes: Any) -> dict[str, Sequence[Any]]:
    candidates = candidates_of({**STRATEGY, **changes}, machine)
    return {candidate.option: candidate.values for candidate in candidates}


def test_options_are_tried_only_where_they_have_an_effect() -> None:
    buckets = [10_000_000, 20_000_000, 80_000_000, 160_000_000]
    assert tried_values(Machine(False, 1)) == {}
    assert tried_values(Machine(True, 1)) == {"cuda_graphs": ["segments"]}
    assert tried_values(Machine(False, 4)) == {
        "bucket_size": buckets,
        "overlap_parameters": [True, False],
    }
    assert tried_values(Machine(False, 4), zero=0) == {}
    assert tried_values(Machine(False, 4), tp=2, pp=2) == {"overlap_tensor_parallel": [True]}
    assert tried_values(Machine(False, 4), tp=4, sequence_parallel=False) == {}


def test_tried_nccl_options_keep_the_other_settings() -> None:
    settings = {"tp": {"max_ctas": 2}, "data": {"high_priority": True, "max_ctas": 8}}
    actual = tried_values(Machine(True, 2), nccl_options=settings)["nccl_options"]
    assert [options["data"] for options in actual] == [
        {"high_priority": True, "max_ctas": 4},
        {"high_priority": True, "max_ctas": 16},
    ]
    assert all(options["tp"] == {"max_ctas": 2} for options in actual)
    assert "nccl_options" not in tried_values(Machine(True, 2), nccl_options="settings.yaml")


def tuning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[dict[str, Any]], float | str]
) -> Tuning:
    """Return a tuning whose runs take times, or fail for reasons, that a function returns."""

    def run(command: Sequence[str], log: Path, timeout: int) -> str | None:
        start = "--trainer.strategy."
        texts = (text[len(start) :].split("=") for text in command if text.startswith(start))
        settings = {name: yaml.safe_load(value) for name, value in texts}
        result = seconds(settings)
        if isinstance(result, str):
            return result
        content = {"seconds_per_step": result, "peak_gib": None, "num_ranks": 4}
        log.with_suffix(".json").write_text(json.dumps(content))
        return None

    monkeypatch.setattr(separate_job, "run_job", run)
    return Tuning([], folder, steps=2, warmup=1, timeout=60, gain=0.01)


def test_the_search_keeps_the_best_values_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(settings: dict[str, Any]) -> float | str:
        bucket = settings.get("bucket_size", 40_000_000)
        if bucket == 160_000_000:
            return "out of memory"
        duration = 1.0 if bucket == 40_000_000 else 0.9 if bucket == 80_000_000 else 1.1
        # This gain is below the threshold.
        return duration * (0.995 if settings.get("overlap_parameters") else 1.0)

    search = tuning(tmp_path, monkeypatch, seconds)
    best = search.search(STRATEGY)
    assert best.settings == {"bucket_size": 80_000_000}
    assert [trial.settings for trial in search.trials[-2:]] == [
        {"bucket_size": 80_000_000, "overlap_parameters": True},
        {"bucket_size": 80_000_000, "overlap_parameters": False},
    ]
    table = table_of(search.trials)
    assert "| the recipe's | 1000.0 | 1.000 |  |" in table
    assert "| `bucket_size=80000000` | 900.0 | 0.900 |  |" in table
    assert "| `bucket_size=160000000` | out of memory | | |" in table
    advice = advice_of(best).removeprefix("Set in the recipe:\n\n")
    assert yaml.safe_load(advice) == {
        "trainer": {"strategy": {"init_args": {"bucket_size": 80_000_000}}}
    }


def test_a_failing_recipe_raises_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = tuning(tmp_path, monkeypatch, lambda settings: "out of memory")
    with pytest.raises(UnsupportedError, match="recipe must run .* out of memory"):
        search.search(STRATEGY)


def test_advice_says_when_the_recipe_is_the_fastest() -> None:
    assert advice_of(TunedRun({}, 1.0, 2.0, "", 1)) == "No setting is faster than the recipe's own."


@pytest.mark.parametrize(
    ("trainer", "reason"),
    [
        ({"max_step": 3}, "options that fit accepts: error:"),
        ({"strategy": "ddp"}, "its strategy is 'ddp'"),
    ],
)
def test_jobs_with_invalid_options_or_another_strategy_are_refused(
    tmp_path: Path, trainer: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    model = {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"}
    path.write_text(yaml.safe_dump({"trainer": trainer, "model": model}))
    with pytest.raises(SystemExit):
        main(["tune", "-c", str(path)])
    assert reason in capsys.readouterr().err


def test_a_recipe_is_tuned_with_real_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["-c", "recipe:gpt_speeches_cpu", "--trainer.devices=2", "--trainer.strategy.pp=1"]
    job += [f"--data.data_dir={tmp_path / 'data'}", "--trainer.strategy.sequence_parallel=true"]
    main(["tune", "--steps=2", "--warmup=1", "--output", str(tmp_path / "tune"), *job])
    printed = capsys.readouterr().out
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("tune/*.json"))]
    assert [result["num_ranks"] for result in results] == [2, 2]
    # The overlap does not change the training.
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-5)
    assert f"| the recipe's | {results[0]['seconds_per_step'] * 1e3:.1f} | 1.000 |" in printed
    assert "| `overlap_tensor_parallel=true` | " in printed
    assert "Set in the recipe" in printed or "No setting is faster" in printed
