"""Recomputation of parts of blocks in all or some layers keeps gradients and saves memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import Recomputation
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.layers.gradient_slot import GradientSlot, set_slot
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.budget import TrainingShape, estimate_memory
from lightning_megatron.plan.layout import ParallelLayout
from tests.live_memory import LiveMemory

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "max_seq_length": 64,
    "num_layers": 3,
    "hidden_size": 64,
    "num_heads": 4,
}
GROUPED_QUERY = {"num_kv_heads": 2, "ffn_hidden_size": 160}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, "aux_loss": 0.1}
CONFIGS = {
    "gpt2": GPTConfig.gpt2(**SIZES, hidden_dropout=0.1),
    # LayerNorm, because torch computes RMSNorm on CPUs by smaller operations, which keep more.
    "llama": GPTConfig.llama(**SIZES, **GROUPED_QUERY, norm="layernorm"),
    "geglu": GPTConfig.gpt2(**SIZES, **GROUPED_QUERY, activation="geglu", mlp_bias=False),
    "relu": GPTConfig.gpt2(**SIZES, activation="relu"),
    "experts": GPTConfig.llama(**SIZES, **GROUPED_QUERY, experts=EXPERTS),
}
SETTINGS = {
    "norms": Recomputation(("norms",)),
    "activations": Recomputation(("activations",)),
    "all cheap parts": Recomputation(("norms", "activations", "selective")),
    "two whole layers": Recomputation(("full",), layers=2),
    "inputs on the host": Recomputation(("full",), offload=True),
    "norms of the last layer": Recomputation(("norms",), layers=1, at="last"),
}


def gradients_of(model: GPT, settings: Any, autocast: bool = False) -> list[Tensor]:
    model.recompute = settings
    model.mesh.random.begin_microbatch(0, 0)
    tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = model(tokens, labels=tokens)
    return [losses, *torch.autograd.grad(losses.mean(), list(model.parameters()))]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_gradients_with_recomputation_have_the_same_bits(kind: str, autocast: bool) -> None:
    model = GPT(CONFIGS[kind], seed=1)
    model._owns_mesh = False
    model.train()
    expected_results = gradients_of(model, "none", autocast)
    for name, settings in SETTINGS.items():
        actual_results = gradients_of(model, settings, autocast)
        for number, (actual, expected) in enumerate(
            zip(actual_results, expected_results, strict=True)
        ):
            assert torch.equal(actual, expected), f"{name}: {number}"


@pytest.mark.parametrize("settings", list(SETTINGS))
@pytest.mark.parametrize("kind", ["gpt2", "llama", "geglu", "relu"])
def test_kept_and_peak_memory_equal_the_estimate(kind: str, settings: str) -> None:
    # The head needs the most memory.
    config = GPTConfig(**{**vars(CONFIGS[kind]), "hidden_dropout": 0.0, "vocab_size": 1024})
    torch.set_default_dtype(torch.bfloat16)
    model = GPT(config, seed=1)
    torch.set_default_dtype(torch.float32)
    shape = config.memory_shape()
    sizes = {"seq_length": 64, "microbatch_size": 4}
    measured, peaks, estimates = [], [], []
    for recompute in ("none", SETTINGS[settings]):
        model.recompute = recompute
        memory, tokens = LiveMemory(), torch.randint(0, 256, (4, 64))
        for parameter in model.parameters():
            slot = GradientSlot(torch.zeros_like(parameter), lambda: None)
            set_slot(parameter, slot)
            memory.leave_out([parameter, slot.gradient])
        # The first call fills the cache of rotary tables.
        model(tokens, labels=tokens)
        with memory:
            loss = model(tokens, labels=tokens).mean()
            measured.append(memory.now)
            loss.backward()
        peaks.append(memory.peak)
        training = TrainingShape(**sizes, recompute=recompute)
        estimates += estimate_memory(shape, ParallelLayout(1), training)
    # On the CPU the measured memory includes that of the host.
    measured[1] -= estimates[1].host
    peaks[1] -= estimates[1].host
    estimated = [estimate.activations + estimate.loss for estimate in estimates]
    estimated_saving = estimated[0] - estimated[1]
    if settings == "activations" and kind == "relu":
        assert measured[0] == measured[1]
    else:
        assert measured[1] < measured[0]
        # Both peaks are at the head, while all blocks hold their kept activations.
        assert estimates[0].moment == estimates[1].moment == "backward"
        assert measured[0] - measured[1] == pytest.approx(estimated_saving, rel=0.02)
    for peak, estimate in zip(peaks, estimates, strict=True):
        assert estimate.peak - estimate.static == pytest.approx(peak, rel=0.1)


def test_recomputed_layers_are_counted_from_the_start_or_end_of_each_chunk() -> None:
    first = Recomputation(("full",), layers=2)
    last = Recomputation(("norms", "activations"), layers=1, at="last")
    assert [first.parts_of(place, 4) for place in range(4)] == [("full",)] * 2 + [()] * 2
    assert [last.parts_of(place, 2) for place in range(2)] == [(), ("activations", "norms")]
    assert first.parts_of(0, 1) == ("full",)
    assert Recomputation.of(None).is_off
    assert Recomputation.of("none").parts_of(0, 1) == ()
    model = GPT(CONFIGS["gpt2"], seed=1)
    model.recompute = last
    flags = [model.layers[str(index)].mlp.recomputes_activation for index in range(3)]
    assert flags == [False, False, True]
    model.recompute = "full"
    assert not model.layers["2"].mlp.recomputes_activation


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "some",
            "must be none, selective, norms, activations, experts, expert_inputs, full_except_core, full",
        ),
        ({"parts": []}, "at least one part, and each once: it is empty"),
        ({"parts": ["norms", "norms"]}, "it is norms, norms"),
        ({"parts": ["full", "norms"]}, "must be full alone, or parts without it"),
        ({"parts": ["none", "norms"]}, "must be none alone"),
        ({"layers": 0}, "recompute.layers must be a whole number of at least 1"),
        ({"at": "middle"}, "recompute.at must be first"),
    ],
)
def test_illegal_settings_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ParallelPlanError, match=message):
        Recomputation.of(value)


def test_recomputation_of_norms_with_other_readers_is_refused() -> None:
    for settings in (
        {"norm_position": "post"},
        {"norm_position": "output"},
        {"parallel_residual": True},
    ):
        model = GPT(GPTConfig.gpt2(**SIZES, **settings), seed=1)
        with pytest.raises(UnsupportedError, match="recompute of norms needs norms before the"):
            model.recompute = "norms"
