"""Run the tests of several GPUs on one GPU that all ranks share, each part with a time limit.

    python -m tests.gpu.run_shared --out runs/shared_gpu

A part that hangs is stopped at its limit, and its log has the stacks of its processes. The result
of a part is printed when the part ends; logs and junit files of all parts are packed at the end.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Part:
    """Tests of one file.

    Args:
        name: Name of the part.
        seconds: Limit of its time (s).
        only: Expression of the tests to run; empty for all.
    """

    name: str
    seconds: int
    only: str = ""

    @property
    def label(self) -> str:
        """Return the name and the expression of the tests."""
        return f"{self.name} {self.only}".strip().replace(" ", "_")


#: The most important parts come first. Ranks that wait on the device for each other keep the GPU
#: busy, so such parts stand next to parts that do not wait.
PARTS = (
    Part("clones", 120),
    Part("layouts", 240, "every_layout and 2"),
    Part("one_sided", 200),
    Part("layouts", 150, "share_sequences and 2"),
    Part("runner", 150, "two_gpus"),
    Part("groups", 90),
    Part("expert_rows", 200),
    Part("hugging_face", 150, "two_gpus"),
    Part("killed_put", 150, "inside_a_put"),
    Part("layouts", 150, "checkpoint and 2"),
    Part("graph_drift", 240),
    Part("products", 90, "pipelined"),
    Part("layouts", 120, "overlapped and 2"),
    Part("clone_fits", 300, "two_hundred"),
    Part("fp8_parameters", 240),
    Part("magnitudes", 120, "tensor_axis"),
    Part("layouts", 300, "every_layout and 4"),
    Part("layouts", 240, "share_sequences and 4"),
    Part("layouts", 200, "checkpoint and 4"),
    Part("layouts", 200, "overlapped and 4"),
    Part("te", 240, "layouts_match"),
)


def run_part(part: Part, out: Path, deadline: float) -> str:
    """Run a part, and return its outcome and the results of its tests."""
    limit = min(float(part.seconds), deadline - time.monotonic())
    if limit < 20:
        return f"{part.label}: not run, no time is left"
    log, junit = out / f"{part.label}.log", out / f"{part.label}.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "--tb=short",
    ]
    # Without capturing by pytest, the stacks of ranks reach the log.
    command += ["-q", "-s", "-rA", f"--junitxml={junit}", f"tests/gpu/test_gpu_{part.name}.py"]
    command += ["-k", part.only] if part.only else []
    # A test that hangs must print its stack before the part is stopped.
    command += [f"--timeout={max(10, limit - 10):.0f}"]
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "SHARED_GPU": "1", "PYTHONFAULTHANDLER": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit)
            outcome = f"exit {process.returncode}"
        except subprocess.TimeoutExpired:
            outcome = "stopped at its limit"
        finally:
            kill_processes(process)
    lines = log.read_text(errors="replace").splitlines()
    kinds = ("PASSED", "FAILED", "ERROR", "SKIPPED")
    results = [text[:300] for text in lines if text.startswith(kinds)]
    seconds = time.monotonic() - start
    return "\n  ".join(
        [f"{part.label}: {outcome}, {seconds:.0f} s; {(lines or [''])[-1]}", *results]
    )


def kill_processes(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a part."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all parts, a few at a time, and pack their logs."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", default="runs/shared_gpu", help="folder for what comes back")
    options.add_argument("--seconds", type=float, default=540.0, help="time for all parts")
    options.add_argument("--at-once", type=int, default=2, help="parts that run side by side")
    options.add_argument("--skip", type=int, default=0, help="first parts to leave out")
    options.add_argument("--only", nargs="*", default=[], help="names of files to run")
    args = options.parse_args(arguments)
    deadline = time.monotonic() + args.seconds
    parts = [part for part in PARTS[args.skip :] if not args.only or part.name in args.only]
    out = Path(args.out)
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.at_once) as pool, (out / "summary.txt").open("w") as summary:
        for line in pool.map(lambda part: run_part(part, logs, deadline), parts):
            print(line, file=summary, flush=True)
            print(line, flush=True)
    with tarfile.open(out / "logs.tgz", "w:gz") as packed:
        packed.add(logs, "logs")
    for file in logs.iterdir():
        file.unlink()
    logs.rmdir()


if __name__ == "__main__":
    main()
