"""The command ``lightning-megatron``: a table of subcommands and the dispatch to their modules."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from lightning_megatron.errors import REFUSALS, TRACEBACK, CorruptDataError
from lightning_megatron.option_errors import OptionParser
from lightning_megatron.version import __version__

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
    if args is None:
        # The strategy starts the other ranks with this environment.
        os.environ.setdefault(TRACEBACK, "0")
    try:
        _run(name, arguments, is_own_process=args is None)
    except (*REFUSALS, ValueError) as error:
        refusal = _refusal(error)
        # The failure watch of a job prints a refusal once for all ranks, and ends this process.
        is_reported = getattr(error, "is_reported", False)
        if refusal is None or is_reported or os.environ.get(TRACEBACK) == "1":
            raise
        _end(name, refusal)


def _run(name: str, arguments: list[str], *, is_own_process: bool) -> None:
    module = import_module(COMMANDS[name].module)
    if COMMANDS[name].module == TRAINER:
        # The strategy launches the other ranks with the command line of this process. MegatronCLI
        # therefore reads `sys.argv` itself unless arguments were given.
        module.main(None if is_own_process else arguments)
        return
    # The parser of options takes longer to import than `--help` and `--version` run.
    run_command = import_module("lightning_megatron.cli.command").run_command
    run_command(f"lightning-megatron {name}", module.COMMAND, arguments[1:], module.EXAMPLES)


def _refusal(error: BaseException | None) -> BaseException | None:
    """Return the first refusal among an error and its causes; None without one."""
    while error is not None and not isinstance(error, REFUSALS):
        error = error.__cause__
    return error


def _end(name: str, error: BaseException) -> None:
    message = f"lightning-megatron {name}: error: {error}"
    if "weights_only=False" in message:
        message += " For this command, the option is --unsafe instead of weights_only=False."
    print(message, file=sys.stderr)
    sys.exit(DAMAGED if isinstance(error, CorruptDataError) else 2)
