"""On a GPU, chunks of the loss, parts that are computed again, and inputs on the host."""

from __future__ import annotations

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
    """Let the same step have the same bits: cuDNN's backward pass of attention does not."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def built() -> GPT:
    with torch.device("cuda"):
        return GPT(CONFIG, seed=1).bfloat16()


def run(model: GPT, recompute: Any, loss_chunk: int | None = None) -> tuple[list[Tensor], int]:
    """Return loss and gradients of two microbatches in flight, and the bytes kept for backward."""
    model.recompute = recompute
    model.loss_chunk = loss_chunk
    model.zero_grad()
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 2, LENGTH), device="cuda", generator=seeded())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    losses = [model(one, labels=one).mean() for one in tokens]
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    for loss in losses:
        loss.backward()
    return [*(one.detach() for one in losses), *(one.grad for one in model.parameters())], kept


def seeded() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(3)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("loss_chunk", [None, 512])
def test_gradients_are_the_same_bits_and_fewer_bytes_are_kept(loss_chunk: int | None) -> None:
    model = built()
    run(model, "none", loss_chunk)
    expected, most = run(model, "none", loss_chunk)
    stream = 2 * LENGTH * CONFIG.hidden_size * 2
    kept = {}
    for name, settings in {
        "once more": Recomputation(("none",)),
        "cheap": Recomputation(("norms", "activations")),
        "some": Recomputation(("full",), layers=2),
        "full": Recomputation(("full",)),
        "host": Recomputation(("full",), offload=True),
    }.items():
        found, kept[name] = run(model, settings, loss_chunk)
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(one, other), f"{name}: {number}"
    assert most > kept["cheap"] > kept["full"] > kept["host"]
    assert most > kept["some"] > kept["full"]
    # Of the inputs of both microbatches, two are still on the device.
    saved = (2 * CONFIG.num_layers - 2) * stream
    assert kept["full"] - kept["host"] == pytest.approx(saved, rel=0.05)


def test_chunks_of_the_loss_equal_stored_logits() -> None:
    model = built()
    expected, stored = run(model, "none")
    found, chunked = run(model, "none", 300)
    logits = 2 * 2 * LENGTH * 32_000 * 2
    assert stored - chunked == pytest.approx(logits, rel=0.05)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_equal(one.float(), other.float(), f"{number}", tolerance=2e-2)
