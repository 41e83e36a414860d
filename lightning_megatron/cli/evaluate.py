"""The command ``evaluate``: perplexity and cloze accuracy of a language model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from jsonargparse.typing import PositiveInt

from lightning_megatron.cli.model_call import LayoutOptions
from lightning_megatron.cli.opened_model import OpenedModel
from lightning_megatron.tasks.evaluation import (
    EvaluatedLM,
    EvaluationData,
    LambadaData,
    WikiTextData,
)

EXAMPLES = """examples:
  lightning-megatron evaluate wikitext path/to/folder wiki.test.tokens
  lightning-megatron evaluate lambada runs/last.ckpt lambada_test.jsonl \\
      --tokenizer gpt2 --tp 2 --pp 2 --devices 4 --precision bf16-true"""


@dataclass(frozen=True)
class EvaluationOptions:
    """Tokenizer, batches and report of an evaluation.

    Args:
        tokenizer: bytes, gpt2 or a path; by default that of the Hugging Face folder.
        batch_size: Rows of a batch on a rank.
        json: Print one JSON object, and no progress bar.
        progress: Show a progress bar.
    """

    tokenizer: str | None = None
    batch_size: PositiveInt = 1
    json: bool = False
    progress: bool = True


def wikitext(
    model: str,
    data: str,
    layout: LayoutOptions,
    options: EvaluationOptions,
    window: PositiveInt = 1024,
    stride: PositiveInt = 32,
    plain: bool = False,
) -> None:
    """Print the perplexity of a language model on WikiText or another text, under any layout.

    Args:
        model: A Hugging Face folder, a model's name on the Hub, or a checkpoint.
        data: A text file, such as wiki.test.tokens.
        window: Tokens that the model reads at once.
        stride: Tokens by which windows advance; 32 as published, the size of a window is fastest.
        plain: The text is plain text, which is not detokenized.
    """
    size = options.batch_size
    rows = partial(
        WikiTextData, data, window=window, stride=stride, is_plain=plain, batch_size=size
    )
    _evaluate("wikitext", model, data, layout, options, rows)


def lambada(
    model: str,
    data: str,
    layout: LayoutOptions,
    options: EvaluationOptions,
    window: PositiveInt | None = None,
) -> None:
    """Print the accuracy of a language model on LAMBADA, under any layout.

    Args:
        model: A Hugging Face folder, a model's name on the Hub, or a checkpoint.
        data: JSON lines with the key `text`.
        window: Tokens that the model reads at once; by default the longest passage.
    """
    rows = partial(LambadaData, data, window=window, batch_size=options.batch_size)
    _evaluate("lambada", model, data, layout, options, rows)


COMMAND = {"wikitext": wikitext, "lambada": lambada}


def _evaluate(
    task: str,
    path: str,
    data: str,
    layout: LayoutOptions,
    options: EvaluationOptions,
    rows_with: Callable[[str], EvaluationData],
) -> None:
    """Measure and print; every rank runs this with the same arguments."""
    model = OpenedModel.at(path, layout.dtype)
    rows = rows_with(model.tokenizer_name(options.tokenizer))
    # Read the data here, so that errors in it are raised before other processes start.
    rows.setup("test")
    # With --json, the standard output must contain only the JSON object.
    trainer = layout.trainer(has_progress=options.progress and not options.json)
    trainer.test(EvaluatedLM(model.module), rows, ckpt_path=model.checkpoint, verbose=False)
    if trainer.is_global_zero:
        results = {name: float(value) for name, value in trainer.callback_metrics.items()}
        described = {"model": path, "task": task, "data": data}
        described |= asdict(layout) | {"devices": trainer.world_size}
        report = json.dumps if options.json else table
        print(report(described | rows.sizes() | results))


def table(report: Mapping[str, Any]) -> str:
    """Return one line for each entry of a report: its name and its value."""
    width = max(map(len, report)) + 2
    return "\n".join(
        f"{name:<{width}}{f'{value:.6g}' if isinstance(value, float) else value}"
        for name, value in report.items()
    )
