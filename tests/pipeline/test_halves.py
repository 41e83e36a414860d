"""A GPT whose backward passes run in halves has the losses and gradients of full passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.gradient_slot import GradientSlot
from lightning_megatron.layers.weight_gradient_queue import Start
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import Microbatch, split_batch
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.schedule import Schedule, build_schedule
from tests.oracles import assert_equal
from tests.pipeline.halves import with_halves
from tests.training.runs import Run

SIZES: dict[str, Any] = {
    "vocab_size": 50, "max_seq_length": 8, "num_layers": 4, "hidden_size": 16, "num_heads": 2,
}  # fmt: skip
LLAMA: dict[str, Any] = {**SIZES, "num_kv_heads": 2, "ffn_hidden_size": 24}
KINDS = {
    "gpt2, tied": GPTConfig.gpt2(**SIZES, tie_embeddings=True),
    "llama": GPTConfig.llama(**LLAMA),
    "experts": GPTConfig.llama(
        **LLAMA, experts={"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}
    ),
}
NUM_MICROBATCHES = 4
DELAYS = (0, 2, NUM_MICROBATCHES)
#: Linear layers of a block that defer their products: two of attention, two of the MLP or experts.
PRODUCTS_OF_BLOCK = 4
Result = tuple[list[Tensor], dict[str, Tensor]]


def make_microbatches() -> list[Microbatch]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, SIZES["vocab_size"], (2 * NUM_MICROBATCHES, 9), generator=generator)
    return split_batch({"tokens": tokens}, 2)


def step(model: GPT, data: dict[str, Tensor]) -> Tensor:
    return model(data["tokens"][:, :-1], data["tokens"][:, 1:]).mean()


def scheduled(
    layout: ParallelLayout, delay: int | None, number: int, forward_only: bool
) -> Schedule:
    name = "1f1b" if layout.vpp == 1 else "interleaved"
    schedule = build_schedule(name, layout.pp, number, layout.vpp, forward_only=forward_only)
    return schedule if delay is None else with_halves(schedule, delay)


class Trained(Run):
    """A GPT with gradient slots in flat buffers."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        super().__init__(dict(model.named_parameters()), model.mesh)
        self.num_deferred = 0
        queue = self.reducer.weight_gradients
        put: Callable[[Start, Sequence[GradientSlot]], None] = queue.put

        def count_and_put(start: Start, slots: Sequence[GradientSlot]) -> None:
            self.num_deferred += 1
            put(start, slots)

        queue.put = count_and_put  # type: ignore[method-assign]

    def result_of(self, delay: int | None, step_fn: Any = None) -> Result:
        """Return the losses and this rank's gradients of a step."""
        self.zero_grad()
        self.num_deferred = 0
        mesh = self.model.mesh
        executor = PipelineExecutor(
            mesh, self.model if mesh.pp.size > 1 else None, partial(scheduled, mesh.layout, delay)
        )
        losses = executor.run(
            step_fn or partial(step, self.model),
            make_microbatches(),
            backward=True,
            loss_of=lambda loss, _: loss / NUM_MICROBATCHES,
            weight_gradients=self.reducer.weight_gradients,
        )
        gradients = self.reducer.unreduced_gradients(set(self.main.trained))
        assert gradients.keys() == set(self.main.trained)
        return losses, {name: gradient.clone() for name, gradient in gradients.items()}

    def check(self, label: str) -> Result:
        """Compare steps in halves with a step of full passes, and return the latter's results."""
        losses, gradients = self.result_of(None)
        assert self.num_deferred == 0, label
        products = PRODUCTS_OF_BLOCK * len(self.model.layers) + self.model.mesh.pp.is_last
        for delay in DELAYS:
            actual_losses, actual = self.result_of(delay)
            assert self.num_deferred == products * NUM_MICROBATCHES, label
            assert all(map(torch.equal, actual_losses, losses)), label
            for name, gradient in actual.items():
                assert_equal(gradient, gradients[name], f"{label}, delay {delay}: {name}", 1e-12)
        return losses, gradients


def results_of_one_process(kind: str) -> Result:
    """Return the losses and gradients of one process with plain autograd."""
    model = GPT(KINDS[kind], ParallelMesh.single(), seed=1)
    losses = [step(model, part.data) for part in make_microbatches()]
    torch.stack(losses).mean().backward()
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_halves_equal_full_passes_and_plain_autograd(kind: str) -> None:
    losses, gradients = Trained(GPT(KINDS[kind], ParallelMesh.single(), seed=1)).check(kind)
    expected_losses, expected = results_of_one_process(kind)
    for loss, twin in zip(losses, expected_losses, strict=True):
        assert_equal(loss, twin, "loss", 1e-12)
    for name, gradient in gradients.items():
        assert_equal(gradient, expected[name], name, 1e-12)


def test_without_a_queue_the_input_halves_compute_all_gradients() -> None:
    mesh = ParallelMesh.single()
    model = GPT(KINDS["llama"], mesh, seed=1)
    _, expected = results_of_one_process("llama")
    PipelineExecutor(mesh, None, partial(scheduled, mesh.layout, 2)).run(
        partial(step, model),
        make_microbatches(),
        backward=True,
        loss_of=lambda loss, _: loss / NUM_MICROBATCHES,
    )
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_equal(parameter.grad, expected[name], name, 1e-12)


def test_an_error_in_a_step_leaves_no_deferred_weight_gradients() -> None:
    run = Trained(GPT(KINDS["llama"], ParallelMesh.single(), seed=1))
    calls: list[Any] = []

    def fail_at_the_second_call(data: dict[str, Tensor]) -> Tensor:
        calls.append(data)
        if len(calls) == 2:
            raise RuntimeError("stop")
        return step(run.model, data)

    with pytest.raises(RuntimeError, match="stop"):
        run.result_of(2, fail_at_the_second_call)
    assert run.num_deferred == PRODUCTS_OF_BLOCK * SIZES["num_layers"] + 1
    _, gradients = run.result_of(2)
    _, expected = results_of_one_process("llama")
    for name, gradient in gradients.items():
        assert_equal(gradient, expected[name], name, 1e-12)
