"""The file `cli/help.txt`: the help of all commands, as their parsers print it in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout, suppress
from importlib import import_module
from importlib.metadata import version
from io import StringIO

from lightning_megatron.cli.main import COMMANDS, TRAINER, run


def head() -> str:
    """Return the first line: the versions of what writes help texts."""
    python = ".".join(map(str, sys.version_info[:2]))
    versions = [f"{name} {version(name)}" for name in ("lightning", "jsonargparse")]
    return (
        f"Written by python -m tests.docs.generate with Python {python}, {', '.join(versions)},\n"
    )


def help_texts() -> str:
    """Return the help of all commands, from a process in which nothing else is imported.

    The help of the Trainer lists the subclasses that are imported.
    """
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "tests.docs.help_texts"]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


def _words() -> Iterator[list[str]]:
    """Yield the names of all commands and subcommands, those of the Trainer first."""
    for name, module in sorted(COMMANDS.items(), key=lambda item: item[1] != TRAINER):
        yield [name]
        functions = getattr(import_module(module), "COMMAND", None)
        if isinstance(functions, Mapping):
            yield from ([name, one] for one in functions if one)


if __name__ == "__main__":
    print(head())
    for words in _words():
        text = StringIO()
        with redirect_stdout(text), suppress(SystemExit):
            run(words[0], [*words, "--help"], is_own_process=False)
        print(f"$ {' '.join(words)} --help\n{text.getvalue()}", end="")
