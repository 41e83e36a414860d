"""Run a Python script in a process that is forked from one with the slow imports done."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

from tests.world import preloaded_context


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
        os.dup2(os.open(f"{outputs}/{name}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv = [script]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
