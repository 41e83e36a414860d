"""The command ``harness``: run tasks of lm-eval under any layout."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import nn

from lightning_megatron.cli.model_call import LayoutOptions, ModelCall
from lightning_megatron.cli.opened_model import OpenedModel
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.option_errors import nearest
from lightning_megatron.tasks.evaluation import harness_lm

EXAMPLES = """examples:
  lightning-megatron harness path/to/folder arc_easy hellaswag --fewshot 5
  lightning-megatron harness runs/last.ckpt my_task --tokenizer gpt2 \\
      --include_path my_tasks --tp 2 --pp 2 --devices 4 --precision bf16-true"""


def harness(
    model: str,
    tasks: tuple[str, ...],
    layout: LayoutOptions,
    include_path: str | None = None,
    own_tasks_only: bool = False,
    fewshot: NonNegativeInt | None = None,
    limit: PositiveInt | None = None,
    bootstrap: PositiveInt = 1000,
    tokenizer: str | None = None,
    prefix_token: NonNegativeInt | None = None,
    batch_size: PositiveInt = 1,
    json: bool = False,
) -> None:
    """Run tasks of lm-eval with a language model under any layout.

    The numbers are those of lm-eval's own model `hf`.

    Args:
        model: A Hugging Face folder, a model's name on the Hub, or a checkpoint.
        tasks: Names of tasks.
        include_path: Folder with YAML files of further tasks.
        own_tasks_only: Read only the tasks of --include_path, which saves seconds at the start.
        fewshot: Examples before a question; by default the task's.
        limit: Documents of each task; by default all.
        bootstrap: Draws for standard errors without a formula.
        tokenizer: bytes, gpt2 or a path; by default that of the Hugging Face folder.
        prefix_token: Token before texts without context; by default one that begins or ends texts.
        batch_size: Rows that a replica reads at once.
        json: Print one JSON object.
    """
    # Check the names of the tasks here, so that errors are raised before other processes start.
    manager = _manager(tasks, include_path, own_tasks_only)
    choice = {"tasks": list(tasks), "task_manager": manager, "num_fewshot": fewshot, "limit": limit}
    opened = OpenedModel.at(model, layout.dtype)
    words = load_tokenizer(opened.tokenizer_name(tokenizer))
    prefix = opened.prefix_token(words) if prefix_token is None else prefix_token

    def run(placed: nn.Module) -> Any:
        lm = harness_lm(
            placed,
            words,
            prefix_token=prefix,
            end_tokens=opened.end_tokens or (() if words.eod is None else (words.eod,)),
            adds_special=opened.folder is not None,
            batch_size=batch_size,
        )
        return _results(lm, {**choice, "bootstrap_iters": bootstrap})

    trainer = layout.trainer()
    results = ModelCall(opened.module, run).run(trainer, opened.checkpoint)
    if trainer.is_global_zero:
        report = json_text.dumps if json else table
        print(report(results))


COMMAND = harness


def _results(lm: Any, choice: Mapping[str, Any]) -> Any:
    library: Any = import_extra("lm_eval.evaluator", "harness")
    # The harness prints its progress; the standard output must contain only the results.
    with redirect_stdout(sys.stderr):
        report = library.simple_evaluate(lm, log_samples=False, **choice)
    # The harness returns its results only on the first rank of each node.
    return None if report is None else report["results"]


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each metric of each task: task, metric and value."""
    rows = [
        (task, metric, f"{value:.6g}")
        for task, values in results.items()
        for metric, value in values.items()
        if isinstance(value, float)
    ]
    task_width = max((len(task) for task, _, _ in rows), default=0) + 2
    metric_width = max((len(metric) for _, metric, _ in rows), default=0) + 2
    return "\n".join(
        f"{task:<{task_width}}{metric:<{metric_width}}{value}" for task, metric, value in rows
    )


def _manager(names: Sequence[str], include_path: str | None, own_tasks_only: bool) -> Any:
    """Return lm-eval's record of all tasks; refuse unknown names."""
    if include_path is not None and not Path(include_path).is_dir():
        raise UnsupportedError(
            f"--include_path must be a folder with YAML files of tasks: {include_path} is none. "
            "Check the path."
        )
    manager: Any = import_extra("lm_eval.tasks", "harness").TaskManager(
        include_path=include_path, include_defaults=not own_tasks_only
    )
    for name in names:
        if name not in manager.all_tasks:
            remedy = nearest(name, manager.all_tasks) or " Run `lm-eval ls tasks` for a list."
            raise UnsupportedError(
                f"a task must be one of lm-eval or of --include_path: {name!r} is none.{remedy}"
            )
    return manager
