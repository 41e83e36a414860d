"""Run a Python script, and the ranks that it starts, in processes that are forked from one with the
slow imports done.
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

#: Ranks beside the first one that scripts start; those of more ranks start the others as users do.
NUM_SPARES = 3


def run_script(
    script: Path, folder: Path, variables: dict[str, str], timeout: float
) -> CompletedProcess[str]:
    """Run a script as ``python SCRIPT`` in a folder, without the seconds of its imports.

    Args:
        script: File of the script.
        folder: Working directory.
        variables: Environment.
        timeout: Limit of its time (s).
    """
    with tempfile.TemporaryDirectory() as outputs:
        process = preloaded_context().Process(
            target=_enter, args=(str(script), str(folder), variables, outputs)
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
        texts = [(Path(outputs) / name).read_text() for name in ("out", "err")]
    assert process.exitcode is not None, "the process was joined"
    return CompletedProcess([str(script)], process.exitcode, *texts)


def _enter(script: str, folder: str, variables: dict[str, str], outputs: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{outputs}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(folder)
    spares = [_spare(script)]
    while len(spares) < NUM_SPARES:
        spares.append(_spare(script, *spares))

    class Rank(subprocess.Popen):
        """Process that is a spare one, if it is to run the script."""

        def _execute_child(self, args: Any, *others: Any) -> None:
            # The environment is the sixth of the arguments after the command.
            if not spares or list(args) != [sys.executable, script]:
                super()._execute_child(args, *others)  # type: ignore[misc]
                return
            self.pid, pipe = spares.pop(0)
            self._child_created = True
            with os.fdopen(pipe, "wb") as file:
                pickle.dump(dict(others[5]), file)

    subprocess.Popen = Rank  # type: ignore[misc]
    _run(script, variables)


def _spare(script: str, *others: tuple[int, int]) -> tuple[int, int]:
    """Fork a process that waits for an environment, runs the script in it and ends.

    Returns:
        The number of the process, and the pipe that takes the environment.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        for pipe in (writing, *(pipe for _, pipe in others)):
            os.close(pipe)
        with os.fdopen(reading, "rb") as file:
            sent = file.read()
        _run_and_end(script, sent)
    os.close(reading)
    return pid, writing


def _run_and_end(script: str, sent: bytes) -> NoReturn:
    """Run the script in an environment; without one, the script needed no more ranks."""
    code = 1
    try:
        if sent:
            _run(script, pickle.loads(sent))
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


def _run(script: str, variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [script]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
