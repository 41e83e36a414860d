"""The subcommand ``harness``: run tasks of lm-eval under any layout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from lightning_megatron.cli.arguments import at_least_one
from lightning_megatron.cli.model_call import ModelCall, add_layout, dtype_of, trainer_for
from lightning_megatron.cli.opened_model import OpenedModel
from lightning_megatron.data.tokenizer import Tokenizer, load_tokenizer
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.tasks.evaluation import harness_lm

EXAMPLE = """examples:
  lightning-megatron harness path/to/folder --tasks arc_easy,hellaswag --fewshot 5
  lightning-megatron harness runs/last.ckpt --tokenizer gpt2 --tasks my_task \\
      --include-path my_tasks --tp 2 --pp 2 --devices 4 --precision bf16-true"""


def main(args: Sequence[str]) -> None:
    """Run the subcommand; every rank runs it with the same arguments."""
    options = harness_parser().parse_args(args)
    # Check the names of the tasks here, so that errors are raised before other processes start.
    tasks = _manager(options)
    names = _task_names(options.tasks, tasks.all_tasks)
    model = OpenedModel.at(options.model, dtype_of(options))
    tokenizer = load_tokenizer(model.tokenizer_name(options.tokenizer))
    trainer = trainer_for(options)
    call = _evaluation(options, model, tokenizer, tasks, names)
    results = ModelCall(model.module, call).run(trainer, model.checkpoint)
    if trainer.is_global_zero:
        report = json.dumps if options.json else table
        print(report(results))


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


def _evaluation(
    options: argparse.Namespace,
    model: OpenedModel,
    tokenizer: Tokenizer,
    tasks: Any,
    names: list[str],
) -> Callable[[nn.Module], Any]:
    """Return a function that runs the tasks with a model placed under the layout."""
    ends = model.end_tokens or (() if tokenizer.eod is None else (tokenizer.eod,))
    prefix = options.prefix_token
    if prefix is None:
        prefix = model.prefix_token(tokenizer)

    def run(placed: nn.Module) -> Any:
        library: Any = import_extra("lm_eval.evaluator", "harness")
        lm = harness_lm(
            placed,
            tokenizer,
            prefix_token=prefix,
            end_tokens=ends,
            adds_special=model.folder is not None,
            batch_size=options.batch_size,
        )
        # The harness prints its progress; the standard output must contain only the results.
        with redirect_stdout(sys.stderr):
            report = library.simple_evaluate(
                lm,
                tasks=names,
                num_fewshot=options.fewshot,
                limit=options.limit,
                task_manager=tasks,
                bootstrap_iters=options.bootstrap,
                log_samples=False,
            )
        # The harness returns its results only on the first rank of each node.
        return None if report is None else report["results"]

    return run


def _manager(options: argparse.Namespace) -> Any:
    folder = options.include_path
    if folder is not None and not Path(folder).is_dir():
        raise UnsupportedError(
            f"--include-path must be a folder with YAML files of tasks: {folder} is none. Check "
            "the path."
        )
    manager = import_extra("lm_eval.tasks", "harness").TaskManager
    return manager(include_path=folder, include_defaults=not options.own_tasks_only)


def _task_names(given: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in known:
            close = get_close_matches(name, known)
            raise UnsupportedError(
                f"--tasks must name tasks of lm-eval or of --include-path: {name!r} is none. "
                f"{f'Did you mean {close[0]}?' if close else 'Run `lm-eval ls tasks` for a list.'}"
            )
    if not names:
        raise UnsupportedError(f"--tasks must name at least one task: {given!r} has none.")
    return names


def harness_parser() -> argparse.ArgumentParser:
    """Build the parser of the subcommand's options."""
    parser = argparse.ArgumentParser(
        prog="lightning-megatron harness",
        description="Run tasks of lm-eval with a language model under any layout. The numbers are "
        "those of lm-eval's own model `hf`.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a local Hugging Face folder, or a checkpoint")
    add("--tasks", required=True, metavar="NAMES", help="names of tasks, separated by commas")
    add("--include-path", metavar="FOLDER", help="folder with YAML files of further tasks")
    add(
        "--own-tasks-only",
        action="store_true",
        help="read only the tasks of --include-path, which saves seconds at the start",
    )
    add("--fewshot", type=int, metavar="N", help="examples before a question (default: the task's)")
    add("--limit", type=at_least_one, metavar="N", help="documents of each task (default: all)")
    add(
        "--bootstrap",
        type=at_least_one,
        default=1000,
        metavar="N",
        help="draws for standard errors without a formula (default: %(default)s)",
    )
    add("--tokenizer", help="bytes, gpt2 or a path (default: that of the Hugging Face folder)")
    add(
        "--prefix-token",
        type=int,
        metavar="ID",
        help="token before texts without context (default: the one that begins or ends texts)",
    )
    add(
        "--batch-size",
        type=at_least_one,
        default=1,
        metavar="N",
        help="rows that a replica reads at once",
    )
    add_layout(parser)
    add("--json", action="store_true", help="print one JSON object")
    return parser
