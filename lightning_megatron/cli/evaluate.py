"""The subcommand ``evaluate``: perplexity and cloze accuracy of a language model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_megatron.cli.arguments import at_least_one
from lightning_megatron.cli.model_call import add_layout, axis_sizes, dtype_of, trainer_for
from lightning_megatron.cli.opened_model import OpenedModel
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.tasks.evaluation import (
    EvaluatedLM,
    EvaluationData,
    LambadaData,
    WikiTextData,
)

EXAMPLE = """examples:
  lightning-megatron evaluate path/to/folder --task wikitext --data wiki.test.tokens
  lightning-megatron evaluate runs/last.ckpt --task lambada --data lambada_test.jsonl \\
      --tokenizer gpt2 --tp 2 --pp 2 --devices 4 --precision bf16-true"""

#: Options that only the task ``wikitext`` has, with their defaults.
_OF_WIKITEXT = {"stride": 32, "plain": False}
_DEFAULT_WINDOW = 1024


def main(args: Sequence[str]) -> None:
    """Run the subcommand; every rank runs it with the same arguments."""
    options = evaluate_parser().parse_args(args)
    _check_options(options)
    model = OpenedModel.at(options.model, dtype_of(options))
    tokenizer = model.tokenizer_name(options.tokenizer)
    data = _data(options, tokenizer)
    # Read the data here, so that errors in it are raised before other processes start.
    data.setup("test")
    # With --json, the standard output must contain only the JSON object.
    trainer = trainer_for(options, has_progress=not (options.no_progress or options.json))
    trainer.test(EvaluatedLM(model.module), data, ckpt_path=model.checkpoint, verbose=False)
    if trainer.is_global_zero:
        results = {name: float(value) for name, value in trainer.callback_metrics.items()}
        report = json.dumps if options.json else table
        print(report(_described(options, trainer.world_size) | data.sizes() | results))


def table(report: Mapping[str, Any]) -> str:
    """Return one line for each entry of a report: its name and its value."""
    width = max(map(len, report)) + 2
    return "\n".join(
        f"{name:<{width}}{f'{value:.6g}' if isinstance(value, float) else value}"
        for name, value in report.items()
    )


def _described(options: argparse.Namespace, world_size: int) -> dict[str, Any]:
    return {
        "model": options.model,
        "task": options.task,
        "data": options.data,
        "precision": options.precision,
        "devices": world_size,
        **axis_sizes(options),
    }


def _check_options(options: argparse.Namespace) -> None:
    """Refuse options of another task, and set the defaults of options that are not given."""
    for name, default in _OF_WIKITEXT.items():
        if options.task != "wikitext" and getattr(options, name) is not None:
            raise UnsupportedError(
                f"--{name} is for long texts alone: --task {options.task} scores one word of each "
                f"passage. Leave --{name} out, or use --task wikitext."
            )
        if getattr(options, name) is None:
            setattr(options, name, default)


def _data(options: argparse.Namespace, tokenizer: str) -> EvaluationData:
    if options.task == "lambada":
        return LambadaData(options.data, tokenizer, options.window, options.batch_size)
    return WikiTextData(
        options.data,
        tokenizer,
        options.window or _DEFAULT_WINDOW,
        options.stride,
        options.plain,
        options.batch_size,
    )


def evaluate_parser() -> argparse.ArgumentParser:
    """Build the parser of the subcommand's options."""
    parser = argparse.ArgumentParser(
        prog="lightning-megatron evaluate",
        description="Print the perplexity of a language model on WikiText or another text, or its "
        "accuracy on LAMBADA, under any layout.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a local Hugging Face folder, or a checkpoint")
    add("--task", choices=("wikitext", "lambada"), required=True, help="task to measure")
    add(
        "--data",
        required=True,
        metavar="FILE",
        help="wikitext: a text file, such as wiki.test.tokens; lambada: JSON lines with the key "
        "`text`",
    )
    add("--tokenizer", help="bytes, gpt2 or a path (default: that of the Hugging Face folder)")
    add(
        "--window",
        type=at_least_one,
        metavar="N",
        help="tokens that the model reads at once (default: 1024 for wikitext, any for lambada)",
    )
    add(
        "--stride",
        type=at_least_one,
        metavar="N",
        help="wikitext: tokens by which windows advance (default: 32, as published; the size of "
        "the window is the fastest)",
    )
    add(
        "--plain",
        action="store_true",
        default=None,
        help="wikitext: the text is plain text, which is not detokenized",
    )
    add("--batch-size", type=at_least_one, default=1, metavar="N", help="rows of a batch on a rank")
    add_layout(parser)
    add("--json", action="store_true", help="print one JSON object, and no progress bar")
    add("--no-progress", action="store_true", help="show no progress bar")
    return parser
