"""The command ``tune``: the fastest communication settings of a recipe on this machine; and the
separate programs that measure steps, which may fail alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jsonargparse.typing import NonNegativeFloat, PositiveInt

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.tasks.scaling import measure_job

EXAMPLES = """example:
  lightning-megatron tune -c recipe:finetune_hf --model.path FOLDER --trainer.strategy.tp 2"""
STRATEGY = "lightning_megatron.MegatronStrategy"
_TIMER = "lightning_megatron.tasks.scaling.measured_job.StepTimer"


def candidates_of(strategy: Mapping[str, Any], on_gpu: bool) -> dict[str, list[Any]]:
    """Return the options that can change the speed of a job, in the order in which they are tried.

    Args:
        strategy: Options of the strategy of the job.
        on_gpu: Whether its ranks compute on GPUs.

    Returns:
        Values to try, without the current one, by the option's name, such as ``linear.overlap``.
    """
    candidates: dict[str, list[Any]] = {}
    if strategy["tp"] > 1 and strategy["sequence_parallel"] is not False:
        current = (strategy["linear"] or {}).get("overlap")
        candidates["linear.overlap"] = [one for one in (True, False) if one != current]
    if on_gpu:
        current = strategy["cuda_graphs"]
        candidates["cuda_graphs"] = [one for one in (None, "segments") if one != current]
    return candidates


@dataclass(frozen=True)
class TunedRun:
    """One measured run.

    Args:
        settings: Options of the strategy that differ from the recipe.
        seconds: Mean time of a step (s); None if the run failed.
        peak_gib: Largest memory of rank 0 (GiB); None on CPUs and after a failure.
        failure: Reason for the failure; empty if the run succeeded.
    """

    settings: Mapping[str, Any]
    seconds: float | None
    peak_gib: float | None
    failure: str


@dataclass
class Tuning:
    """Search for the fastest settings, one option after the other.

    Args:
        given: Options of ``lightning-megatron fit`` that describe the job.
        folder: Folder for the results and outputs of the runs.
        steps: Number of measured steps of a run (steps).
        warmup: Number of steps before them (steps).
        timeout: Longest duration of a run (seconds).
        gain: Part of the time of a step that a setting must save to be chosen.
        trials: Runs so far.
    """

    given: Sequence[str]
    folder: Path
    steps: int
    warmup: int
    timeout: int
    gain: float
    trials: list[TunedRun] = field(default_factory=list)

    def search(self, strategy: Mapping[str, Any]) -> TunedRun:
        """Measure the recipe and all candidates; return the fastest run.

        The candidates of an option keep the best values of the options before it.

        Args:
            strategy: Options of the strategy in the recipe.

        Raises:
            UnsupportedError: If the recipe itself does not run.
        """
        best = self._measure({})
        if best.seconds is None:
            raise UnsupportedError(
                f"the recipe must run before it can be tuned: {best.failure}. Its output is in "
                f"{self._path(0, '.txt')}."
            )
        candidates = candidates_of(strategy, on_gpu=best.peak_gib is not None)
        for option, value in [(one, value) for one in candidates for value in candidates[one]]:
            trial = self._measure({**best.settings, option: value})
            assert best.seconds is not None, "the best run so far did not fail"
            if trial.seconds is not None and trial.seconds < best.seconds * (1 - self.gain):
                best = trial
        return best

    def _measure(self, settings: Mapping[str, Any]) -> TunedRun:
        number = len(self.trials)
        result = self._path(number, ".json")
        timer = {"warmup": self.warmup, "steps": self.steps, "path": str(result)}
        command = fit_with(self.given, self.warmup + self.steps, _TIMER, timer)
        command += [f"--trainer.strategy.{name}={_text(value)}" for name, value in settings.items()]
        measured = measure_job(command, self._path(number, ".txt"), result, self.timeout)
        seconds = measured.get("seconds_per_step")
        trial = TunedRun(settings, seconds, measured.get("peak_gib"), measured["failure"])
        self.trials.append(trial)
        outcome = trial.failure or f"{(seconds or 0.0) * 1e3:.1f} ms a step"
        print(f"{_shown(settings)}: {outcome}", file=sys.stderr, flush=True)
        return trial

    def _path(self, number: int, suffix: str) -> Path:
        return self.folder / f"run{number}{suffix}"


def tune(
    steps: PositiveInt = 12,
    warmup: PositiveInt = 6,
    gain: NonNegativeFloat = 1.0,
    timeout: PositiveInt = 900,
    output: Path = Path("runs/tune"),
    fit_options: Sequence[str] = (),
) -> None:
    """Train a recipe for a few steps with and without CUDA graphs and overlapped communication.

    It prints the fastest settings on this machine. No setting changes what is computed, except for
    the order of sums. The options of fit follow: tune [options] -c RECIPE [options of fit].

    Args:
        steps: Measured steps of a run.
        warmup: Steps before the measured ones.
        gain: Part of a step that a setting must save (percent).
        timeout: Longest time of a run (seconds).
        output: Folder of results and outputs.

    Raises:
        UnsupportedError: If the recipe uses another strategy, or does not run.
    """
    strategy = strategy_of(fit_options)
    output.mkdir(parents=True, exist_ok=True)
    tuning = Tuning(fit_options, output, steps, warmup, timeout, gain / 100)
    best = tuning.search(strategy)
    print(table_of(tuning.trials))
    print(f"\n{advice_of(best)}")


COMMAND = tune


def strategy_of(given: Sequence[str]) -> dict[str, Any]:
    """Return the options of the strategy that the options of ``fit`` lead to.

    Args:
        given: Options of ``fit``.

    Raises:
        UnsupportedError: If ``fit`` refuses the options, or the strategy is another one.
    """
    strategy = settings_of(given, "tune")["trainer"]["strategy"]
    if not isinstance(strategy, dict) or strategy["class_path"] != STRATEGY:
        raise UnsupportedError(
            f"tune must get a recipe with MegatronStrategy: its strategy is {strategy!r}. Set "
            f"trainer.strategy.class_path to {STRATEGY}."
        )
    settings: dict[str, Any] = strategy["init_args"]
    return settings


def settings_of(given: Sequence[str], command: str) -> dict[str, Any]:
    """Return all settings that the options of ``fit`` lead to, as plain values.

    Args:
        command: Name of the command, for errors.

    Raises:
        UnsupportedError: If ``fit`` refuses the options.
    """
    arguments = [sys.executable, "-m", "lightning_megatron", "fit", *given, "--print_config"]
    completed = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if completed.returncode:
        # Warnings of other packages may come first.
        message = completed.stderr[max(completed.stderr.find("error:"), 0) :].strip()
        raise UnsupportedError(f"{command} must get options that fit accepts: {message}")
    settings: dict[str, Any] = yaml.safe_load(completed.stdout)
    return settings


def table_of(trials: Sequence[TunedRun]) -> str:
    """Return all runs as a Markdown table, in the order in which they ran."""
    rows = ["| settings | ms a step | relative to the recipe | GiB |", "|---|---|---|---|"]
    first = trials[0].seconds
    for trial in trials:
        name = _shown(trial.settings)
        if trial.seconds is None or first is None:
            rows.append(f"| {name} | {trial.failure} | | |")
            continue
        memory = "" if trial.peak_gib is None else f"{trial.peak_gib:.1f}"
        rows.append(
            f"| {name} | {trial.seconds * 1e3:.1f} | {trial.seconds / first:.3f} | {memory} |"
        )
    return "\n".join(rows)


def advice_of(best: TunedRun) -> str:
    """Return the fastest settings as YAML, or a sentence if the recipe is the fastest."""
    if not best.settings:
        return "No setting is faster than the recipe's own."
    options: dict[str, Any] = {}
    for name, value in best.settings.items():
        record, _, option = name.rpartition(".")
        (options.setdefault(record, {}) if record else options)[option] = value
    content = {"trainer": {"strategy": {"init_args": options}}}
    return f"Set in the recipe:\n\n{yaml.safe_dump(content, sort_keys=False)}".rstrip()


def fit_with(
    given: Sequence[str], steps: int, callback: str, arguments: Mapping[str, Any]
) -> list[str]:
    """Return the command line of a fit for some steps with one callback and no other output.

    Args:
        given: Options of ``fit``.
        steps: Number of optimizer steps.
        callback: Path of the class of the callback.
        arguments: Arguments of the callback.
    """
    callbacks = [{"class_path": callback, "init_args": dict(arguments)}]
    trainer_options: dict[str, Any] = {"max_steps": steps, "limit_val_batches": 0}
    trainer_options |= {"callbacks": callbacks, "logger": False}
    for name in ("checkpointing", "progress_bar", "model_summary"):
        trainer_options[f"enable_{name}"] = False
    options = [f"--trainer.{name}={_text(value)}" for name, value in trainer_options.items()]
    return [sys.executable, "-m", "lightning_megatron", "fit", *given, *options]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _shown(settings: Mapping[str, Any]) -> str:
    shown = [f"`{name}={_text(value)}`" for name, value in settings.items()]
    return ", ".join(shown) or "the recipe's"
