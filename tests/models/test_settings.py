"""Settings and batches of GPT, of which recomputation changes nothing, and batches that are refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from tests.models.stages import join_tied_gradients, run_pipeline
from tests.oracles import assert_equal, assert_same_gradients, load_full_
from tests.refusals import check_refusals

B, S, V, D, LAYERS = 2, 8, 77, 16, 2
SIZES: dict[str, Any] = {"vocab_size": V, "max_seq_length": 12, "num_layers": LAYERS}
SIZES |= {"hidden_size": D, "num_heads": 4, "vocab_multiple": 1}
LLAMA: dict[str, Any] = SIZES | {"ffn_hidden_size": 24, "num_kv_heads": 2}
GEMMA: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 6, "tie_embeddings": True}

# The first row has padding before its tokens, the second row after them.
VALID = torch.tensor([[False] * 3 + [True] * 5, [True] * 5 + [False] * 3])
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


gpt2, llama = partial(GPTConfig.gpt2, **SIZES), partial(GPTConfig.llama, **LLAMA)
SCALED: dict[str, Any] = {"factor": 2.5, "original_length": 6}
LONG = {"kind": "longrope", **SCALED, "short_factors": (1.0, 1.5), "long_factors": (2.0, 3.0)}
FIRST: dict[str, Any] = {"sliding_window": 4, "window_layers": (True, False)}
ALIBI: dict[str, Any] = {"position": "alibi"}
SCALED_LOGITS = llama(
    norm_position="sandwich", norm_offset=1.0, residual_scale=0.3, logit_scale=0.5, logit_soft_cap=0.9
)  # fmt: skip
CASES = {
    "biases of qkv alone": Case(llama(qkv_bias=True)),
    "biases of the MLP alone": Case(llama(mlp_bias=True, activation="geglu")),
    "norms of heads": Case(llama(qk_norm=True), recompute="selective"),
    "offset, scale, geglu": Case(
        llama(**GEMMA, norm_offset=1.0, embedding_scale=4.3, activation="geglu_tanh", qk_norm=True, attention_scale=0.2)
    ),
    "parallel, partly rotary": Case(
        gpt2(parallel_residual=True, position="rotary", rotary_dim=2, activation="gelu", output_bias=False), recompute="full"
    ),
    "window of one layer, padding": Case(
        llama(sliding_window=4, window_layers=(False, True)), AttentionSpan(PADDED, positions=POSITIONS), "selective"
    ),
    "padding alone": Case(gpt2(tie_embeddings=False), AttentionSpan(PADDED, longest=5, restarts=False), "full"),
    "documents": Case(llama(rotary_dim=2, rotary_scaling={"kind": "yarn", **SCALED}), AttentionSpan(PACKED), "full"),
    "documents, learned, window": Case(gpt2(sliding_window=2), AttentionSpan(PACKED, longest=4)),
    "positions, longrope": Case(llama(rotary_scaling=LONG), AttentionSpan(positions=FAR)),
    "sinks, bounded scores, window, documents": Case(
        llama(**FIRST, attention_sinks=True, attention_soft_cap=0.7), AttentionSpan(PACKED), "selective"
    ),
    "norms before and after, bounded and scaled logits": Case(SCALED_LOGITS, recompute="full"),
    "norms of outputs and of all heads": Case(
        llama(norm_position="output", qk_norm=True, qk_norm_over="layer", residual_scale=0.7)
    ),
    "neighbours rotate, not in all layers": Case(
        llama(rotary_dim=2, rotary_interleaved=True, rotary_layers=(False, True)), AttentionSpan(PADDED, positions=POSITIONS)
    ),
    "angles of layers with a window": Case(
        llama(**FIRST, window_rotary_base=30.0, rotary_scaling={"kind": "linear", "factor": 2.0})
    ),
    "both directions, documents": Case(llama(sliding_window=2, causal=False), AttentionSpan(PACKED)),
    "scaled embeddings": Case(gpt2(embedding_scale=3.0, scales_vectors=True, tie_embeddings=False), embeds=True),
    "slopes, norm of the embedding, documents": Case(
        gpt2(**ALIBI, embedding_norm=True, alibi_bias_max=3.0, sliding_window=4), AttentionSpan(PACKED), "selective"
    ),
    "slopes, keys hidden without places": Case(
        gpt2(**ALIBI, alibi_skips_padding=True, bias=False), AttentionSpan(mask=KEYS), "full"
    ),
    "embeddings, window, keys hidden": Case(llama(sliding_window=3), AttentionSpan(mask=KEYS), embeds=True),
}  # fmt: skip


@contextmanager
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5


def draw_batch() -> tuple[Tensor, Tensor, Tensor]:
    tokens, labels = torch.randint(0, V, (2, B, S), generator=torch.Generator().manual_seed(3))
    labels[0, 2] = -100
    return tokens, labels, draw(B, S, D, seed=4)


@cache
def results_of_one_process(name: str) -> SimpleNamespace:
    """Return full weights, outputs and gradients of a case in one process, without recomputation."""
    case, (tokens, labels, embeddings) = CASES[name], draw_batch()
    model = GPT(case.config, seed=1)
    shapes = [(key, shard_spec_of(p).full_shape) for key, p in model.named_parameters()]
    weights = {key: draw(*shape, seed=i + 5) for i, (key, shape) in enumerate(shapes)}
    load_full_(model, weights)
    given = {"span": case.span, "embeddings": embeddings.requires_grad_() if case.embeds else None}
    given_tokens = None if case.embeds else tokens
    losses = model(given_tokens, labels, 0.1, **given)
    losses.backward(draw(B, S, seed=2))
    gradients = {
        key: torch.zeros_like(p) if p.grad is None else p.grad
        for key, p in model.named_parameters()
    }
    return SimpleNamespace(
        weights=weights, logits=model(given_tokens, **given).detach(), losses=losses.detach(), gradients=gradients,
        input_gradient=embeddings.grad,
    )  # fmt: skip


def check_case(name: str, mesh: ParallelMesh) -> None:
    """Compare a model in float64 with that of one process."""
    case, expected = CASES[name], results_of_one_process(name)
    label = f"{name} {mesh.layout} sp={mesh.sequence_parallel}"
    tokens, labels, embeddings = draw_batch()
    model = GPT(case.config, mesh, seed=1)
    model.recompute = case.recompute
    weights, gradients = dict(expected.weights), dict(expected.gradients)
    is_tied = case.config.tie_embeddings and mesh.pp.size > 1
    if is_tied:
        weights["head.weight"] = weights["embedding.word.weight"]
    load_full_(model, weights)
    given_tokens = None if case.embeds else tokens
    given_embeddings = embeddings.requires_grad_() if case.embeds else None
    inputs: dict[str, Any] = {"span": case.span, "embeddings": given_embeddings}
    if mesh.pp.size > 1:
        losses = run_pipeline(model, given_tokens, labels, draw(B, S, seed=2), **inputs)
    else:
        assert_equal(model(given_tokens, **inputs), expected.logits, f"{label}: logits")
        losses = model(given_tokens, labels, 0.1, **inputs)
        losses.backward(draw(B, S, seed=2))
    assert_equal(losses, expected.losses, f"{label}: losses")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if is_tied:
        join_tied_gradients(model, gradients)
    names = {key for key, _ in model.named_parameters()}
    assert_same_gradients(model, mesh, {key: gradients[key] for key in names}, label)
    if expected.input_gradient is not None and mesh.pp.is_first:
        assert embeddings.grad is not None, label
        assert_equal(embeddings.grad, expected.input_gradient, f"{label}: embeddings")


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].recompute != "none"])
def test_recomputation_of_every_setting_changes_nothing(name):
    with in_float64():
        check_case(name, ParallelMesh.single())


@pytest.mark.parametrize("loss_chunk", [None, 5, "forward"])
def test_losses_of_chunks_and_their_sums_have_the_gradients_of_stored_losses(loss_chunk):
    tokens, labels, _ = draw_batch()
    model = GPT(SCALED_LOGITS, seed=1).double()
    expected = model(tokens, labels, 0.1)
    model.loss_chunk = loss_chunk
    losses, total = model(tokens, labels, 0.1), model(tokens, labels, 0.1, sums=True)
    assert total.shape == ()
    assert_equal(losses, expected, "losses")
    assert_equal(total, expected.sum(), "sum")
    gradients = [
        torch.autograd.grad(2.0 * loss, list(model.parameters()))
        for loss in (expected.sum(), losses.sum(), total)
    ]
    for stored, chunked, summed in zip(*gradients, strict=True):
        assert_equal(chunked, stored, "gradient of losses")
        assert_equal(summed, stored, "gradient of the sum")


def test_invalid_batches_raise():
    tokens, _, embeddings = draw_batch()
    spans = (
        (AttentionSpan(positions=FAR[:, 1:]), "is (2, 7)"),
        (AttentionSpan(PACKED[:1]), "span.lengths must have a row for each of the 2"),
        (AttentionSpan(mask=KEYS[..., 1:]), "span.mask must have the shape (2 or 1"),
        (AttentionSpan(positions=FAR + 1), "[0, 12): an id is 12"),
    )
    cases: list[tuple[Any, str]] = [
        *(({"tokens": tokens, "span": span}, phrase) for span, phrase in spans),
        ({"tokens": tokens, "embeddings": embeddings.float()}, "both were given"),
        ((tokens.new_zeros(1, 13),), "seq_length (13) must not exceed max_seq_length (12)"),
        ((tokens.new_full((1, 4), V),), "[0, 77): an id is 77"),
    ]
    errors = (UnsupportedError, ParallelPlanError, IndexError)
    check_refusals(GPT(gpt2(), seed=1), cases, errors)


def test_bfloat16_losses_of_long_padded_rows_are_finite():
    config = GPTConfig.llama(**(SIZES | {"max_seq_length": 640}), qk_norm=True)
    model, tokens = GPT(config, seed=1).bfloat16(), torch.randint(0, V, (2, 640))
    losses = model(tokens, tokens, span=AttentionSpan(torch.tensor([[600, 40], [0, 640]])))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_copies_have_separate_parameters():
    model = GPT(GPTConfig.gpt2(**SIZES))
    copied = copy.deepcopy(model)
    for ours, theirs in zip(model.parameters(), copied.parameters(), strict=True):
        assert ours is not theirs
        assert shard_spec_of(ours) == shard_spec_of(theirs)
    tokens, labels, _ = draw_batch()
    assert_equal(copied(tokens, labels), model(tokens, labels), "losses")


# ---- half precision


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_half_precision_and_autocast_stay_close_to_float32(recompute):
    scale = {"qk_norm": True, "norm_offset": 1.0, "embedding_scale": 5.7, "sliding_window": 5}
    tokens = draw_batch()[0]
    for config in (GPTConfig.gpt2(**SIZES), GPTConfig.llama(**LLAMA, **scale)):
        expected = GPT(config, seed=1)(tokens, tokens)
        for dtype, is_autocast in ((torch.bfloat16, 0), (torch.float16, 0), (torch.float32, 1)):
            model = GPT(config, seed=1).to(dtype)
            model.recompute = recompute
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(is_autocast)):
                losses = model(tokens, tokens)
                assert is_autocast or model(tokens).dtype == model.boundary(tokens)[1] == dtype
            losses.mean().backward()
            assert losses.dtype == torch.float32
            torch.testing.assert_close(losses, expected, rtol=0.02, atol=0.02)
            assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())
