"""Test that trainings by CUDA graphs keep eager bits while gradients are summed.

Only deterministic algorithms run: the order of sums in cuDNN's backward pass of attention depends on
the multiprocessors that other kernels leave free, so that one weight of hundreds may differ by 4e-13.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.shapes import LAYOUTS, SHAPES, Tokens, Trained
from lightning_megatron import MegatronStrategy
from tests.gpu.ranks import run_ranks
from tests.gpu.shared_gpu import is_shared

STEPS = 12
#: Odd multiplier with well mixed bits: 2^64 divided by the golden ratio, as a signed number.
_MIX = -7046029254386353131


def digest(tensor: Tensor) -> Tensor:
    """Return a number on the device that depends on the bits of all elements."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.reshape(-1).view(integers[tensor.element_size()])
    bits = bits.to(torch.int64, copy=True).mul_(_MIX)
    # A plain sum of bits would miss two changes that cancel each other.
    return bits.bitwise_xor_(bits >> 29).mul_(_MIX).sum()


class Digests(Callback):
    """Callback that digests this rank's gradients, updated parameters and losses of every step."""

    #: The callback does not read ``parameter.grad``; it digests the sums in the flat buffers.
    reads_gradients = False

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.num_graphs = 0

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        self.rows += [digest(part.gradient) for part in _slices(trainer)]

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.rows += [digest(part.main.detach()) for part in _slices(trainer)]
        self.rows.append(digest(outputs["loss"].detach()))
        torch.cuda.synchronize()

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        graphs = strategy.run.graphs
        self.num_graphs = 0 if graphs is None else graphs.num_graphs


def _slices(trainer: Trainer) -> list[Any]:
    strategy: Any = trainer.strategy
    return list(strategy.run.state.main.slices.values())


def train(model: str, name: str, mode: str | None) -> tuple[list[int], int]:
    """Train in a mode of graphs, and return the digests of this rank and the number of graphs."""
    config, layout = SHAPES[model], LAYOUTS[name]
    batch = layout.batch(model)
    graphs: Any = None if mode is None else {"mode": mode, "on_failure": "error"}
    digests = Digests()
    strategy = MegatronStrategy(
        ep=layout.ep,
        microbatch_size=batch,
        optimizer={"overlap_parameters": True},
        cuda_graphs=graphs,
    )
    trainer = Trainer(
        accelerator="cuda", devices=layout.devices, strategy=strategy, precision="bf16-mixed",
        deterministic=True, max_steps=STEPS, gradient_clip_val=1.0, callbacks=[digests],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tempfile.gettempdir(),
    )  # fmt: skip
    data = Tokens(config, STEPS * batch * layout.data_ranks)
    module = Trained(config, "balanced", batch * config.max_seq_length)
    trainer.fit(module, DataLoader(data, batch_size=batch, drop_last=True))
    return torch.stack(digests.rows).tolist(), digests.num_graphs


def compare(rank: int, size: int, model: str, layout: str, modes: list[str]) -> list[str]:
    """Return the modes whose training has other bits than eager steps, or no graphs."""
    eager, _ = train(model, layout, None)
    wrong = []
    for mode in modes:
        digests, num_graphs = train(model, layout, mode)
        if digests != eager or not num_graphs:
            wrong.append(f"{mode}: {num_graphs} graphs")
    return wrong


@pytest.mark.gpu2
@pytest.mark.parametrize(("model", "layout"), [("tiny_moe", "ep2"), ("tiny", "dp2")])
def test_graphs_keep_eager_bits_while_gradients_are_summed_between_them(model, layout):
    modes = ["segments"] if is_shared() else ["segments", "full"]
    assert run_ranks(compare, 2, model, layout, modes) == [[], []]


def test_a_digest_distinguishes_single_bits_that_a_sum_does_not():
    for dtype, bits in ((torch.bfloat16, torch.int16), (torch.float32, torch.int32)):
        tensor = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype)
        changed = tensor.clone()
        changed.view(bits)[0] += 1
        changed.view(bits)[3] -= 1
        assert tensor.view(bits).sum() == changed.view(bits).sum()
        assert torch.equal(digest(tensor), digest(tensor.clone()))
        assert not torch.equal(digest(tensor), digest(changed))
