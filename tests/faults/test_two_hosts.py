"""A training on two hosts survives the loss of one host: it continues with fewer data-parallel
ranks and has the results of an undisturbed training.
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
    attempts,
    finish,
    newest_step,
    outputs,
    repeated_in,
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
    """Train on one host, in float64, where sums over other numbers of ranks differ only by tiny
    rounding errors.
    """
    folder = tmp_path / "undisturbed"
    write_corpus(folder)
    job = Job(folder=str(folder), steps=20, devices=1, precision="64-true", dropout=0.0)
    with started(job) as process:
        assert finish(process) == 0, outputs(job)
    return job


def torchrun(host: Host, first: Host) -> tuple[str, ...]:
    """Return the arguments of torchrun on a host. The timeouts concern the loss, not the start."""
    settings = f"is_host={int(host is first)},last_call_timeout=3,keep_alive_interval=2"
    return (
        "--nnodes=1:2",
        f"--nproc-per-node={RANKS}",
        "--max-restarts=3",
        "--monitor-interval=0.1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={first.address}:29400",
        "--rdzv-id=faults",
        f"--rdzv-conf={settings}",
        f"--local-addr={host.address}",
    )


def variables(job: Job, host: Host) -> dict[str, str]:
    """Return the variables of a host's processes: the network device, and a folder for temporary
    files.
    """
    folder = job.root / f"temporary-{host.name}"
    folder.mkdir(exist_ok=True)
    return {"GLOO_SOCKET_IFNAME": host.device, "TMPDIR": str(folder)}


def history(job: Job, rank: int) -> dict[int, Attempt]:
    """Return, for every step that a rank took, the last attempt in which it took the step."""
    last_attempts: dict[int, Attempt] = {}
    for attempt in attempts(job, rank):
        if attempt.resumed is not None:
            # Steps after the checkpoint are taken again.
            last_attempts = {
                step: last for step, last in last_attempts.items() if step <= attempt.resumed
            }
        last_attempts |= dict.fromkeys(attempt.losses, attempt)
    return last_attempts


def samples_of(job: Job) -> dict[int, list[str]]:
    """Return the samples of all ranks in the last attempt of each step."""
    deciding = history(job, 0)
    taken: dict[int, list[str]] = {step: [] for step in deciding}
    for rank in range(job.devices * job.num_nodes):
        for step, attempt in history(job, rank).items():
            if rank < deciding[step].num_ranks:
                taken[step] += attempt.samples[step]
    return {step: sorted(samples) for step, samples in taken.items()}


@pytest.mark.slow
def test_a_lost_host_costs_the_steps_since_the_last_save_and_no_sample(
    hosts: tuple[Host, Host], undisturbed: Job, tmp_path: Path
) -> None:
    first_host, second_host = hosts
    folder = tmp_path / "disturbed"
    folder.mkdir()
    job = repeated_in(
        undisturbed, folder, devices=RANKS, num_nodes=2, elastic=True, seconds=0.1, timeout=15.0
    )
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                started(
                    job, *torchrun(host, first_host), before=host.command,
                    variables=variables(job, host), name=f"{host.name}_out",
                )
            )
            for host in hosts
        )  # fmt: skip

        def both_train() -> bool:
            last = attempts(job)[-1:]
            has_both = bool(last) and last[0].num_ranks == 2 * RANKS
            return has_both and len(last[0].saved) > 0 and last[0].last_step >= 7

        wait_until(both_train, "a save on both hosts", first)
        complete = newest_step(job)
        assert complete > 0
        second_host.lose()
        second.wait()
        lost = attempts(job)[-1]
        wait_until(
            lambda: attempts(job)[-1].pid != lost.pid, "a start without the lost host", first
        )
        assert finish(first) == 0, outputs(job)
    # The waiting ranks reported the missing ones before the timeout, although these sent no more
    # reports.
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


def assert_same(job: Job, uninterrupted: Job) -> None:
    """Compare a training that changed its number of ranks with an uninterrupted one, up to
    rounding.
    """
    (reference,) = attempts(uninterrupted)
    assert history(job, 0).keys() == reference.losses.keys()
    for attempt in attempts(job):
        for step, loss in attempt.losses.items():
            expected = float.fromhex(reference.losses[step])
            assert float.fromhex(loss) == pytest.approx(expected, rel=1e-9), step
    taken = samples_of(job)
    assert taken == samples_of(uninterrupted)
    counts = Counter(sample for samples in taken.values() for sample in samples)
    assert len(counts) == job.steps * job.global_batch
    assert set(counts.values()) == {1}
    for training in (job, uninterrupted):
        state = load_metadata(training.root / "final")["TokenDataModule"]
        assert state["consumed"] == job.steps * job.global_batch
    actual, expected_tensors = tensors_of(job), tensors_of(uninterrupted)
    assert actual.keys() == expected_tensors.keys()
    for name, tensor in expected_tensors.items():
        assert torch.allclose(actual[name], tensor, rtol=1e-6, atol=1e-9), name
