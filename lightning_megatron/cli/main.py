"""The command ``lightning-megatron``: a table of subcommands and the dispatch to their modules."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from lightning_megatron.errors import REFUSALS, TRACEBACK, CorruptDataError
from lightning_megatron.once import say_once
from lightning_megatron.option_errors import OptionParser, underscored
from lightning_megatron.version import __version__

#: Exit status for damaged files; unusable arguments exit with 2.
DAMAGED = 1


#: Help texts as the parsers print them, kept because Lightning and torch take seconds to import.
#: `python -m tests.docs.generate` writes them, and a test compares them.
HELP = Path(__file__).with_name("help.txt")


class Command(NamedTuple):
    """Subcommand: the module that implements it, its line in the help text and an example."""

    module: str
    summary: str
    example: str


# Modules are given by name and imported on demand: Lightning and torch take seconds to import, and
# `--help` and `layout` need neither.
TRAINER = "lightning_megatron.strategy.cli"
GROUPS = {
    "train": {
        "fit": Command(TRAINER, "train a model", "-c recipe:gpt_speeches_cpu"),
        "recipes": Command(
            "lightning_megatron.cli.recipes", "list, show and copy recipes of the package", ""
        ),
        "validate": Command(
            TRAINER, "run the validation set", "-c recipe:gpt_speeches_cpu --ckpt_path last.ckpt"
        ),
        "test": Command(TRAINER, "run the test set", "-c my_recipe.yaml --ckpt_path last.ckpt"),
        "predict": Command(
            TRAINER, "run the model on data", "-c my_recipe.yaml --ckpt_path last.ckpt"
        ),
        "seeds": Command(
            "lightning_megatron.cli.seeds",
            "fine-tune with several seeds: median and ensemble",
            "--seeds 5 -c recipe:bert_race --model.path my_bert --data.folder RACE",
        ),
    },
    "prepare data": {
        "clean": Command(
            "lightning_megatron.cli.clean",
            "repair text, remove short and repeated documents",
            "raw/*.jsonl clean.jsonl.gz",
        ),
        "preprocess": Command(
            "lightning_megatron.cli.preprocess",
            "turn text or JSON lines into token files",
            "clean.jsonl.gz data/text --tokenizer gpt2 --append_eod",
        ),
    },
    "use a model": {
        "generate": Command(
            "lightning_megatron.cli.generate",
            "continue prompts with a model, as text appears",
            "last.ckpt --prompt 'My fellow Americans,'",
        ),
        "evaluate": Command(
            "lightning_megatron.cli.evaluate",
            "measure perplexity and cloze accuracy of a model",
            "wikitext path/to/folder wiki.test.tokens",
        ),
        "harness": Command(
            "lightning_megatron.cli.harness",
            "run tasks of lm-eval under any layout",
            "path/to/folder arc_easy hellaswag",
        ),
        "checkpoint": Command(
            "lightning_megatron.cli.checkpoint",
            "show, verify, consolidate or reshard a checkpoint",
            "show last.ckpt",
        ),
        "convert": Command(
            "lightning_megatron.cli.convert",
            "turn checkpoints into Hugging Face folders, and back",
            "last.ckpt exported",
        ),
    },
    "plan and measure": {
        "doctor": Command(
            "lightning_megatron.cli.doctor", "check this machine, and say what to fix", ""
        ),
        "layout": Command(
            "lightning_megatron.cli.layout",
            "print and draw which ranks form which group",
            "--world_size 16 --tp 4 --pp 2",
        ),
        "schedule": Command(
            "lightning_megatron.cli.schedule",
            "simulate, compare and draw pipeline schedules",
            "--pp 4 --microbatches 16",
        ),
        "tune": Command(
            "lightning_megatron.cli.tune",
            "find the fastest communication settings of a recipe",
            "-c recipe:gpt_speeches_gpu",
        ),
        "scaling-study": Command(
            "lightning_megatron.cli.scaling_study",
            "measure weak and strong scaling, as published",
            "--size tiny",
        ),
        "kernels": Command(
            "lightning_megatron.cli.kernels", "build, show and check the CUDA kernels", "show"
        ),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def help_parser() -> argparse.ArgumentParser:
    """Build the parser of the subcommand name; each subcommand's module parses its own options."""
    width = max(map(len, COMMANDS)) + 2
    lines = []
    for title, group in GROUPS.items():
        lines += ["", f"{title}:"]
        for name, command in group.items():
            lines.append(f"  {name:<{width}}{command.summary}")
            lines.append(f"  {'':<{width}}  lightning-megatron {name} {command.example}".rstrip())
    parser = OptionParser(
        prog="lightning-megatron",
        usage="lightning-megatron [--help] [--version] COMMAND ...",
        description="Train Transformers in tensor, sequence, pipeline and data parallel with "
        "Lightning.",
        epilog="\n".join([*lines[1:], "", "Options: lightning-megatron COMMAND --help"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Not the version of the installed distribution: a source tree works without installation.
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def kept_texts(command: str) -> dict[str, str]:
    """Return the kept help texts, by the names of command and subcommand.

    Returns:
        Empty if the command is one of the Trainer, whose help Lightning writes, and Lightning has
        another version.
    """
    head, *parts = re.split(r"^\$ (.*) --help\n", HELP.read_text(encoding="utf-8"), flags=re.M)
    of_trainer = COMMANDS[command].module == TRAINER
    is_other = of_trainer and f"lightning {version('lightning')}," not in head
    return {} if is_other else dict(zip(parts[::2], parts[1::2], strict=True))


def check_options(arguments: Sequence[str]) -> None:
    """Refuse an option that the kept help does not list, before the command is imported.

    Options of classes, and those behind the recipe of a command that runs ``fit``, are left to the
    parsers, and so is the key ``recipe`` of files.
    """
    is_trainer = COMMANDS[arguments[0]].module == TRAINER
    options = [argument.partition("=")[0] for argument in map(underscored, arguments)]
    ends = {"-c", "--config"} & set(options) if not is_trainer else set()
    own = options[: min(map(options.index, ends), default=len(options))]
    texts = kept_texts(own[0])
    command = " ".join(own[:2])
    command = command if command in texts else own[0]
    lines = re.findall(r"^ {2}(-.*?)(?: {2}|$)", texts.get(command, ""), flags=re.M)
    names = re.findall(r"--([\w.]+)", "\n".join(lines))
    for option in own if names else []:
        name = option.removeprefix("--").removesuffix("+")
        has_class = (
            is_trainer and name.startswith(("model.", "data.", "recipe")) or name.count(".") > 1
        )
        if option.startswith("--") and not (has_class or name in names):
            parser = OptionParser(prog=f"lightning-megatron {command}")
            for legal in set(names) - {"help"}:
                parser.add_argument(f"--{legal}")
            parser.error(f"unrecognized arguments: --{name}")


def main(args: Sequence[str] | None = None) -> None:
    """Run one subcommand.

    Args:
        args: Arguments, the subcommand first; None uses those of this process.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    name = help_parser().parse_args(arguments[:1] or ["--help"]).command
    *words, last = arguments
    if last in ("--help", "-h") and (text := kept_texts(name).get(" ".join(words))):
        print(text, end="")
        return
    check_options(arguments)
    if args is None:
        # The strategy starts the other ranks with this environment.
        os.environ.setdefault(TRACEBACK, "0")
    try:
        run(name, arguments, is_own_process=args is None)
    except (*REFUSALS, ValueError) as error:
        refusal = _refusal(error)
        # The failure watch of a job prints a refusal once for all ranks, and ends this process.
        is_reported = getattr(error, "is_reported", False)
        if refusal is None or is_reported or os.environ.get(TRACEBACK) == "1":
            raise
        _end(name, refusal)


def run(name: str, arguments: list[str], *, is_own_process: bool) -> None:
    """Run a subcommand and let its errors pass.

    Args:
        is_own_process: Whether the arguments are those of this process.
    """
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
    say_once(message, lambda: print(message, file=sys.stderr))
    sys.exit(DAMAGED if isinstance(error, CorruptDataError) else 2)
