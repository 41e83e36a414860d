"""GPT equals the formulas in plain torch for every setting and batch, in every layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from tests.models.plain_gpt import PlainGPT
from tests.models.stages import join_tied_gradients, run_pipeline
from tests.oracles import assert_equal, assert_same_gradients, load_full_
from tests.world import run_world

B, S, V, D, LAYERS = 2, 8, 77, 16, 2
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "max_seq_length": 12,
    "num_layers": LAYERS,
    "hidden_size": D,
    "num_heads": 4,
    "vocab_multiple": 1,
}
LLAMA: dict[str, Any] = SIZES | {"ffn_hidden_size": 24, "num_kv_heads": 2}

# The first row has padding before its tokens, the second row after them.
VALID = torch.tensor(
    [[False, False, False, True, True, True, True, True], [True] * 5 + [False] * 3]
)
POSITIONS = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 0, 0]])
PADDED = torch.tensor([[3, 5], [5, 0]])
KEYS = VALID[:, None, None]
# Three documents in the first row; two in the second, of which the rest of the row is the second.
PACKED = torch.tensor([[3, 4, 1], [4, 0, 0]])
FAR = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 11], [4, 5, 6, 7, 8, 9, 10, 11]])


@dataclass(frozen=True)
class Case:
    """Settings and a kind of batch."""

    config: GPTConfig
    span: AttentionSpan | None = None
    recompute: str = "none"
    embeds: bool = False


SCALED = {"factor": 2.5, "original_length": 6}
CASES = {
    "biases of qkv alone": Case(GPTConfig.llama(**LLAMA, qkv_bias=True)),
    "biases but of qkv": Case(GPTConfig.gpt2(**LLAMA, qkv_bias=False, activation="relu")),
    "biases of the MLP alone": Case(GPTConfig.llama(**LLAMA, mlp_bias=True, activation="geglu")),
    "norms of heads": Case(GPTConfig.llama(**LLAMA, qk_norm=True), recompute="selective"),
    "offset, scale, geglu": Case(
        GPTConfig.llama(
            **SIZES
            | {"num_kv_heads": 1, "head_dim": 6, "ffn_hidden_size": 24, "tie_embeddings": True},
            norm_offset=1.0,
            embedding_scale=4.3,
            activation="geglu_tanh",
            qk_norm=True,
            attention_scale=0.2,
        )
    ),  # fmt: skip
    "parallel, partly rotary": Case(
        GPTConfig.gpt2(
            **SIZES,
            parallel_residual=True,
            position="rotary",
            rotary_dim=2,
            activation="gelu",
            output_bias=False,
        ),
        recompute="full",
    ),
    "window": Case(GPTConfig.llama(**LLAMA, sliding_window=3)),
    "window of one layer, padding": Case(
        GPTConfig.llama(**LLAMA, sliding_window=4, window_layers=(False, True)),
        AttentionSpan(PADDED, positions=POSITIONS),
        recompute="selective",
    ),
    "padding, learned": Case(
        GPTConfig.gpt2(**SIZES), AttentionSpan(mask=KEYS, positions=POSITIONS)
    ),
    "padding alone": Case(
        GPTConfig.gpt2(**SIZES, tie_embeddings=False),
        AttentionSpan(PADDED, longest=5, restarts=False),
        recompute="full",
    ),
    "documents": Case(
        GPTConfig.llama(**LLAMA, rotary_dim=2, rotary_scaling={"kind": "yarn", **SCALED}),
        AttentionSpan(PACKED),
        recompute="full",
    ),
    "documents, learned, window": Case(
        GPTConfig.gpt2(**SIZES, sliding_window=2), AttentionSpan(PACKED, longest=4)
    ),
    "positions, longrope": Case(
        GPTConfig.llama(
            **LLAMA,
            rotary_scaling={
                "kind": "longrope",
                **SCALED,
                "short_factors": (1.0, 1.5),
                "long_factors": (2.0, 3.0),
            },
        ),
        AttentionSpan(positions=FAR),
    ),
    "sinks, bounded scores, window, documents": Case(
        GPTConfig.llama(
            **LLAMA,
            sliding_window=3,
            window_layers=(True, False),
            attention_sinks=True,
            attention_soft_cap=0.7,
        ),
        AttentionSpan(PACKED),
        recompute="selective",
    ),
    "norms before and after, bounded and scaled logits": Case(
        GPTConfig.llama(
            **LLAMA,
            norm_position="sandwich",
            norm_offset=1.0,
            residual_scale=0.3,
            logit_scale=0.5,
            logit_soft_cap=0.9,
        ),
        recompute="full",
    ),
    "norms of outputs and of all heads": Case(
        GPTConfig.llama(
            **LLAMA, norm_position="output", qk_norm=True, qk_norm_over="layer", residual_scale=0.7
        )
    ),
    "neighbours rotate, not in all layers": Case(
        GPTConfig.llama(
            **LLAMA, rotary_dim=2, rotary_interleaved=True, rotary_layers=(False, True)
        ),
        AttentionSpan(PADDED, positions=POSITIONS),
    ),
    "angles of layers with a window, vectors scaled": Case(
        GPTConfig.llama(
            **LLAMA,
            sliding_window=4,
            window_layers=(True, False),
            window_rotary_base=30.0,
            rotary_scaling={"kind": "linear", "factor": 2.0},
            embedding_scale=1.5,
            scales_vectors=True,
        ),
        embeds=True,
    ),
    "both directions, window of one layer, documents": Case(
        GPTConfig.llama(**LLAMA, causal=False, sliding_window=2, window_layers=(True, False)),
        AttentionSpan(PACKED),
    ),
    "embeddings": Case(
        GPTConfig.gpt2(**SIZES, embedding_scale=3.0, tie_embeddings=False), embeds=True
    ),
    "slopes, norm of the embedding, documents": Case(
        GPTConfig.gpt2(
            **SIZES, position="alibi", embedding_norm=True, alibi_bias_max=3.0, sliding_window=4
        ),
        AttentionSpan(PACKED),
        recompute="selective",
    ),
    "slopes, keys hidden without places": Case(
        GPTConfig.gpt2(**SIZES, position="alibi", alibi_skips_padding=True, bias=False),
        AttentionSpan(mask=KEYS),
        recompute="full",
    ),
    "embeddings, window, keys hidden": Case(
        GPTConfig.llama(**LLAMA, sliding_window=3), AttentionSpan(mask=KEYS), embeds=True
    ),
}
LAYOUTS = [
    ({"tp": 1}, False),
    ({"tp": 2}, False),
    ({"tp": 2}, True),
    ({"tp": 4}, False),
    ({"tp": 4}, True),
    ({"pp": 2}, False),
    ({"tp": 2, "pp": 2}, True),
]


def draw(*shape: int, seed: int) -> Tensor:
    return (
        torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5
    )


def draw_batch() -> tuple[Tensor, Tensor, Tensor]:
    tokens, labels = torch.randint(0, V, (2, B, S), generator=torch.Generator().manual_seed(3))
    labels[0, 2] = -100
    return tokens, labels, draw(B, S, D, seed=4)


@dataclass(frozen=True)
class PlainResults:
    """Outputs and gradients of the plain model."""

    weights: dict[str, Tensor]
    logits: Tensor
    losses: Tensor
    gradients: dict[str, Tensor]
    input_gradient: Tensor | None


@cache
def results_of_plain_model(name: str) -> PlainResults:
    case, (tokens, labels, embeddings) = CASES[name], draw_batch()
    shapes = {
        key: shard_spec_of(p).full_shape for key, p in GPT(case.config, seed=1).named_parameters()
    }
    weights = {
        key: draw(*shape, seed=i + 5).requires_grad_()
        for i, (key, shape) in enumerate(shapes.items())
    }
    inputs = embeddings.requires_grad_() if case.embeds else None
    plain_model = PlainGPT(case.config, weights, case.span)
    losses = plain_model.losses(tokens, labels, inputs)
    losses.backward(draw(B, S, seed=2))
    gradients = {
        key: torch.zeros_like(w) if w.grad is None else w.grad for key, w in weights.items()
    }
    logits = plain_model.logits(tokens, inputs).detach()
    return PlainResults(
        weights, logits, losses.detach(), gradients, None if inputs is None else inputs.grad
    )


def check_case(name: str, mesh: ParallelMesh) -> None:
    case, expected, case_name = (
        CASES[name],
        results_of_plain_model(name),
        f"{name} {mesh.layout} sp={mesh.sequence_parallel}",
    )
    tokens, labels, embeddings = draw_batch()
    model = GPT(case.config, mesh, seed=1)
    model.recompute = case.recompute
    weights, gradients = dict(expected.weights), dict(expected.gradients)
    if case.config.tie_embeddings and mesh.pp.size > 1:
        weights["head.weight"] = weights["embedding.word.weight"]
    load_full_(model, weights)
    given_tokens = None if case.embeds else tokens
    inputs: dict[str, Any] = {
        "span": case.span,
        "embeddings": embeddings.requires_grad_() if case.embeds else None,
    }
    if mesh.pp.size > 1:
        losses = run_pipeline(model, given_tokens, labels, draw(B, S, seed=2), **inputs)
    else:
        assert_equal(model(given_tokens, **inputs), expected.logits, f"{case_name}: logits")
        losses = model(given_tokens, labels, 0.1, **inputs)
        losses.backward(draw(B, S, seed=2))
    assert_equal(losses, expected.losses, f"{case_name}: losses")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if case.config.tie_embeddings and mesh.pp.size > 1:
        join_tied_gradients(model, gradients)
    names = {key for key, _ in model.named_parameters()}
    assert_same_gradients(model, mesh, {key: gradients[key] for key in names}, case_name)
    if expected.input_gradient is not None and mesh.pp.is_first:
        assert embeddings.grad is not None, case_name
        assert_equal(
            embeddings.grad, expected.input_gradient, f"{case_name}: gradient of the embeddings"
        )


def check_layouts(rank: int, size: int) -> None:
    torch.set_default_dtype(torch.float64)
    for sizes, sequence_parallel in LAYOUTS:
        mesh = ParallelMesh.create(
            ParallelLayout(world_size=size, **sizes), seed=5, sequence_parallel=sequence_parallel
        )
        for name in CASES:
            check_case(name, mesh)
        mesh.destroy()


@pytest.mark.parametrize("name", list(CASES))
def test_every_setting_equals_the_plain_model_in_one_process(name: str) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        check_case(name, ParallelMesh.single())
    finally:
        torch.set_default_dtype(before)


def test_every_setting_equals_the_plain_model_in_every_layout() -> None:
    run_world(check_layouts, 4)


def test_chunked_losses_use_the_scale_and_soft_cap_of_logits() -> None:
    config = CASES["norms before and after, bounded and scaled logits"].config
    tokens, labels, _ = draw_batch()
    model = GPT(config, seed=1).double()
    results = []
    for chunk in (None, 5):
        model.loss_chunk = chunk
        model.zero_grad()
        losses = model(tokens, labels, 0.1)
        losses.sum().backward()
        results.append([losses.detach(), *(parameter.grad for parameter in model.parameters())])
    for stored, chunked in zip(*results, strict=True):
        assert_equal(chunked, stored, "chunks")


@pytest.mark.parametrize("loss_chunk", [None, 5, "forward"])
def test_summed_losses_have_the_sum_and_gradients_of_the_losses(loss_chunk: Any) -> None:
    config = CASES["norms before and after, bounded and scaled logits"].config
    tokens, labels, _ = draw_batch()
    model = GPT(config, seed=1).double()
    expected_total = model(tokens, labels, 0.1).sum()
    model.loss_chunk = loss_chunk
    total = model(tokens, labels, 0.1, sums=True)
    assert total.shape == ()
    assert_equal(total, expected_total, "sum")
    pairs = zip(
        *(
            torch.autograd.grad(2.0 * loss, list(model.parameters()))
            for loss in (total, expected_total)
        ),
        strict=True,
    )
    for actual, expected in pairs:
        assert_equal(actual, expected, "gradient")
    names, node = [], model(tokens, labels, 0.1, sums=True).grad_fn
    while node is not None:
        names.append(type(node).__name__)
        node = node.next_functions[0][0] if node.next_functions else None
    assert ("_SummedCrossEntropyBackward" in names) == (loss_chunk == "forward")


def test_norm_weights_with_an_offset_start_at_zero() -> None:
    config = CASES["offset, scale, geglu"].config
    weights = dict(GPT(config, seed=1).named_parameters())
    for name in (
        "final_norm.weight",
        "layers.0.mlp_norm.weight",
        "layers.1.attention.key_norm.weight",
    ):
        assert torch.equal(weights[name], torch.zeros_like(weights[name])), name


def test_invalid_batches_raise() -> None:
    model, (tokens, _, embeddings) = GPT(GPTConfig.gpt2(**SIZES), seed=1), draw_batch()
    with pytest.raises(UnsupportedError, match="tokens or embeddings, .*: both were given"):
        model(tokens, embeddings=embeddings.float())
    with pytest.raises(UnsupportedError, match="tokens or embeddings, .*: neither were given"):
        model(None)
    with pytest.raises(
        ParallelPlanError,
        match=r"span.positions must have the shape of the tokens \(2, 8\).* is \(2, 7\)",
    ):
        model(tokens, span=AttentionSpan(positions=FAR[:, 1:]))
    with pytest.raises(ParallelPlanError, match=r"span.lengths must have a row for each of the 2"):
        model(tokens, span=AttentionSpan(PACKED[:1]))
    with pytest.raises(ParallelPlanError, match=r"span.mask must have the shape \(2 or 1, 1, 8 or"):
        model(tokens, span=AttentionSpan(mask=KEYS[..., 1:]))
    with pytest.raises(IndexError, match=r"\[0, 12\): an id is 12"):
        model(tokens, span=AttentionSpan(positions=FAR + 1))


def test_bfloat16_losses_of_long_padded_rows_are_finite() -> None:
    config = GPTConfig.llama(**(SIZES | {"max_seq_length": 640}), qk_norm=True)
    model = GPT(config, seed=1).bfloat16()
    tokens = torch.randint(0, V, (2, 640))
    losses = model(tokens, tokens, span=AttentionSpan(torch.tensor([[600, 40], [0, 640]])))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
