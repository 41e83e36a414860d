"""Time from the death of a rank to the first step after the restart by torchrun, by phase.

    python -m benchmarks.restart --runs 3

A tiny GPT trains on CPU processes and saves a checkpoint every second step. The program kills one
rank. The time of a phase is the median of ``--runs`` runs; a phase of a run ends when the last rank
has completed it.
"""

from __future__ import annotations

import time

_BEGUN = time.time()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

#: Moments of a restart in order, each with a description of the phase that it ends.
MOMENTS = {
    "error": "the other rank notices",
    "begun": "the other rank ends, torchrun starts processes, and Python",
    "imported": "imports",
    "fit": "Trainer, strategy, data",
    "joined": "rendezvous, process groups",
    "built": "model, optimizer",
    "loaded": "checkpoint, dataloaders",
    "stepped": "first step",
}


def note(folder: Path, moment: str, when: float | None = None) -> None:
    """Append a moment to the log of this rank."""
    line = json.dumps([moment, when or time.time(), os.getpid()]) + "\n"
    with (folder / f"rank_{os.environ['RANK']}.jsonl").open("a") as file:
        file.write(line)


def train(folder: Path, steps: int) -> None:
    """Train as one rank and log the moments of a restart."""
    note(folder, "begun", _BEGUN)
    import torch
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from lightning_megatron import GPTConfig, MegatronStrategy
    from lightning_megatron.models.causal_lm import CausalLM

    note(folder, "imported")

    class Notes(Callback):
        def setup(self, *args: Any, **kwargs: Any) -> None:
            note(folder, "joined")

        def on_fit_start(self, *args: Any) -> None:
            note(folder, "built")

        def on_train_start(self, *args: Any) -> None:
            note(folder, "loaded")

        def on_train_batch_end(self, *args: Any) -> None:
            note(folder, "stepped")
            time.sleep(0.05)

        def on_exception(self, *args: Any) -> None:
            note(folder, "error")

    torch.set_num_threads(1)
    config = GPTConfig.gpt2(
        vocab_size=64, max_seq_length=16, num_layers=2, hidden_size=16, num_heads=2
    )
    tokens = torch.randint(64, (64, 17), generator=torch.Generator().manual_seed(1))
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=MegatronStrategy(),
        max_steps=steps,
        callbacks=[
            Notes(),
            ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2, save_last=True),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    note(folder, "fit")
    trainer.fit(CausalLM(config), DataLoader(samples, batch_size=2), ckpt_path="last")  # type: ignore[arg-type]


def moments(folder: Path, rank: int) -> list[tuple[str, float, int]]:
    """Return the log of a rank: moment, time (s) and process id."""
    path = folder / f"rank_{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(moment, when, pid) for moment, when, pid in map(json.loads, lines)]


def kill_one(folder: Path, ranks: int, steps: int) -> dict[str, float]:
    """Run a job, kill one rank, and return the time of each phase of the restart (s)."""
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--max-restarts",
        "1",
        "--nproc-per-node",
        str(ranks),
    ]
    job = ["-m", "benchmarks.restart", "--train", str(folder), "--steps", str(steps)]
    with subprocess.Popen(
        [sys.executable, *torchrun, *job],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=(folder / "output.txt").open("w"),
    ) as process:
        while sum(moment == "stepped" for moment, *_ in moments(folder, ranks - 1)) < steps // 2:
            if process.poll() is not None:
                raise RuntimeError((folder / "output.txt").read_text()[-3000:])
            time.sleep(0.01)
        killed = time.time()
        os.kill(moments(folder, ranks - 1)[-1][2], signal.SIGKILL)
    return parts([moments(folder, rank) for rank in range(ranks)], killed)


def parts(logs: list[list[tuple[str, float, int]]], killed: float) -> dict[str, float]:
    """Return the time of each phase of a restart, which its last rank ends (s)."""
    result = {}
    before = killed
    for moment, phase in MOMENTS.items():
        times = []
        for rank in logs:
            after = [when for name, when, _ in rank if name == moment and when > killed]
            times += after[:1]
        if times:
            result[phase] = max(times) - before
            before = max(times)
    return result


def main() -> None:
    """Measure restarts and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--runs", type=int, default=3)
    add("--ranks", type=int, default=2)
    add("--steps", type=int, default=12)
    add("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.steps)
        return
    restarts = []
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            restarts.append(kill_one(Path(folder), options.ranks, options.steps))
    for phase in MOMENTS.values():
        print(
            f"{statistics.median(restart.get(phase, 0.0) for restart in restarts):7.2f} s  {phase}"
        )
    print(f"{statistics.median(sum(restart.values()) for restart in restarts):7.2f} s  together")


if __name__ == "__main__":
    main()
