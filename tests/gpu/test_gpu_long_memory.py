"""Tests of chunked losses, recomputation, and inputs stored on the host, with their GPU memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import Recomputation
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from tests.oracles import assert_equal

pytestmark = pytest.mark.gpu

LENGTH = 2048
CONFIG = GPTConfig.llama(
    vocab_size=32_000, max_seq_length=LENGTH, num_layers=6, hidden_size=1024, num_heads=8,
    num_kv_heads=4, ffn_hidden_size=2816,
)  # fmt: skip


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make equal steps have equal bits, unlike cuDNN's backward pass of attention."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def build_gpt() -> GPT:
    with torch.device("cuda"):
        return GPT(CONFIG, seed=1).bfloat16()


def run(model: GPT, recompute: Any, loss_chunk: int | None = None) -> tuple[list[Tensor], int]:
    """Return losses and gradients of two microbatches, and the bytes stored for backward passes."""
    model.recompute = recompute
    model.loss_chunk = loss_chunk
    model.zero_grad()
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 2, LENGTH), device="cuda", generator=seeded())
    # Garbage of earlier tests must not be freed during the measurement.
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    losses = [model(sequence, labels=sequence).mean() for sequence in tokens]
    torch.cuda.synchronize()
    num_stored = torch.cuda.memory_allocated() - before
    for loss in losses:
        loss.backward()
    return [
        *(loss.detach() for loss in losses),
        *(parameter.grad for parameter in model.parameters()),
    ], num_stored


def seeded() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(3)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("loss_chunk", [None, 512])
def test_recomputation_keeps_the_bits_of_gradients_and_stores_fewer_bytes(loss_chunk):
    model = build_gpt()
    run(model, "none", loss_chunk)
    expected, most = run(model, "none", loss_chunk)
    stream = 2 * LENGTH * CONFIG.hidden_size * 2
    stored = {}
    for name, settings in {
        "once more": Recomputation(("none",)),
        "cheap": Recomputation(("norms", "activations")),
        "some": Recomputation(("full",), layers=2),
        "full": Recomputation(("full",)),
        "host": Recomputation(("full",), offload=True),
    }.items():
        tensors, stored[name] = run(model, settings, loss_chunk)
        for number, (actual, expected_tensor) in enumerate(zip(tensors, expected, strict=True)):
            assert torch.equal(actual, expected_tensor), f"{name}: {number}"
    assert most > stored["cheap"] > stored["full"] > stored["host"]
    assert most > stored["some"] > stored["full"]
    # Two of the inputs of both microbatches are still on the device.
    saved = (2 * CONFIG.num_layers - 2) * stream
    assert stored["full"] - stored["host"] == pytest.approx(saved, rel=0.05)


def test_a_chunked_loss_equals_stored_logits_with_less_memory():
    model = build_gpt()
    expected, stored = run(model, "none")
    tensors, chunked = run(model, "none", 300)
    logits = 2 * 2 * LENGTH * 32_000 * 2
    assert stored - chunked == pytest.approx(logits, rel=0.05)
    for number, (actual, expected_tensor) in enumerate(zip(tensors, expected, strict=True)):
        assert_equal(actual.float(), expected_tensor.float(), f"{number}", tolerance=2e-2)
