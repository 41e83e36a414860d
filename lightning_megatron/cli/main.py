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

from lightning_megatron.errors import REFUSALS, TRACEBACK, CorruptDataError
from lightning_megatron.once import say_once
from lightning_megatron.option_errors import OptionParser, underscored
from lightning_megatron.version import __version__

#: Exit status for damaged files; unusable arguments exit with 2.
DAMAGED = 1
#: Exit status of a command whose output nobody reads to the end, as of one that SIGPIPE ends.
UNREAD = 141


#: Help texts as the parsers print them, kept because Lightning and torch take seconds to import.
#: `python -m tests.docs.generate` writes them, and a test compares them.
HELP = Path(__file__).with_name("help.txt")


# Modules are imported on demand: Lightning and torch take seconds to import, and `--help` and
# `layout` need neither.
TRAINER = "lightning_megatron.strategy.cli"
#: What `--help` shows of the commands: a line for each, and behind it an example.
OVERVIEW = """\
train:
  fit            train a model
    lightning-megatron fit -c recipe:gpt_speeches_cpu
  recipes        list, show and copy recipes of the package
    lightning-megatron recipes
  validate       run the validation set
    lightning-megatron validate -c recipe:gpt_speeches_cpu --ckpt_path last.ckpt
  test           run the test set
    lightning-megatron test -c my_recipe.yaml --ckpt_path last.ckpt
  predict        run the model on data
    lightning-megatron predict -c my_recipe.yaml --ckpt_path last.ckpt
  seeds          fine-tune with several seeds: median and ensemble
    lightning-megatron seeds --seeds 5 -c recipe:bert_race --model.path my_bert --data.folder RACE

prepare data:
  clean          repair text, remove short and repeated documents
    lightning-megatron clean raw/*.jsonl clean.jsonl.gz
  preprocess     turn text or JSON lines into token files
    lightning-megatron preprocess clean.jsonl.gz data/text --tokenizer gpt2 --append_eod

use a model:
  generate       continue prompts with a model, as text appears
    lightning-megatron generate last.ckpt --prompt 'My fellow Americans,'
  evaluate       measure perplexity and cloze accuracy of a model
    lightning-megatron evaluate wikitext path/to/folder wiki.test.tokens
  harness        run tasks of lm-eval under any layout
    lightning-megatron harness path/to/folder arc_easy hellaswag
  checkpoint     show, verify, consolidate or reshard a checkpoint
    lightning-megatron checkpoint show last.ckpt
  convert        turn checkpoints into Hugging Face folders, and back
    lightning-megatron convert last.ckpt exported

plan and measure:
  doctor         check this machine, and say what to fix
    lightning-megatron doctor
  plan           find the fastest layouts that fit, without a GPU
    lightning-megatron plan -c recipe:gpt2_8.3b --gpus 64
  layout         print and draw which ranks form which group
    lightning-megatron layout --world_size 16 --tp 4 --pp 2
  schedule       simulate, compare and draw pipeline schedules
    lightning-megatron schedule --pp 4 --microbatches 16
  tune           find the fastest communication settings of a recipe
    lightning-megatron tune -c recipe:gpt_speeches_gpu
  profile        record steps: a trace of all ranks, and where the time goes
    lightning-megatron profile -c recipe:gpt_speeches_cpu
  scaling-study  measure weak and strong scaling, as published
    lightning-megatron scaling-study --size tiny
  kernels        build, show and check the CUDA kernels
    lightning-megatron kernels show

Options: lightning-megatron COMMAND --help"""
#: The module of each command: the Trainer's, or the one of the command's name.
COMMANDS = {
    name: f"lightning_megatron.cli.{name.replace('-', '_')}"
    for name in re.findall(r"^  ([\w-]+)", OVERVIEW, flags=re.M)
} | dict.fromkeys(("fit", "validate", "test", "predict"), TRAINER)


def help_parser() -> argparse.ArgumentParser:
    """Build the parser of the subcommand name; each subcommand's module parses its own options."""
    parser = OptionParser(
        prog="lightning-megatron",
        usage="lightning-megatron [--help] [--version] COMMAND ...",
        description="Train Transformers in tensor, sequence, pipeline and data parallel with "
        "Lightning.",
        epilog=OVERVIEW,
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
    of_trainer = COMMANDS[command] == TRAINER
    is_other = of_trainer and f"lightning {version('lightning')}," not in head
    return {} if is_other else dict(zip(parts[::2], parts[1::2], strict=True))


def check_options(arguments: Sequence[str]) -> None:
    """Refuse an option that the kept help does not list, before the command is imported.

    Options of classes, and those behind the recipe of a command that runs ``fit``, are left to the
    parsers, and so is the key ``recipe`` of files.
    """
    is_trainer = COMMANDS[arguments[0]] == TRAINER
    own = [argument.partition("=")[0] for argument in map(underscored, arguments)]
    while not is_trainer and {"-c", "--config"} & set(own):
        own.pop()
    texts = kept_texts(own[0])
    command = " ".join(own[:2]) if " ".join(own[:2]) in texts else own[0]
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
    except BrokenPipeError:
        if args is not None or COMMANDS[name] == TRAINER:
            raise
        # The reader, such as `head`, has seen enough. Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(UNREAD)
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
    module = import_module(COMMANDS[name])
    if COMMANDS[name] == TRAINER:
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

    def first_claim(*claim: str | int) -> str:
        first: str = import_module("lightning_megatron.groups.agent_store").first_claim(*claim)
        return first

    say_once(message, lambda: print(message, file=sys.stderr), first_claim)
    sys.exit(DAMAGED if isinstance(error, CorruptDataError) else 2)
