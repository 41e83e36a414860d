"""A rank that fails or ends stops the job and is named first, and no process or file is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.agent import wait_until
from tests.sweeps import chosen
from tests.worlds.user_script import ROOT, environment, run_script

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads the processes from /proc")


@pytest.mark.parametrize("kind", ["raise", "hang", "teardown"])
def test_a_failing_rank_ends_the_job_with_its_traceback_first(kind: str, tmp_path: Path) -> None:
    result = run_script(kind, TMPDIR=str(tmp_path))
    assert result.returncode == 1
    assert not list(tmp_path.glob("lightning_megatron*"))
    position = result.stderr.index("ArithmeticError: the third batch is bad")
    named = "[rank 1] failed; the other ranks will be stopped."
    assert named in result.stderr[:position]
    assert result.stderr.count("Traceback (most recent call last)") == 1
    later = [match.start() for match in re.finditer(r"\[rank \d\] (stops|waits)", result.stderr)]
    # Ranks that hang may be stopped before they print anything, and no rank waits for the last hook
    # of another rank.
    assert later or kind != "raise"
    assert all(begin > position for begin in later)


HELD = """\
[rank 1] failed; the other ranks will be stopped.
OutOfMemoryError: no room beside 25165824 bytes

MiB of rank 1 (stage 1, cpu)  estimate   held
parameters                        0.29   0.29
gradients                         0.29   0.29
main parameters                   0.00   0.00
optimizer                         0.58   0.58
activations and all else          0.53  38.84
together                          1.69  40.00
reserved, but unused                    15.00
outside of torch's allocator             8.00
capacity                                64.00

largest tensors (MiB)
     24.00  kept_by_the_user of training_step, line {line}: float64 3 x 1048576
      0.29  parameters of model.layers.2.attention_norm.weight and 26 others: float64 38272
      0.29  gradients of model.layers.2.attention_norm.weight and 26 others: float64 38272
      0.09  exp_avg_sq of model.head.weight: float64 384 x 32
      0.09  exp_avg of model.head.weight: float64 384 x 32

38.31 MiB are more than the estimate: look for tensors that your code or a callback keeps from step to step.

what would help (MiB of the fullest stage, now 1.74)  estimate  saves
microbatch_size=1                                         1.46   0.28
recompute='full_except_core'                              1.47   0.27
recompute='full'                                          1.46   0.29
tp=2 on 4 ranks                                           0.96   0.78
pp=4 on 4 ranks                                           1.35   0.39
cp=2 on 4 ranks                                           1.18   0.56

PYTORCH_ALLOC_CONF=expandable_segments:True lets the allocator use what it has reserved in pieces.

docs/out_of_memory.md has what each option costs.

Traceback (most recent call last):
"""


def test_a_rank_whose_memory_is_full_reports_what_it_held_and_what_would_help_once() -> None:
    result = run_script("memory")
    assert result.returncode == 1
    line = re.search(
        r'user_script.py", line (\d+), in training_step\n    raise torch', result.stderr
    )
    assert line is not None, result.stderr
    # The tensor's line is that of the error, at which the frame stands.
    assert HELD.format(line=line[1]) in result.stderr
    assert result.stderr.count("what would help") == 1


RECIPE = """
trainer: {accelerator: cpu, devices: 2, logger: false, enable_checkpointing: false, max_steps: 1,
  strategy: {class_path: lightning_megatron.MegatronStrategy, init_args: {tp: 2}}}
model: {class_path: tests.cli_modules.Line}
data: {class_path: tests.cli_modules.Points, init_args: {context: 8}}
"""


def test_a_refusal_on_all_ranks_of_a_command_is_one_message_without_traceback(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    words = [
        "-m",
        "lightning_megatron",
        "fit",
        "-c",
        str(tmp_path / "recipe.yaml"),
        f"--trainer.default_root_dir={tmp_path}",
    ]
    result = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )  # fmt: skip
    assert result.returncode != 0
    assert result.stderr.count("tp (2) above 1 needs a module that can be cut over tp") == 1
    assert "Traceback" not in result.stderr
    assert "stops after" not in result.stderr


HOW = {
    "os_exit": "ended with exit code 7 and without an error message",
    "sys_exit": r"left the run by SystemExit\(0\) at .*user_script.py:\d+",
    "sigsegv": "was ended by SIGSEGV",
    "interrupt": r"left the run by KeyboardInterrupt\(\) at .*user_script.py:\d+",
}


@pytest.mark.parametrize("kind", chosen(HOW, "sys_exit"))
def test_a_rank_that_ends_by_itself_is_named_before_the_ranks_that_miss_it(kind, tmp_path):
    result = run_script(kind, TMPDIR=str(tmp_path))
    assert result.returncode != 0
    reports = re.findall(r"^\[rank \d\].*", result.stderr, re.MULTILINE)
    assert re.fullmatch(rf"\[rank 1\] {HOW[kind]}; the other ranks will be stopped\.", reports[0])
    assert all(report.startswith("[rank 0] stops after rank 1 failed") for report in reports[1:])
    assert not list(tmp_path.glob("lightning_megatron*"))


def processes_with(argument: str) -> list[str]:
    """List the processes that were started with an argument."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument in path.read_text(errors="replace"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


#: Launchers and the signals that end them: a kill, and Ctrl-C.
ENDS = [("own", "SIGKILL"), ("own", "SIGINT")]


@ON_LINUX
@pytest.mark.parametrize(("launcher", "number"), chosen([*ENDS, ("torchrun", "SIGKILL")], *ENDS))
def test_launched_ranks_end_after_the_process_that_launched_them(launcher, number, tmp_path):
    marker = f"marker-{launcher}-{number}-{os.getpid()}"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [
            sys.executable,
            *(torchrun if launcher == "torchrun" else []),
            "-m",
            "tests.worlds.user_script",
            "hang nowhere",
            marker,
        ],
        cwd=ROOT,
        env=environment(TMPDIR=str(tmp_path)),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for _ in range(2 if launcher == "torchrun" else 1):
            while "waits forever" not in process.stderr.readline():
                assert process.poll() is None
        process.send_signal(getattr(signal, number))
        process.wait()
        wait_until(lambda: not processes_with(marker), "the end of all processes")
    assert not list(tmp_path.glob("lightning_megatron*"))


HUNG_WORKER = """
import time, torch
from torch.utils.data import DataLoader, Dataset
from lightning_megatron.strategy.process.dataloaders import seed_dataloader

class Hangs(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        time.sleep(600 * index)
        return torch.zeros(3)

batches = iter(seed_dataloader(DataLoader(Hangs(), num_workers=1), 0, 0))
next(batches)
print("hangs", flush=True)
next(batches)
"""


@ON_LINUX
def test_a_data_worker_that_hangs_ends_with_its_rank_and_leaves_no_files(tmp_path: Path) -> None:
    marker = f"marker-worker-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", HUNG_WORKER, marker],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        assert len(processes_with(marker)) == 2
        assert list(tmp_path.glob("pymp-*"))
        process.kill()
        process.wait()
        wait_until(lambda: not processes_with(marker), "the end of all processes")
    assert not list(tmp_path.glob("pymp-*"))
