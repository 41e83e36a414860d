"""Training with gradients of embeddings that ranks exchange by rows, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import start_all_reduce
from lightning_megatron.layers.parameters.gradient_slot import mark_filled
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.optimizer import DistributedOptimizerConfig, gradient_buckets
from tests.optimizer.runs import Run

#: Rows of each rank: none, repeated rows, one row only, and rows that other ranks have too.
ROWS = ([], [3, 3, 0], [7, 7, 7], [0, 5, 3])

_SIZES: dict[str, Any] = {
    "vocab_size": 400, "max_seq_length": 8, "num_layers": 2, "hidden_size": 16, "num_heads": 2,
}  # fmt: skip
CONFIG = GPTConfig.llama(**_SIZES, ffn_hidden_size=24, tie_embeddings=False)
WORD = "embedding.word.weight"
NUM_STEPS = 3


@contextmanager
def counted_exchanges() -> Iterator[list[int]]:
    """Record the number of rows of each exchange."""
    row_counts: list[int] = []
    start = gradient_buckets.start_row_sum

    def record_exchange(gradient: Tensor, rows: Tensor, axis: Any) -> Any:
        row_counts.append(len(rows))
        return start(gradient, rows, axis)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_buckets, "start_row_sum", record_exchange)
        yield row_counts


def errors_of_sums(mesh: ParallelMesh) -> dict[str, float]:
    """Return the largest differences between an exchange of rows and an all-reduce."""
    local_rows = ROWS[mesh.data.rank]
    errors = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(mesh.data.rank)
        gradient = torch.zeros(9, 4, dtype=dtype, device=mesh.device)
        gradient[local_rows] = torch.randn(len(local_rows), 4, generator=generator).to(gradient)
        expected = gradient.to(torch.float64, copy=True)
        start_all_reduce(expected, mesh.data, "mean").wait()
        rows = torch.tensor([*local_rows, *[0] * (3 - len(local_rows))], device=mesh.device)
        gradient_buckets.start_row_sum(gradient, rows, mesh.data).wait()
        errors[str(dtype)] = (gradient - expected).abs().max().item()
        rank_0_gradient = gradient.clone()
        torch.distributed.broadcast(rank_0_gradient, 0)
        errors[f"{dtype} beside rank 0"] = (gradient - rank_0_gradient).abs().max().item()
    return errors


class Training:
    """Train a small Llama on microbatches of given lengths."""

    def __init__(self, mesh: ParallelMesh, division: DistributedOptimizerConfig) -> None:
        self.mesh = mesh
        self.model = GPT(CONFIG, mesh, seed=1).double()
        self.run = Run(dict(self.model.named_parameters()), mesh, division)

    def loss(self, length: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 400, (1, length), generator=generator).to(self.mesh.device)
        return self.model(tokens, tokens.roll(1, 1)).mean()

    def weights(self) -> dict[str, Tensor]:
        named = self.model.named_parameters()
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in named}

    def step(self, lengths: list[int], seed: int, replays: bool = False) -> None:
        reducer = self.run.reducer
        self.run.zero_grad()
        for number, length in enumerate(lengths):
            loss = self.loss(length, 10 * seed + number)
            if number == len(lengths) - 1:
                reducer.begin_last_backward(0)
            if not replays:
                loss.backward()
                continue
            with reducer.recording() as recorder:
                loss.backward()
            mark_filled(recorder.slots, recorder.rows)
            for rows in recorder.rows.values():
                # The next replay overwrites the memory of the indices.
                for indices in rows:
                    indices.fill_(399)
            for group in recorder.groups:
                reducer.mark_arrived(group)
        reducer.start_reduction(0)
        self.run.finish()
        self.run.step()


def lengths_of(kind: str, rank: int, step: int) -> list[int]:
    """Return the lengths of a rank's microbatches (tokens)."""
    if kind == "unequal":
        return [2 + rank, 4]
    if kind == "many":
        return [8] * (17 if rank == 1 and step == 1 else 1)
    return [4, 4]


@contextmanager
def exposed(run: Run) -> Iterator[None]:
    """Show the gradients of the last backward pass to users inside the block."""
    begin = run.reducer.begin_last_backward

    def exposing(chunk: int) -> None:
        begin(chunk)
        run.reducer.expose_unreduced()
        run.main.exposed_gradients.withdraw()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.reducer, "begin_last_backward", exposing)
        yield


def weights_after(
    mesh: ParallelMesh, division: DistributedOptimizerConfig, kind: str
) -> tuple[dict[str, Tensor], list[int]]:
    """Train, and return the full weights and the numbers of exchanged rows."""
    training, rank = Training(mesh, division), mesh.data.rank
    with counted_exchanges() as exchanges:
        for step in range(NUM_STEPS):
            is_exposed = kind == "exposed" and rank == 0 and step == 1
            with exposed(training.run) if is_exposed else nullcontext():
                lengths = lengths_of(kind, rank, step)
                training.step(lengths, 100 * step + rank, kind == "replayed")
    return training.weights(), exchanges


def weights_of_twin(kind: str, num_ranks: int, device: str = "cpu") -> dict[str, Tensor]:
    """Train one process on the microbatches of all ranks."""
    mesh = ParallelMesh.single(torch.device(device))
    training = Training(mesh, DistributedOptimizerConfig())
    for step in range(NUM_STEPS):
        training.run.zero_grad()
        for rank in range(num_ranks):
            for number, length in enumerate(lengths_of(kind, rank, step)):
                loss = training.loss(length, 10 * (100 * step + rank) + number)
                (loss / num_ranks).backward()
        training.run.finish()
        training.run.step()
    return training.weights()


KINDS = ("equal", "unequal", "many", "replayed", "exposed")
DIVISIONS = {
    "zero 1": DistributedOptimizerConfig(bucket_size=2000),
    "zero 0": DistributedOptimizerConfig(zero=0, bucket_size=2000),
}

#: Exchanges of all steps. Too many rows, and gradients exposed to users, are reduced as full tables;
#: later steps exchange rows again.
EXPECTED: dict[str, Any] = {
    "equal": lambda size: [8] * NUM_STEPS,
    "replayed": lambda size: [8] * NUM_STEPS,
    "unequal": lambda size: [5 + size] * NUM_STEPS,
    "many": lambda size: [8, 8],
    "exposed": lambda size: [8, 8],
    "default buckets": lambda size: [],
}
