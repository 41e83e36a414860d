"""Ranks that torchrun or SLURM started print a refusal once, before they know each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds.user_script import ROOT, environment

SCRIPT = """
import os, sys
from lightning.pytorch import Trainer
from lightning_megatron import MegatronStrategy
rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
tp = {"all": 3, "one": 3 if rank else 2, "each": 3 + rank}[sys.argv[1]]
Trainer(accelerator="cpu", devices=2, logger=False, strategy=MegatronStrategy(tp=tp))
"""
REFUSAL = "world_size (2) must be a multiple of tp"
COMMAND = (
    "-m", "lightning_megatron", "fit", "-c", "recipe:gpt_speeches_cpu", "--trainer.devices", "2",
)  # fmt: skip


def by_torchrun(*program: str, **variables: str) -> tuple[int, str]:
    """Return exit code and output of a program that torchrun runs on two ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [sys.executable, *launcher, *program], cwd=ROOT, env=environment(**variables),
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    return run.returncode, run.stderr


def by_slurm(*program: str, **variables: str) -> tuple[list[int], str]:
    """Return exit codes and output of a program that this process starts as `srun` would."""
    step = {
        "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "localhost",
    }  # fmt: skip
    ranks = []
    for rank in "01":
        own = environment(**variables, **step, SLURM_PROCID=rank, SLURM_LOCALID=rank)
        command = [sys.executable, *program]
        ranks.append(
            subprocess.Popen(command, cwd=ROOT, env=own, stderr=subprocess.PIPE, text=True)
        )
    printed = [rank.communicate(timeout=240)[1] for rank in ranks]
    return [rank.returncode for rank in ranks], "".join(printed)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_refusal_of_torchruns_ranks_is_printed_once_by_scripts_and_commands(script, tmp_path):
    for program, message in (
        ((script, "all"), REFUSAL),
        ((*COMMAND, "--trainer.strategy.tp", "3"), REFUSAL),
        ((*COMMAND, "--trainer.strategy.tq", "3"), "there is no setting tq"),
        # The last one starts with a file in which the refusal of the first one stands.
        ((script, "all"), REFUSAL),
    ):
        code, printed = by_torchrun(*program, TMPDIR=str(tmp_path))
        assert code == 1, printed
        assert printed.count(message) == 1, printed


def test_ranks_of_slurm_end_alike_and_what_one_rank_refuses_alone_is_printed(script, tmp_path):
    for kind, codes, counts in (("all", [1, 1], 1), ("one", [0, 1], 1), ("each", [1, 1], 2)):
        folder = tmp_path / kind
        folder.mkdir()
        found, printed = by_slurm(script, kind, TMPDIR=str(folder))
        assert found == codes, printed
        assert printed.count(REFUSAL) == printed.count("Traceback") == counts, printed
    found, printed = by_slurm(*COMMAND, "--trainer.strategy.tp", "3", TMPDIR=str(tmp_path))
    assert (found, printed.count(REFUSAL), "Traceback" in printed) == ([2, 2], 1, False), printed
