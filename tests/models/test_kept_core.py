"""Recomputation of blocks without their attention core gives the gradients of kept activations."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import Recomputation
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers import attention_parts
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.context_parallel import ring
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.budget import TrainingShape, estimate_memory
from lightning_megatron.plan.context_transport import ContextLinks
from lightning_megatron.plan.layout import ParallelLayout
from tests.live_memory import LiveMemory
from tests.world import run_world

S, LAYERS = 32, 3
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "max_seq_length": S,
    "num_layers": LAYERS,
    "hidden_size": 64,
    "num_heads": 4,
}
GROUPED_QUERY = {"num_kv_heads": 2, "ffn_hidden_size": 160}
CONFIGS = {
    "gpt2": GPTConfig.gpt2(**SIZES, hidden_dropout=0.1),
    "post-norm": GPTConfig.gpt2(**SIZES, norm_position="post"),
    "parallel": GPTConfig.gpt2(**SIZES, parallel_residual=True),
    "window, sinks": GPTConfig.llama(
        **SIZES, **GROUPED_QUERY, qk_norm=True, attention_sinks=True, sliding_window=5
    ),
    "soft cap": GPTConfig.llama(**SIZES, **GROUPED_QUERY, attention_soft_cap=0.5),
    "alibi": GPTConfig.gpt2(**SIZES, position="alibi"),
    "latent, experts": GPTConfig.llama(
        **SIZES,
        ffn_hidden_size=48,
        latent_attention={
            **{"key_value_rank": 12, "query_rank": 20},
            **{"plain_dim": 6, "rotary_dim": 4, "value_dim": 8},
        },
        experts={"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, "aux_loss": 0.1},
    ),
}
SETTINGS = {
    "all layers": Recomputation(("full_except_core",)),
    "one layer": Recomputation(("full_except_core",), layers=1),
    "inputs on the host": Recomputation(("full_except_core",), offload=True),
}


def build_model(config: GPTConfig, mesh: ParallelMesh | None = None) -> GPT:
    model = GPT(config, mesh, seed=1).double()
    model._owns_mesh = False
    return model.train()


def gradients_of(model: GPT, settings: Any, packed: bool = False) -> list[Tensor]:
    """Return losses and gradients of two microbatches, both forward passes first."""
    model.recompute = settings
    losses_of_microbatches = []
    for number in range(2):
        model.mesh.random.begin_microbatch(0, number)
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 256, (2, S), generator=generator)
        span = AttentionSpan.packed([[20, 5], [3, 29]], S) if packed else None
        losses_of_microbatches.append(model(tokens, labels=tokens, span=span))
    gradients = [
        torch.autograd.grad(losses.mean(), list(model.parameters()), allow_unused=True)
        for losses in losses_of_microbatches
    ]
    return [
        *losses_of_microbatches,
        *(
            gradient
            for of_microbatch in gradients
            for gradient in of_microbatch
            if gradient is not None
        ),
    ]


@pytest.mark.parametrize("settings", list(SETTINGS))
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_gradients_equal_those_of_kept_activations(kind: str, settings: str) -> None:
    model = build_model(CONFIGS[kind])
    expected_results = gradients_of(model, "none")
    actual_results = gradients_of(model, SETTINGS[settings])
    for actual, expected in zip(actual_results, expected_results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_gradients_of_packed_rows_equal_those_of_kept_activations() -> None:
    model = build_model(CONFIGS["window, sinks"])
    expected_results = gradients_of(model, "none", packed=True)
    actual_results = gradients_of(model, "full_except_core", packed=True)
    for actual, expected in zip(actual_results, expected_results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def count_calls(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, calls: Counter[str]
) -> None:
    function = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, call)


def test_the_core_runs_forward_once_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    for name in ("forward_part", "backward_part"):
        count_calls(monkeypatch, attention_parts, name, calls)
    model = build_model(CONFIGS["window, sinks"])
    gradients_of(model, "full_except_core")
    assert calls == {"forward_part": 2 * LAYERS, "backward_part": 2 * LAYERS}
    with torch.no_grad():
        model(torch.zeros(1, S, dtype=torch.long))
    assert calls["forward_part"] == 2 * LAYERS, "nothing is kept without gradients"


def test_two_backward_passes_give_the_same_gradients() -> None:
    model = build_model(CONFIGS["soft cap"])
    model.recompute = "full_except_core"
    tokens = torch.arange(S)[None]
    loss = model(tokens, labels=tokens).mean()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_memory_kept_for_cores_equals_the_estimate() -> None:
    config = GPTConfig.llama(**SIZES, **GROUPED_QUERY, norm="layernorm")
    torch.set_default_dtype(torch.bfloat16)
    model = GPT(config, seed=1)
    torch.set_default_dtype(torch.float32)
    model._owns_mesh = False
    tokens = torch.randint(0, 256, (4, S))
    measured, estimates = [], []
    for recompute in ("full", "full_except_core"):
        model.recompute = recompute
        memory = LiveMemory()
        memory.leave_out(list(model.parameters()))
        # The first call fills the cache of rotary tables.
        model(tokens, labels=tokens)
        with memory:
            loss = model(tokens, labels=tokens).mean()
            measured.append(memory.now)
            loss.backward()
        training = TrainingShape(seq_length=S, microbatch_size=4, recompute=recompute)
        estimates += estimate_memory(config.memory_shape(), ParallelLayout(1), training)
        model.zero_grad()
    estimated = [estimate.activations + estimate.loss for estimate in estimates]
    bytes_of_cores = LAYERS * 4 * S * (64 * 2 + 4 * 4)
    assert measured[1] - measured[0] == bytes_of_cores
    assert estimated[1] - estimated[0] == bytes_of_cores


def _compare_with_context_parallelism(
    rank: int, size: int, transport: str
) -> tuple[list[bool], int, int]:
    links = ContextLinks(transport)  # type: ignore[arg-type]
    mesh = ParallelMesh.create(ParallelLayout(size, cp=size), context=links)
    calls: Counter[str] = Counter()
    try:
        model = build_model(
            CONFIGS["window, sinks" if transport == "all_to_all" else "soft cap"], mesh
        )
        expected_results = gradients_of(model, "none", packed=True)
        with pytest.MonkeyPatch.context() as monkeypatch:
            count_calls(monkeypatch, ring, "_mixed", calls)
            gradients_of(model, "full", packed=True)
            num_with_full = calls["_mixed"]
            actual_results = gradients_of(model, "full_except_core", packed=True)
        are_close = [
            torch.allclose(actual, expected, rtol=0, atol=1e-12)
            for actual, expected in zip(actual_results, expected_results, strict=True)
        ]
        return are_close, num_with_full, calls["_mixed"] - num_with_full
    finally:
        mesh.destroy()


@pytest.mark.parametrize("transport", ["ring", "all_gather", "all_to_all"])
def test_context_parallel_recomputation_without_cores_sends_keys_less_often(transport: str) -> None:
    for are_close, num_with_full, num_without_core in run_world(
        _compare_with_context_parallelism, 2, transport
    ):
        assert all(are_close)
        assert (num_with_full, num_without_core) == (
            (0, 0) if transport == "all_to_all" else (4 * LAYERS, 2 * LAYERS)
        )


def test_layers_whose_core_cannot_be_kept_raise() -> None:
    model = GPT(GPTConfig.gpt2(**SIZES, attention_dropout=0.1), seed=1)
    with pytest.raises(UnsupportedError, match=r"layer 1 drops 0\.1 of its weights\. Use full"):
        model.recompute = "full_except_core"
    model = GPT(CONFIGS["gpt2"], seed=1)
    model.layers["1"].compile()
    with pytest.raises(UnsupportedError, match="layer 2 is compiled. Use full"):
        model.recompute = "full_except_core"
    with pytest.raises(ParallelPlanError, match="must be full_except_core alone"):
        Recomputation(("norms", "full_except_core"))
