"""The command ``profile``: a trace of some steps of a recipe on all ranks, and their parts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse.typing import NonNegativeInt, PositiveInt

from lightning_megatron.cli.tune import fit_with

EXAMPLES = """example:
  lightning-megatron profile --step 10 --count 2 -c recipe:gpt_speeches_cpu --trainer.devices 2"""


def profile(
    step: NonNegativeInt = 10,
    count: PositiveInt = 2,
    output: Path = Path("runs/profile"),
    memory: bool = False,
    host: bool = True,
    fit_options: Sequence[str] = (),
) -> None:
    """Train a recipe for a few steps, and record the last of them on all ranks.

    It writes one trace for https://ui.perfetto.dev, and prints what a step consists of, by pipeline
    stage. The options of fit follow: profile [options] -c RECIPE [options of fit]. Other callbacks
    of the recipe, loggers, checkpoints and validation are left out.

    Args:
        step: Steps before the first recorded one.
        count: Recorded steps.
        output: Folder of the trace and the table.
        memory: Record allocations on GPUs, too.
        host: Record operators and ranges of the host; without them only kernels.
    """
    arguments = {
        "step": step,
        "count": count,
        "folder": str(output),
        "memory": memory,
        "host": host,
    }
    command = fit_with(fit_options, step + count, "lightning_megatron.Profile", arguments)
    # The ranks print the table, or why the recipe does not run.
    failure = subprocess.run(command, check=False).returncode
    if failure:
        sys.exit(failure)


COMMAND = profile
