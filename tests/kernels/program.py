"""Run checks in a separate program, because Triton chooses its interpreter when a kernel is
defined.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path


def report_checks(checks: Mapping[str, Callable[[], object]]) -> None:
    """Run checks and print the traceback of each check by its name, as JSON; the traceback of a
    check that passes is empty.
    """
    failed = {}
    for name, check in checks.items():
        try:
            check()
            failed[name] = ""
        except BaseException:
            # Every error belongs in the report of the test that started this program.
            failed[name] = traceback.format_exc()
    print(json.dumps(failed))


def interpreted(module: str, *arguments: str) -> dict[str, str]:
    """Run a module that reports checks in Triton's interpreter, and return its report."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    program = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stderr[-4000:]
    return json.loads(program.stdout.splitlines()[-1])
