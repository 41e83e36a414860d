"""Run a Python script, and the ranks that it starts, in processes that are forked from a process
with the slow imports done.
"""

from __future__ import annotations

import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NoReturn

from tests.world import preloaded_context

#: Ranks beside the first rank that scripts start; scripts start further ranks as users do.
NUM_SPARES = 3


def run_script(
    script: Path, folder: Path, variables: dict[str, str], timeout: float
) -> CompletedProcess[str]:
    """Run a script as ``python SCRIPT`` in a folder: see :func:`run_python`."""
    return run_python([str(script)], folder, variables, timeout)


def run_python(
    arguments: list[str], folder: Path, variables: dict[str, str], timeout: float
) -> CompletedProcess[str]:
    """Run ``python ARGUMENTS`` in a folder, without the seconds of its imports.

    Args:
        arguments: A script, or ``-m`` and a module, and their arguments.
        folder: Working directory.
        variables: Environment.
        timeout: Time limit (s).
    """
    with tempfile.TemporaryDirectory() as outputs:
        process = preloaded_context().Process(
            target=_enter, args=(arguments, str(folder), variables, outputs)
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
        texts = [(Path(outputs) / name).read_text() for name in ("out", "err")]
    assert process.exitcode is not None, "the process was joined"
    return CompletedProcess(arguments, process.exitcode, *texts)


def _enter(arguments: list[str], folder: str, variables: dict[str, str], outputs: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{outputs}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(folder)
    spares: list[tuple[int, int]] = []
    while len(spares) < NUM_SPARES:
        spares.append(_spare(*spares))
    ranks: list[subprocess.Popen] = []

    class Rank(subprocess.Popen):
        """Process that takes a spare process if it runs a Python program."""

        def _execute_child(self, args: Any, *options: Any) -> None:
            # The environment is the sixth argument after the command.
            environment = options[5]
            if not spares or environment is None or args[0] != sys.executable or args[1] == "-c":
                super()._execute_child(args, *options)  # type: ignore[misc]
                return
            self.pid, pipe = spares.pop(0)
            self._child_created = True
            ranks.append(self)
            with os.fdopen(pipe, "wb") as file:
                pickle.dump((list(args[1:]), dict(environment)), file)

    subprocess.Popen = Rank  # type: ignore[misc]
    _run(arguments, variables)
    failed = [code for code in (rank.wait() for rank in ranks) if code]
    if failed:
        raise SystemExit(f"ranks ended with {failed}")


def _spare(*spares: tuple[int, int]) -> tuple[int, int]:
    """Fork a process that waits for a program and its environment, runs it and ends.

    Returns:
        The number of the process, and the pipe that takes the program.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        for pipe in (writing, *(pipe for _, pipe in spares)):
            os.close(pipe)
        with os.fdopen(reading, "rb") as file:
            program = file.read()
        _run_and_end(program)
    os.close(reading)
    return pid, writing


def _run_and_end(program: bytes) -> NoReturn:
    """Run a program, if there is one, and end the process."""
    code = 1
    try:
        if program:
            _run(*pickle.loads(program))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(arguments: list[str], variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
