"""Models run in pieces of segments compute the same bits as complete models."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from lightning_megatron.graphs.model_segments import chunk_segments
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.models.encoder_rows import EncoderInput
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.cuda_graphs import SegmentScope
from lightning_megatron.plan.recomputation import Recompute
from tests.graphs.pieces import PieceRunner
from tests.models.flash_stand_in import flash_stand_in, padded_on_the_right

V, S = 40, 8
SIZES: dict[str, Any] = {
    "vocab_size": V, "max_seq_length": S, "num_layers": 2, "hidden_size": 16, "num_heads": 4,
    "hidden_dropout": 0.3, "attention_dropout": 0.3,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}
LOSSES = EXPERTS | {"aux_loss": 0.3, "z_loss": 0.01}
SHARED = EXPERTS | {"shared_ffn_hidden_size": 8, "capacity_factor": 0.8}
DENSE = {
    "gpt2": GPTConfig.gpt2(**SIZES),
    "gpt2 parallel": GPTConfig.gpt2(**SIZES, parallel_residual=True),
    "llama": GPTConfig.llama(**SIZES, num_kv_heads=2),
    "llama post": GPTConfig.llama(**SIZES, norm_position="post"),
}
WITH_EXPERTS = {
    "experts": GPTConfig.llama(**SIZES, experts=LOSSES),
    "experts post": GPTConfig.llama(**SIZES, experts=LOSSES, norm_position="post"),
    "shared expert": GPTConfig.llama(**SIZES, experts=SHARED),
}
CONFIGS = DENSE | WITH_EXPERTS
#: All scopes together, each scope alone, and the pair of router and preprocess.
SCOPES = [("all",), *((scope,) for scope in get_args(SegmentScope)), ("router", "preprocess")]


def draw_tokens(number: int, mesh: ParallelMesh) -> Tensor:
    generator = torch.Generator().manual_seed(number + 10 * mesh.dp.rank)
    return torch.randint(0, V, (2, S), generator=generator)


def build_gpt(config: GPTConfig, mesh: ParallelMesh, recompute: Recompute, transport: str) -> GPT:
    model = GPT(config, mesh, seed=1)
    model.recompute = recompute
    for mixture in model.mixtures().values():
        mixture.transport = transport
    return model


def train(model: GPT | Encoder, mesh: ParallelMesh) -> dict[str, Tensor | None]:
    """Run two microbatches forward, then both backward; return losses and gradients."""
    losses = []
    for number in range(2):
        mesh.random.begin_microbatch(5, number)
        tokens = draw_tokens(number, mesh)
        if isinstance(model, GPT):
            losses.append(model(tokens, tokens, label_smoothing=0.1).mean())
            continue
        # Padding is described by lengths where attention drops nothing.
        padding = {"lengths": torch.tensor([S, 5])}
        if model.config.attention_dropout:
            padding = {"valid": padded_on_the_right([S, 5], S)}
        result = model(EncoderInput(tokens, **padding), tokens)
        losses.append((result.pooled if result.losses is None else result.losses).mean())
    losses_and_gradients: dict[str, Tensor | None] = {}
    for number, loss in enumerate(losses):
        # One loss at a time, because pieces do not add the two gradients of a tied weight first.
        model.zero_grad()
        loss.backward()
        losses_and_gradients[f"loss {number}"] = loss.detach()
        for name, parameter in model.named_parameters():
            losses_and_gradients[f"{name} {number}"] = parameter.grad
    return losses_and_gradients


def assert_same_bits(actual: dict[str, Any], expected: dict[str, Any], case_name: str) -> None:
    assert actual.keys() == expected.keys(), case_name
    for name, value in expected.items():
        is_same = value is None if actual[name] is None else torch.equal(actual[name], value)
        assert is_same, f"{case_name}: {name}"


def check_scopes(
    config: GPTConfig,
    mesh: ParallelMesh,
    recompute: Recompute,
    scopes: Any,
    transport: str = "auto",
) -> list[int]:
    """Compare a model in pieces with the complete model; return the number of pieces by scope."""
    expected = train(build_gpt(config, mesh, recompute, transport), mesh)
    num_pieces = []
    for scope in scopes:
        model = build_gpt(config, mesh, recompute, transport)
        runner = PieceRunner(model, scopes=scope)
        case_name = f"{config} {mesh.layout} {transport} {recompute} {scope}"
        assert_same_bits(train(model, mesh), expected, case_name)
        num_pieces.append(len(runner.pieces))
    return num_pieces


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", CONFIGS)
def test_pieces_of_every_scope_compute_the_same_bits(name):
    num_pieces = check_scopes(CONFIGS[name], ParallelMesh.single(seed=4), "none", SCOPES)
    assert num_pieces[0] == 1
    # Numbers of pieces differ, as eager segments lie before, between and after static segments.
    assert len(set(num_pieces)) > 2


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("gpt2", "selective"),
        ("gpt2", "full"),
        ("shared expert", "experts"),
        ("shared expert", "full"),
    ],
)
def test_pieces_compute_the_same_bits_with_recomputation(name, recompute):
    scopes = [("all",), ("attention",), ("mlp", "router", "head")]
    check_scopes(CONFIGS[name], ParallelMesh.single(seed=4), recompute, scopes)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("head", ["masked_lm", "pooler"])
def test_an_encoder_in_pieces_computes_the_same_bits(head, dropout):
    config = EncoderConfig(
        vocab_size=V, num_positions=S, num_layers=2, hidden_size=16, num_heads=4,
        ffn_hidden_size=24, hidden_dropout=0.3, attention_dropout=dropout, head=head,
    )  # fmt: skip
    mesh = ParallelMesh.single(seed=4)
    with flash_stand_in() as spans:
        expected = train(Encoder(config, mesh, seed=1), mesh)
        for scopes in SCOPES[:4]:
            model = Encoder(config, mesh, seed=1)
            PieceRunner(model, scopes=scopes)
            assert_same_bits(train(model, mesh), expected, f"{head} {scopes}")
    assert bool(spans) == (dropout == 0.0), "lengths need no mask"


@pytest.mark.parametrize("name", CONFIGS)
def test_segments_read_all_parameters_and_pieces_end_at_cuts(name):
    model = GPT(CONFIGS[name], seed=1)
    expanded = chunk_segments(model).expand()
    assert set(expanded.parameters) == set(model.parameters())
    PieceRunner(model, cuts=["embedding", "layers.0.attention"])
    runner = PieceRunner(model, cuts=["embedding", "layers.0.attention"])
    model(draw_tokens(0, model.mesh))
    ends = [piece.segments[-1].name for piece in runner.pieces]
    assert ends == ["embedding", "layers.0.attention", "head"]
    assert all(piece.is_static for piece in runner.pieces)
