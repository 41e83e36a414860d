"""A training step of a GPT with gradient slots, captured and eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.graphs.backend import CaptureBackend, CapturedGraph
from lightning_megatron.groups.generators import GeneratorPool
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.recorded_draws import RecordedDraws
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.experts import Transport
from tests.graphs.trained import SIZES as FOUR_LAYERS
from tests.optimizer.runs import Run

SIZES: dict[str, Any] = {**FOUR_LAYERS, "num_layers": 2}


class Step:
    """Forward and backward pass of a GPT on one batch, whose memory address stays the same."""

    def __init__(
        self, config: GPTConfig, mesh: ParallelMesh, transport: Transport = "auto"
    ) -> None:
        self.model = GPT(config, mesh, seed=7).to(mesh.device)
        for module in self.model.modules():
            if isinstance(module, MixtureOfExperts):
                module.transport = transport
        self.mesh = mesh
        self.run = Run(dict(self.model.named_parameters()), mesh)
        self.batch = self.drawn(0)

    def drawn(self, seed: int) -> Tensor:
        """Draw tokens and labels, which differ between data-parallel ranks."""
        generator = torch.Generator().manual_seed(100 * seed + self.mesh.data.rank)
        drawn = torch.randint(0, SIZES["vocab_size"], (2, 2, 8), generator=generator)
        return drawn.to(self.mesh.device)

    def __call__(self) -> Tensor:
        """Add the gradients to the slots, and return the loss."""
        losses: Tensor = self.model(self.batch[0], self.batch[1])
        loss = losses.mean()
        loss.backward()
        return loss.detach()

    def captured(self, backend: CaptureBackend) -> tuple[CapturedGraph, Tensor, RecordedDraws]:
        """Capture the step as the first microbatch of an optimizer step."""
        streams = self.mesh.random
        generators = GeneratorPool(self.mesh.device)
        # The eager run warms up, and counts the streams from which it draws.
        with streams.preserve_position(), streams.recording(generators):
            self()
        generators = generators.exact()
        self.run.zero_grad()
        with streams.preserve_position(), streams.recording(generators) as recorder:
            graph, loss = backend.capture(self, backend.make_pool(), generators)
        return graph, loss, recorder.recorded

    def result_of(self, seed: int, step: Callable[[], Tensor]) -> list[Tensor]:
        """Return the loss and the gradient sums of a step on a batch of this seed."""
        for buffer in self.run.main.buffers:
            buffer.gradients.fill_(7.0)
        self.run.zero_grad()
        self.batch.copy_(self.drawn(seed))
        self.mesh.random.begin_microbatch(seed, 0)
        return [step().clone(), *(buffer.gradients.clone() for buffer in self.run.main.buffers)]

    def assert_replays_equal_eager(self, backend: CaptureBackend, label: str) -> None:
        """Assert that a captured step equals eager steps bit by bit, on three batches."""
        graph, loss, draws = self.captured(backend)

        def replayed() -> Tensor:
            self.mesh.random.seed_generators(draws)
            graph.replay()
            return loss

        for seed in (1, 2, 3):
            actual = self.result_of(seed, replayed)
            expected = self.result_of(seed, self)
            repeated = self.result_of(seed, self)
            for value, reference, repetition in zip(actual, expected, repeated, strict=True):
                place = f"{label}, batch {seed}"
                if torch.equal(reference, repetition):
                    assert torch.equal(value, reference), place
                else:  # some kernels of GPUs sum in another order each time
                    assert torch.allclose(value, reference, rtol=1e-3, atol=1e-5), place
        graph.release()
