"""Start `tests.faults.train` under torchrun, read its logs, and kill its ranks."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from lightning_megatron.checkpoint import list_checkpoints, load_metadata
from lightning_megatron.checkpoint.load import read_full
from tests.faults.train import Job
from tests.worlds.user_script import ROOT, environment

#: Time that a process may take for work of a few seconds on an idle machine (seconds).
PATIENCE = 240.0


@dataclass
class Attempt:
    """The log of one rank between its start and its end."""

    pid: int
    #: Step from which the rank resumed, and the number of ranks that did; None if it ended before.
    resumed: int | None = None
    num_ranks: int = 0
    #: Exact loss of each step, and checksums of the samples that this rank read in it.
    losses: dict[int, str] = field(default_factory=dict)
    samples: dict[int, list[str]] = field(default_factory=dict)
    #: Steps whose saves began, and steps after whose saves training continued.
    begun: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """Return the last finished step; 0 if there is none."""
        return max(self.losses, default=self.resumed or 0)


def attempts(job: Job, rank: int = 0) -> list[Attempt]:
    """Read the log of a rank."""
    path = job.root / f"log_{rank}.txt"
    records: list[Attempt] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        kind, number, *values = line.split()
        if kind == "start":
            records.append(Attempt(int(number)))
        elif kind == "resume":
            records[-1].resumed, records[-1].num_ranks = int(number), int(values[0])
        elif kind == "step":
            records[-1].losses[int(number)], *records[-1].samples[int(number)] = values
        else:
            (records[-1].begun if kind == "save" else records[-1].saved).append(int(number))
    return records


def wait_until(
    condition: Callable[[], bool], event: str, process: subprocess.Popen | None = None
) -> None:
    """Wait for a condition, and fail if the process ends before it holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE} s: {event}"
        if process is not None and process.poll() is not None:
            assert condition(), f"ended with {process.returncode} before {event}"
            return
        time.sleep(0.001)


@contextmanager
def started(
    job: Job,
    *torchrun: str,
    before: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    name: str = "out",
) -> Iterator[subprocess.Popen]:
    """Run a job for the duration of the block, under torchrun if there are arguments for it, and by
    the command ``before``; the output goes to a file of the name in the job's folder.
    """
    number = len(list(job.root.glob(f"{name}_*.txt")))
    launcher = ["-m", "torch.distributed.run", *torchrun] if torchrun else []
    # Files that failed jobs leave for their other ranks, and torchrun's logs, are removed with the
    # folder of the test.
    temporary = job.root / "tmp"
    temporary.mkdir(exist_ok=True)
    own = {"TMPDIR": str(temporary), **(variables or {})}
    program = [*launcher, "-m", "tests.faults.train", json.dumps(asdict(job))]
    command = [*before, sys.executable, *program]
    with (job.root / f"{name}_{number}.txt").open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(TORCH_SHOW_CPP_STACKTRACES="0", **own),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                # The test has failed. The workers end after torchrun or their launcher.
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(20)
            process.kill()
            process.wait()
            ranks = range(job.devices * job.num_nodes)
            for pid in {attempt.pid for rank in ranks for attempt in attempts(job, rank)}:
                with suppress(OSError):
                    if "tests.faults.train" in Path("/proc", str(pid), "cmdline").read_text():
                        os.kill(pid, signal.SIGKILL)


def finish(process: subprocess.Popen) -> int:
    """Wait for the end of a process and return its exit code."""
    return process.wait(PATIENCE)


def outputs(job: Job) -> str:
    """Return the end of the output of all processes, for messages."""
    return "\n".join(
        f"== {path.name}\n{path.read_text()[-4000:]}"
        for path in sorted(job.root.glob("*out_*.txt"))
    )


def standalone(max_restarts: int = 0, ranks: int = 2) -> tuple[str, ...]:
    """Return torchrun's arguments for one machine."""
    return (
        "--standalone",
        f"--nproc-per-node={ranks}",
        "--monitor-interval=0.1",
        f"--max-restarts={max_restarts}",
    )


def newest_step(job: Job) -> int:
    """Return the step of the newest complete checkpoint; 0 if there is none."""
    if not job.checkpoints.exists():
        return 0
    while True:
        try:
            paths = list_checkpoints(job.checkpoints)
            return max((load_metadata(path)["global_step"] for path in paths), default=0)
        except (OSError, ValueError):
            continue  # a checkpoint was removed after it was listed


@dataclass
class Kill:
    """Which rank was killed and when: at the ``start``, in a ``step`` or in a ``save``; the number of
    the following attempt of rank 0, the step of the newest complete checkpoint just before, and the
    last step that rank 0 finished before the restart.
    """

    rank: int
    moment: str
    attempt: int
    complete: int
    last_step: int = 0


def kill_one(job: Job, process: subprocess.Popen, target: int, draw: random.Random) -> Kill:
    """Kill a random rank at a random moment after a step, and wait for the restart."""
    ranks = range(job.devices)
    before = [len(attempts(job, rank)) for rank in ranks]
    moment = draw.choices(["start", "step", "save"], [1, 4, 5])[0]
    if moment == "start":
        time.sleep(draw.uniform(0.0, 5.0))
    else:
        wait_until(lambda: attempts(job)[-1].last_step >= target, f"step {target}", process)
        if moment == "save":
            num_begun = len(attempts(job)[-1].begun)
            wait_until(lambda: len(attempts(job)[-1].begun) > num_begun, "the next save", process)
        time.sleep(draw.uniform(0.0, 0.15))
    rank = draw.choice(ranks)
    kill = Kill(rank, moment, before[0], newest_step(job))
    os.kill(attempts(job, rank)[-1].pid, signal.SIGKILL)
    wait_until(
        lambda: all(len(attempts(job, rank)) > before[rank] for rank in ranks),
        f"the restart after {kill}",
        process,
    )
    # The last step is known only now, because training continues while the checkpoints are listed.
    # An attempt that did not resume is skipped.
    steps = [attempt.last_step for attempt in attempts(job)[: kill.attempt] if attempt.last_step]
    kill.last_step = steps[-1] if steps else 0
    return kill


def tensors_of(job: Job) -> dict[str, torch.Tensor]:
    """Read the final parameters and optimizer states of a training."""
    return read_full(job.root / "final")


def repeated_in(job: Job, folder: Path, **changes: object) -> Job:
    """Return the same training in another folder."""
    for file in ("corpus.bin", "corpus.idx"):
        shutil.copy(job.root / file, folder)
    return replace(job, folder=str(folder), **changes)  # type: ignore[arg-type]


def assert_same_end(job: Job, uninterrupted: Job) -> None:
    """Compare the losses of all steps, also of repeated ones, and the final weights and moments."""
    (reference,) = attempts(uninterrupted)
    losses: dict[int, str] = {}
    for attempt in attempts(job):
        for step, loss in attempt.losses.items():
            assert loss == reference.losses[step], (
                f"step {step} of the attempt that resumed at {attempt.resumed}"
            )
        losses |= attempt.losses
    assert losses.keys() == reference.losses.keys()
    actual, expected = tensors_of(job), tensors_of(uninterrupted)
    assert actual.keys() == expected.keys()
    assert len(actual) > 50, "parameters and two moments of each"
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
