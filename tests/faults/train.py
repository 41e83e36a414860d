"""Train a tiny GPT on made-up tokens, log every step, and resume from the last checkpoint if there
is one.

`torchrun --nproc-per-node 2 -m tests.faults.train '{"folder": "/tmp/x", "steps": 20}'`
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings of a training.

    Args:
        folder: Folder of the corpus, the logs and the checkpoints.
        steps: Number of optimizer steps of the training.
        save_every: Steps between two checkpoints.
        async_save: Whether checkpoints are written in the background.
        devices: Ranks on each node.
        num_nodes: Number of nodes; with ``elastic``, the largest number.
        elastic: Whether nodes may join and leave; torchrun tells their number.
        seconds: Least duration of a step, so that there is time to interrupt it (seconds).
        timeout: Time that a collective may wait for a rank (seconds).
        dropout: Share of dropped activations. The choice depends on the number of data ranks.
    """

    folder: str
    steps: int
    save_every: int = 5
    async_save: bool = False
    devices: int = 2
    num_nodes: int = 1
    elastic: bool = False
    global_batch: int = 4
    seconds: float = 0.0
    timeout: float | None = None
    precision: str = "32-true"
    dropout: float = 0.1

    @property
    def root(self) -> Path:
        """Return the folder as a path."""
        return Path(self.folder)

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints."""
        return self.root / "checkpoints"


def append_to_log(job: Job, rank: int, *words: object) -> None:
    """Append a line to the log of a rank in one write, as the process may be killed at any time."""
    line = (" ".join(map(str, words)) + "\n").encode()
    file = os.open(job.root / f"log_{rank}.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line)
    os.close(file)


def write_corpus(folder: Path) -> None:
    """Write a token file of repeatable made-up text, in which each token predicts the next well."""
    import numpy as np

    from lightning_megatron.data.token_file import TokenFileWriter

    draw = np.random.RandomState(0)
    folder.mkdir(parents=True, exist_ok=True)
    with TokenFileWriter(folder / "corpus", vocab_size=VOCABULARY) as writer:
        for _ in range(40):
            tokens = (draw.randint(VOCABULARY) + draw.randint(1, 3, size=40).cumsum()) % VOCABULARY
            writer.add_document(tokens.tolist())


VOCABULARY, LENGTH = 48, 12


def main() -> None:
    """Train."""
    import json

    job = Job(**json.loads(sys.argv[1]))
    # The line precedes the slow imports, because a rank may be killed while it starts.
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    append_to_log(job, rank, "start", os.getpid())
    from tests.faults.fit import fit

    fit(job, rank)


if __name__ == "__main__":
    main()
