"""Traces of modules with code of their own need what a CPU holds, and say where they cannot run."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_megatron import ParallelLayout
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.memory import lone_stage
from lightning_megatron.memory.estimate import estimate_module
from lightning_megatron.plan.budget import StageMemory
from tests.memory.own_modules import (
    LENGTH,
    MODULES,
    SAMPLES,
    STEP,
    TEXT,
    TOKENS,
    Nano,
    adapted_llama,
    built,
    held_of,
    traced_of,
)


@pytest.mark.parametrize("name", MODULES)
def test_passes_of_a_module_need_what_a_cpu_holds(name: str) -> None:
    mesh = ParallelMesh.single("cpu")
    held = held_of(name, mesh)
    assert held["kept"] > 0
    assert traced_of(name, mesh) == pytest.approx(held, rel=0.02)


def test_estimates_of_all_stages_leave_the_module_as_it_was() -> None:
    module = built("nano")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    batch = (TOKENS, TOKENS)
    (whole,) = estimate_module(module, batch, ParallelLayout(1), STEP, "cpu")
    stages = estimate_module(module, batch, ParallelLayout(2, pp=2), STEP, "cpu")
    assert sum(stage.num_parameters for stage in stages) == whole.num_parameters
    assert [stage.in_flight for stage in stages] == [2, 1]
    assert whole.parameters == 4 * whole.num_parameters
    # The masks of four blocks are buffers, which the step holds as well.
    assert whole.shared >= 4 * 64 * 64 * 4
    (half,) = estimate_module(
        module, batch, ParallelLayout(1), replace(STEP, microbatch_size=2), "cpu"
    )
    assert half.activations == pytest.approx(whole.activations / 2, rel=0.01)
    (on_gpu,) = estimate_module(module, batch, ParallelLayout(1), STEP)
    assert on_gpu.activations < whole.activations, "dropout keeps a byte for each element on GPUs"
    assert module.num_calls == 0
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


class Drawing(Nano):
    """A decoder that draws numbers with a generator of its device."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        draws = torch.Generator(self.device).manual_seed(batch_idx)
        noise = torch.rand(SAMPLES, LENGTH, generator=draws, device=self.device)
        kept = (noise > 0.1).long()
        return super().training_step((batch[0] * kept, batch[1]), batch_idx)


@pytest.mark.parametrize("make", [Drawing, adapted_llama])
def test_a_module_can_be_traced_for_a_gpu_without_a_build_of_torch_for_gpus(make: Any) -> None:
    batch = (TOKENS, TOKENS) if make is Drawing else TEXT
    (estimate,) = estimate_module(make(), batch, ParallelLayout(1), STEP)
    assert estimate.activations > 0


class Holder(torch.nn.Module):
    """A module around a Hugging Face model, which is replaced."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


def test_frozen_weights_that_a_conversion_separates_would_be_copied_until_the_backward_pass() -> (
    None
):
    half = replace(STEP, parameter_bytes=2, activation_bytes=2, main_bytes=4)

    def estimate() -> StageMemory:
        module = Holder(adapted_llama().train())
        return estimate_module(module, TEXT, ParallelLayout(1), half)[0]

    joined = estimate()
    with patch.object(lone_stage, "join_frozen"):
        separate = estimate()
    # Below the first queries, keys and values nothing is trained, and nothing keeps their weights.
    attention, gated = 64 + 2 * 32, 2 * 128
    rows = 2 * attention + 3 * gated
    assert separate.activations - joined.activations == rows * 64 * 2
    assert separate.static == joined.static


class Sized(Nano):
    """A decoder that reads a length from its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        length = int(batch[0].max())
        return super().training_step((batch[0][:, :length], batch[1]), batch_idx)


class Locked(Nano):
    """A decoder that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Silent(Nano):
    """A decoder that returns no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Sized, r"test_own_modules.py:\d+ \('length = int\(batch\[0\].max\(\)\)'\)"),
        (Locked, "Locked cannot be copied"),
        (Silent, "returned no loss"),
    ],
)
def test_modules_that_cannot_be_traced_say_where(kind: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        estimate_module(kind(), (TOKENS, TOKENS), ParallelLayout(1), STEP, "cpu")
