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

ROOT = Path(__file__).parents[2]
#: How long a process may take for something that takes seconds on an idle machine (seconds).
PATIENCE = 240.0


@dataclass
class Attempt:
    """Hold what one rank wrote between its start and its end.

    Args:
        pid: Its process.
        resumed: Step from which it went on; None if it did not come so far.
        num_ranks: Ranks that went on.
        losses: Loss of each step, exactly.
        samples: What identifies the samples that this rank took in each step.
        begun: Steps whose saves began.
        saved: Steps after whose saves training went on.
        error: Kind and text of the exception that ended it; empty without one.
    """

    pid: int
    resumed: int | None = None
    num_ranks: int = 0
    losses: dict[int, str] = field(default_factory=dict)
    samples: dict[int, list[str]] = field(default_factory=dict)
    begun: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def last_step(self) -> int:
        """Return the last step that was finished; 0 if there is none."""
        return max(self.losses, default=self.resumed or 0)


def attempts(job: Job, rank: int = 0) -> list[Attempt]:
    """Read the log of a rank."""
    path = job.root / f"log_{rank}.txt"
    found: list[Attempt] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        kind, number, *rest = line.split()
        if kind == "start":
            found.append(Attempt(int(number)))
        elif kind == "resume":
            found[-1].resumed, found[-1].num_ranks = int(number), int(rest[0])
        elif kind == "step":
            found[-1].losses[int(number)], *found[-1].samples[int(number)] = rest
        elif kind == "error":
            found[-1].error = " ".join(rest)
        else:
            (found[-1].begun if kind == "save" else found[-1].saved).append(int(number))
    return found


def wait_until(
    condition: Callable[[], bool], what: str, process: subprocess.Popen | None = None
) -> None:
    """Wait, and fail if the process ends before."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE} s: {what}"
        if process is not None and process.poll() is not None:
            assert condition(), f"ended with {process.returncode} before {what}"
            return
        time.sleep(0.001)


def environment(**changes: str) -> dict[str, str]:
    """Return the variables of a process that nobody has launched."""
    launched = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PL_GLOBAL_SEED",
    )
    kept = {name: value for name, value in os.environ.items() if name not in launched}
    return {**kept, "OMP_NUM_THREADS": "1", "TORCH_SHOW_CPP_STACKTRACES": "0", **changes}


@contextmanager
def started(
    job: Job,
    *torchrun: str,
    before: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    name: str = "out",
) -> Iterator[subprocess.Popen]:
    """Run a job for the length of the block, under torchrun if arguments for it are given.

    Args:
        job: The training.
        torchrun: Arguments of torchrun.
        before: A command that the process is run by.
        variables: Environment variables to set.
        name: Beginning of the name of the file in the job's folder that gets the output.
    """
    number = len(list(job.root.glob(f"{name}_*.txt")))
    launcher = ["-m", "torch.distributed.run", *torchrun] if torchrun else []
    # What failed jobs leave for their other ranks, and torchrun's logs, go with the folder of the
    # test.
    temporary = job.root / "tmp"
    temporary.mkdir(exist_ok=True)
    command = [
        *before,
        sys.executable,
        *launcher,
        "-m",
        "tests.faults.train",
        json.dumps(asdict(job)),
    ]
    with (job.root / f"{name}_{number}.txt").open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(**{"TMPDIR": str(temporary), **(variables or {})}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                # What is left of a failed test; its workers follow torchrun, or their launcher.
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(20)
            process.kill()
            process.wait()
            for pid in {
                one.pid
                for rank in range(job.devices * job.num_nodes)
                for one in attempts(job, rank)
            }:
                with suppress(OSError):
                    if "tests.faults.train" in Path("/proc", str(pid), "cmdline").read_text():
                        os.kill(pid, signal.SIGKILL)


def finish(process: subprocess.Popen) -> int:
    """Wait for the end of a process and return its exit code."""
    return process.wait(PATIENCE)


def outputs(job: Job) -> str:
    """Return the end of what the processes printed, for messages."""
    return "\n".join(
        f"== {path.name}\n{path.read_text()[-4000:]}"
        for path in sorted(job.root.glob("*out_*.txt"))
    )


def standalone(max_restarts: int = 0, ranks: int = 2) -> tuple[str, ...]:
    """Return torchrun's arguments for one machine."""
    return (
        "--standalone",
        f"--nproc-per-node={ranks}",
        f"--max-restarts={max_restarts}",
        "--monitor-interval=0.1",
    )


def newest_step(job: Job) -> int:
    """Return the step of the newest complete checkpoint; 0 if there is none."""
    if not job.checkpoints.exists():
        return 0
    while True:
        try:
            return max(
                (load_metadata(path)["global_step"] for path in list_checkpoints(job.checkpoints)),
                default=0,
            )
        except (OSError, ValueError):
            continue  # a checkpoint was removed between the two


@dataclass
class Kill:
    """Say what was killed, when.

    Args:
        rank: The rank.
        moment: ``start``, ``step`` or ``save``.
        attempt: Number of the attempt that follows, of rank 0.
        complete: Step of the newest complete checkpoint just before.
        last_step: Last step that rank 0 had finished when it ended.
    """

    rank: int
    moment: str
    attempt: int
    complete: int
    last_step: int = 0


def kill_one(job: Job, process: subprocess.Popen, target: int, draw: random.Random) -> Kill:
    """Kill a random rank at a random moment after a step has been reached, and wait for the
    restart.

    Args:
        job: The training.
        process: Its torchrun.
        target: The step (optimizer steps).
        draw: Decides.
    """
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
        lambda: all(
            len(attempts(job, rank)) > count for rank, count in zip(ranks, before, strict=True)
        ),
        f"the restart after {kill}",
        process,
    )
    # Known only now: training went on while the checkpoints were looked at. An attempt that did not
    # resume counts as little as the one before it.
    kill.last_step = next(
        (one.last_step for one in reversed(attempts(job)[: kill.attempt]) if one.last_step), 0
    )
    return kill


def tensors_of(job: Job) -> dict[str, torch.Tensor]:
    """Read the end of a training: parameters and states of optimizers."""
    return read_full(job.root / "final")


def again(job: Job, folder: Path, **changes: object) -> Job:
    """Return the same training in a folder of its own."""
    for file in ("corpus.bin", "corpus.idx"):
        shutil.copy(job.root / file, folder)
    return replace(job, folder=str(folder), **changes)  # type: ignore[arg-type]


def assert_same_end(job: Job, whole: Job) -> None:
    """Compare the losses of all steps, however often each was done, and the weights and moments at
    the end.
    """
    (reference,) = attempts(whole)
    done: dict[int, str] = {}
    for attempt in attempts(job):
        for step, loss in attempt.losses.items():
            assert loss == reference.losses[step], (
                f"step {step} of the attempt that resumed at {attempt.resumed}"
            )
        done |= attempt.losses
    assert done.keys() == reference.losses.keys()
    found, expected = tensors_of(job), tensors_of(whole)
    assert found.keys() == expected.keys()
    assert len(found) > 50, "parameters and two moments of each"
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
