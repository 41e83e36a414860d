"""Run a module of this folder like a user's script: in a new process, which starts the other
ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_script(
    module: str, *arguments: str, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run `python -m tests.strategy.<module>` and return the finished process with its output.

    Args:
        module: Name of the module.
        arguments: Arguments of the module.
        timeout: Longest time that the process may take (seconds).
    """
    launcher_variables = (
        "LOCAL_RANK",
        "WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PL_GLOBAL_SEED",
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in launcher_variables
    }
    return subprocess.run(
        [sys.executable, "-m", f"tests.strategy.{module}", *arguments],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
