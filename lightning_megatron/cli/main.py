"""The command ``lightning-megatron``: a table of subcommands and the dispatch to their modules."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from lightning_megatron.errors import (
    CheckpointMismatchError,
    CorruptDataError,
    MissingExtraError,
    ParallelPlanError,
    RankMismatchError,
    UnsupportedError,
)
from lightning_megatron.option_errors import OptionParser
from lightning_megatron.version import __version__

# Users can act on these errors, so the command prints their message without a traceback.
OUR_ERRORS = (
    CheckpointMismatchError,
    CorruptDataError,
    MissingExtraError,
    ParallelPlanError,
    RankMismatchError,
    UnsupportedError,
)


#: Exit status for damaged files; unusable arguments exit with 2.
DAMAGED = 1


class Command(NamedTuple):
    """Subcommand: the module that implements it and its line in the help text."""

    module: str
    summary: str


# Modules are given by name and imported on demand: Lightning and torch take seconds to import, and
# `--help` and `layout` need neither.
TRAINER = "lightning_megatron.strategy.cli"
COMMANDS = {
    "fit": Command(TRAINER, "train a model: fit -c recipe:gpt_speeches_cpu"),
    "validate": Command(TRAINER, "run the validation set: validate -c CONFIG --ckpt_path PATH"),
    "test": Command(TRAINER, "run the test set"),
    "predict": Command(TRAINER, "run the model on data without labels"),
    "recipes": Command(
        "lightning_megatron.cli.recipes", "list the recipes that come with the package"
    ),
    "layout": Command(
        "lightning_megatron.cli.layout", "print and draw which ranks form which group"
    ),
    "schedule": Command(
        "lightning_megatron.cli.schedule", "simulate, compare and draw pipeline schedules"
    ),
    "checkpoint": Command(
        "lightning_megatron.cli.checkpoint", "show, verify, consolidate or reshard a checkpoint"
    ),
    "convert": Command(
        "lightning_megatron.cli.convert", "turn checkpoints into Hugging Face folders, and back"
    ),
    "evaluate": Command(
        "lightning_megatron.cli.evaluate", "measure perplexity and cloze accuracy of a model"
    ),
    "scaling-study": Command(
        "lightning_megatron.cli.scaling_study", "measure weak and strong scaling, as published"
    ),
    "tune": Command(
        "lightning_megatron.cli.tune", "find the fastest communication settings of a recipe"
    ),
    "harness": Command("lightning_megatron.cli.harness", "run tasks of lm-eval under any layout"),
    "generate": Command(
        "lightning_megatron.cli.generate", "continue prompts with a model, as text appears"
    ),
    "seeds": Command(
        "lightning_megatron.cli.seeds", "fine-tune with several seeds: median and ensemble"
    ),
    "clean": Command(
        "lightning_megatron.cli.clean", "repair text, remove short and repeated documents"
    ),
    "preprocess": Command(
        "lightning_megatron.cli.preprocess", "turn text or JSON lines into token files"
    ),
    "doctor": Command("lightning_megatron.cli.doctor", "check this machine, and say what to fix"),
    "kernels": Command(
        "lightning_megatron.cli.kernels", "build, show and check the bundled CUDA kernels"
    ),
}


def help_parser() -> argparse.ArgumentParser:
    """Build the parser of the subcommand name; each subcommand's module parses its own options."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items()]
    parser = OptionParser(
        prog="lightning-megatron",
        usage="lightning-megatron [--help] [--version] COMMAND ...",
        description="Train Transformers in tensor, sequence, pipeline and data parallel with "
        "Lightning.",
        epilog="\n".join(
            ["commands:", *lines, "", "Options of a command: lightning-megatron COMMAND --help"]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Not the version of the installed distribution: a source tree works without installation.
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def main(args: Sequence[str] | None = None) -> None:
    """Run one subcommand.

    Args:
        args: Arguments, the subcommand first; None uses those of this process.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    name = help_parser().parse_args(arguments[:1] or ["--help"]).command
    module = import_module(COMMANDS[name].module)
    if COMMANDS[name].module == TRAINER:
        # The strategy launches the other ranks with the command line of this process. MegatronCLI
        # therefore reads `sys.argv` itself unless arguments were given.
        try:
            module.main(None if args is None else arguments)
        except ValueError as error:
            ours = _wrapped(error)
            if ours is None:
                raise
            _end(name, ours)
        return
    # The parser of options takes longer to import than `--help` and `--version` run.
    run_command = import_module("lightning_megatron.cli.command").run_command
    try:
        run_command(f"lightning-megatron {name}", module.COMMAND, arguments[1:], module.EXAMPLES)
    except OUR_ERRORS as error:
        _end(name, error)


def _wrapped(error: BaseException) -> BaseException | None:
    """Return the first of ``OUR_ERRORS`` in the causes of a parser error; None without one."""
    cause = None if isinstance(error, OUR_ERRORS) else error.__cause__
    while cause is not None and not isinstance(cause, OUR_ERRORS):
        cause = cause.__cause__
    return cause


def _end(name: str, error: BaseException) -> None:
    message = f"lightning-megatron {name}: error: {error}"
    if "weights_only=False" in message:
        message += " For this command, the option is --unsafe instead of weights_only=False."
    print(message, file=sys.stderr)
    sys.exit(DAMAGED if isinstance(error, CorruptDataError) else 2)
