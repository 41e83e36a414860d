"""A training on two hosts outlives the loss of one: it goes on with fewer data-parallel ranks, as
if none had gone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from lightning_megatron.checkpoint import load_metadata
from tests.faults.agent import (
    Attempt,
    again,
    attempts,
    finish,
    newest_step,
    outputs,
    started,
    tensors_of,
    wait_until,
)
from tests.faults.hosts import Host, two_hosts
from tests.faults.train import Job, write_corpus

RANKS = 2  # of each host


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture
def undisturbed(hosts: tuple[Host, Host], tmp_path: Path) -> Job:
    """Train on one host; sums over other numbers of ranks round differently, in float64 by very
    little.
    """
    folder = tmp_path / "undisturbed"
    write_corpus(folder)
    job = Job(folder=str(folder), steps=20, devices=1, precision="64-true", dropout=0.0)
    with started(job) as process:
        assert finish(process) == 0, outputs(job)
    return job


def torchrun(host: Host, first: Host) -> tuple[str, ...]:
    """Return the arguments by which a host takes part; what the timeouts are about is the loss, not
    the start.
    """
    settings = {"is_host": int(host is first), "last_call_timeout": 3, "keep_alive_interval": 2}
    return (
        "--nnodes=1:2",
        f"--nproc-per-node={RANKS}",
        "--max-restarts=3",
        "--monitor-interval=0.1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={first.address}:29400",
        "--rdzv-id=faults",
        f"--rdzv-conf={','.join(f'{name}={value}' for name, value in settings.items())}",
        f"--local-addr={host.address}",
    )


def variables(job: Job, host: Host) -> dict[str, str]:
    """Return the variables of a host's processes: its own device, and its own folder for temporary
    files.
    """
    folder = job.root / f"temporary-{host.name}"
    folder.mkdir(exist_ok=True)
    return {"GLOO_SOCKET_IFNAME": host.device, "TMPDIR": str(folder)}


def history(job: Job, rank: int) -> dict[int, Attempt]:
    """Return for every step the last attempt in which a rank took it, if the job had that rank
    then.
    """
    found: dict[int, Attempt] = {}
    for attempt in attempts(job, rank):
        if attempt.resumed is not None:
            # What a checkpoint did not keep is done again.
            found = {step: one for step, one in found.items() if step <= attempt.resumed}
        found |= dict.fromkeys(attempt.losses, attempt)
    return found


def samples_of(job: Job) -> dict[int, list[str]]:
    """Return which samples each step of the training that counts has taken, over all ranks."""
    deciding = history(job, 0)
    found: dict[int, list[str]] = {step: [] for step in deciding}
    for rank in range(job.devices * job.num_nodes):
        for step, attempt in history(job, rank).items():
            if rank < deciding[step].num_ranks:
                found[step] += attempt.samples[step]
    return {step: sorted(samples) for step, samples in found.items()}


@pytest.mark.slow
def test_a_lost_host_costs_the_steps_since_the_last_save_and_no_sample(
    hosts: tuple[Host, Host], undisturbed: Job, tmp_path: Path
) -> None:
    one, two = hosts
    folder = tmp_path / "disturbed"
    folder.mkdir()
    job = again(
        undisturbed, folder, devices=RANKS, num_nodes=2, elastic=True, seconds=0.1, timeout=15.0
    )
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                started(
                    job,
                    *torchrun(host, one),
                    before=host.command,
                    variables=variables(job, host),
                    name=f"{host.name}_out",
                )
            )
            for host in hosts
        )

        def both_train() -> bool:
            last = attempts(job)[-1:]
            return (
                bool(last)
                and last[0].num_ranks == 2 * RANKS
                and len(last[0].saved) > 0
                and last[0].last_step >= 7
            )

        wait_until(both_train, "a save on both hosts", first)
        complete = newest_step(job)
        assert complete > 0
        two.lose()
        second.wait()
        lost = attempts(job)[-1]
        wait_until(
            lambda: attempts(job)[-1].pid != lost.pid, "a start without the lost host", first
        )
        assert finish(first) == 0, outputs(job)
    # What waited in vain said for whom, before the timeout, though the others could no longer say
    # anything.
    assert re.search(
        r"did not arrive:\n  rank [23] \(two, process \d+\): train, global_step \d", outputs(job)
    )
    begun = [attempt for attempt in attempts(job) if attempt.resumed is not None]
    number = [attempt.pid for attempt in begun].index(lost.pid)
    lost, resumed = begun[number : number + 2]
    assert lost.num_ranks == 2 * RANKS
    assert resumed.num_ranks == RANKS
    assert resumed.resumed in (lost.saved[-1], lost.begun[-1])
    assert resumed.resumed >= complete
    assert_same(job, undisturbed)


def assert_same(job: Job, whole: Job) -> None:
    """Compare what a training that changed its number of ranks has done with what another did, up
    to rounding.
    """
    (reference,) = attempts(whole)
    assert history(job, 0).keys() == reference.losses.keys()
    for attempt in attempts(job):
        for step, loss in attempt.losses.items():
            expected = float.fromhex(reference.losses[step])
            assert float.fromhex(loss) == pytest.approx(expected, rel=1e-9), (
                step,
                attempt.num_ranks,
            )
    taken = samples_of(job)
    assert taken == samples_of(whole)
    counts = Counter(sample for samples in taken.values() for sample in samples)
    assert len(counts) == job.steps * job.global_batch
    assert set(counts.values()) == {1}
    states = [load_metadata(one.root / "final")["TokenDataModule"] for one in (job, whole)]
    assert states[0]["consumed"] == states[1]["consumed"] == job.steps * job.global_batch
    found, expected_tensors = tensors_of(job), tensors_of(whole)
    assert found.keys() == expected_tensors.keys()
    for name, tensor in expected_tensors.items():
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-9), name
