"""Adam's kernel, run by Triton's interpreter on the CPU, against torch's AdamW and Adam in float64."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which comes with the CUDA builds of torch"
)


def test_interpreted_steps_equal_those_of_torch():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    program = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.interpreted_adam"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stderr[-4000:]
    results = json.loads(program.stdout.splitlines()[-1])
    failed = [f"{name}:\n{report}" for name, report in results.items() if report]
    assert not failed, "\n".join(failed)
