"""Recomputation of parts of blocks in all or some layers, or of all but the attention core, keeps
gradients.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import Recomputation
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention import parts as attention_parts
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from tests.refusals import check_refusals

S, LAYERS = 32, 3
SIZES: dict[str, Any] = {"vocab_size": 256, "max_seq_length": S, "num_layers": LAYERS}
SIZES |= {"hidden_size": 64, "num_heads": 4}
GROUPED: dict[str, Any] = {**SIZES, "num_kv_heads": 2, "ffn_hidden_size": 160}
EXPERTS: dict[str, Any] = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, "aux_loss": 0.1}
LATENT = {"key_value_rank": 12, "query_rank": 20, "plain_dim": 6, "rotary_dim": 4, "value_dim": 8}
CONFIGS = {
    "gpt2": GPTConfig.gpt2(**SIZES, hidden_dropout=0.1),
    "llama": GPTConfig.llama(**GROUPED),
    "geglu": GPTConfig.gpt2(**GROUPED, activation="geglu", mlp_bias=False),
    "relu": GPTConfig.gpt2(**SIZES, activation="relu"),
    "experts": GPTConfig.llama(**GROUPED, experts=EXPERTS),
}
SETTINGS = (
    Recomputation(("norms", "activations", "selective")),
    Recomputation(("full",), layers=2),
    Recomputation(("full",), offload=True),
    Recomputation(("norms",), layers=1, at="last"),
)
#: Models of which all but the attention core is recomputed.
WITHOUT_CORE = {
    "gpt2": CONFIGS["gpt2"],
    "post-norm": GPTConfig.gpt2(**SIZES, norm_position="post"),
    "parallel": GPTConfig.gpt2(**SIZES, parallel_residual=True),
    "window, sinks": GPTConfig.llama(**GROUPED, qk_norm=True, attention_sinks=True, sliding_window=5),
    "soft cap": GPTConfig.llama(**GROUPED, attention_soft_cap=0.5),
    "alibi": GPTConfig.gpt2(**SIZES, position="alibi"),
    "latent, experts": GPTConfig.llama(**SIZES, ffn_hidden_size=48, latent_attention=LATENT, experts=EXPERTS),
}  # fmt: skip


def build_model(config: GPTConfig, mesh: ParallelMesh | None = None) -> GPT:
    model = GPT(config, mesh, seed=1).double()
    model._owns_mesh = False
    return model.train()


def gradients_of(model: GPT, settings: Any, packed: bool = False) -> list[Tensor]:
    """Return losses and gradients of two microbatches, both forward passes first."""
    model.recompute = settings
    results = []
    for number in range(2):
        model.mesh.random.begin_microbatch(0, number)
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 256, (2, S), generator=generator)
        span = AttentionSpan.packed([[20, 5], [3, 29]], S) if packed else None
        results.append(model(tokens, labels=tokens, span=span))
    for losses in tuple(results):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(losses.mean(), parameters, allow_unused=True)
        results += [gradient for gradient in gradients if gradient is not None]
    return results


@pytest.mark.parametrize("kind", CONFIGS)
def test_gradients_with_recomputation_have_the_same_bits(kind):
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model = build_model(CONFIGS[kind]).float()
            expected = gradients_of(model, "none")
            for settings in SETTINGS:
                actual = gradients_of(model, settings)
                assert all(map(torch.equal, actual, expected)), f"{settings}, {autocast}"


@pytest.mark.parametrize("kind", WITHOUT_CORE)
def test_gradients_without_recomputed_cores_equal_those_of_kept_activations(kind):
    model = build_model(WITHOUT_CORE[kind])
    for options in ({"layers": 1}, {"offload": True}):
        packed = kind == "window, sinks"
        settings = Recomputation(("full_except_core",), **options)
        actual, expected = (gradients_of(model, s, packed) for s in (settings, "none"))
        for pair in zip(actual, expected, strict=True):
            torch.testing.assert_close(*pair, rtol=0, atol=1e-12)


def test_the_core_runs_forward_once_in_training(monkeypatch):
    calls: Counter[str] = Counter()
    for name in ("forward_part", "backward_part"):
        function = getattr(attention_parts, name)

        def call(*args: Any, name: str = name, function: Any = function, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(attention_parts, name, call)
    model = build_model(WITHOUT_CORE["window, sinks"])
    gradients_of(model, "full_except_core")
    assert calls == {"forward_part": 2 * LAYERS, "backward_part": 2 * LAYERS}
    with torch.no_grad():
        model(torch.zeros(1, S, dtype=torch.long))
    assert calls["forward_part"] == 2 * LAYERS, "nothing is kept without gradients"


def test_recomputed_layers_are_counted_from_the_start_or_end_of_each_chunk():
    first = Recomputation(("full",), layers=2)
    last = Recomputation(("norms", "activations"), layers=1, at="last")
    assert [first.parts_of(place, 4) for place in range(4)] == [("full",)] * 2 + [()] * 2
    assert [last.parts_of(place, 2) for place in range(2)] == [(), ("activations", "norms")]
    model = GPT(CONFIGS["gpt2"], seed=1)
    model.recompute = last
    flags = [model.layers[str(index)].mlp.recomputes_activation for index in range(3)]
    assert flags == [False, False, True]


def test_settings_that_cannot_be_followed_are_refused():
    values: list[tuple[Any, str]] = [
        (
            "some",
            "must be none, selective, norms, activations, experts, expert_inputs, full_except",
        ),
        ({"parts": []}, "at least one part, and each once: it is empty"),
        ({"parts": ["norms", "norms"]}, "it is norms, norms"),
        ({"parts": ["full", "norms"]}, "must be full alone, or parts without it"),
        ({"layers": 0}, "recompute.layers must be a whole number of at least 1"),
    ]
    check_refusals(Recomputation.of, [((value,), phrase) for value, phrase in values])

    def build(parts: str, compiled: bool = False, **settings: Any) -> None:
        model = GPT(GPTConfig.gpt2(**SIZES, **settings), seed=1)
        if compiled:
            model.layers["1"].compile()
        model.recompute = parts

    norms, core = {"parts": "norms"}, {"parts": "full_except_core"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({**norms, "norm_position": "post"}, "recompute of norms needs a norm before each"),
        ({**norms, "parallel_residual": True}, "recompute of norms needs a norm before each"),
        ({**core, "attention_dropout": 0.1}, "layer 1 drops 0.1 of its weights. Use"),
        ({**core, "compiled": True}, "layer 2 is compiled. Use full"),
    ]
    check_refusals(build, cases)
