"""The fused kernels, run by Triton's interpreter on the CPU, against float64 and against torch's operators."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="needs triton, which comes with the CUDA builds of torch"
    ),
    pytest.mark.slow,
]


@pytest.mark.parametrize("group", ["float32", "bfloat16", "float16", "models", "shards"])
def test_interpreted_kernels_are_right(group: str):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    program = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.interpreted", group],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stderr[-4000:]
    results = json.loads(program.stdout.splitlines()[-1])
    assert results, f"nothing is checked by the name {group}"
    failed = [f"{name}:\n{report}" for name, report in results.items() if report]
    assert not failed, "\n".join(failed)
