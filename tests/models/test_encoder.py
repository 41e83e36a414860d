"""Encoders check their settings, and have the same weights and results in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.init import initialize_
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.models.encoder_rows import EncoderInput
from lightning_megatron.models.stage import StageCursor, StageDone
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from tests.oracles import assert_equal, full_weights
from tests.world import run_world

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "num_positions": 20,
    "num_layers": 4,
    "hidden_size": 24,
    "num_heads": 4,
    "ffn_hidden_size": 32,
    "padding_id": 1,
}
TOKENS = torch.arange(2, 26).view(2, 12)
VALID = torch.arange(12).expand(2, 12) < torch.tensor([[12], [9]])


def build_encoder(mesh: ParallelMesh | None = None, **changes: Any) -> Encoder:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return Encoder(EncoderConfig(**(SIZES | changes)), mesh, seed=3).eval()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a whole number of at least 1: it is 0"),
        ({"hidden_size": 25}, r"hidden_size \(25\) must be a multiple of num_heads"),
        ({"hidden_dropout": 1.0}, r"hidden_dropout .* at least 0 and below 1: it is 1.0"),
        (
            {"head": "tail"},
            "head must be none, pooler, masked_lm, classifier, pretraining or span: it is 'tail'",
        ),
        ({"positions": "other"}, "positions must be row or tokens: it is 'other'"),
        ({"padding_id": 53}, r"padding_id \(53\) must be in \[0, 53\)"),
        ({"positions": "tokens", "padding_id": None}, r"padding_id \(None\) must be a token"),
        ({"positions": "tokens", "padding_id": 30}, r"num_positions \(20\) must be above"),
    ],
)
def test_inconsistent_settings_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ParallelPlanError, match=message):
        EncoderConfig(**(SIZES | change))


def test_layouts_that_do_not_divide_the_encoder_raise() -> None:
    config = EncoderConfig(**SIZES)
    for layout, message in (
        (ParallelLayout(3, tp=3), "num_heads|heads"),
        (ParallelLayout(8, pp=8), "num_layers|layers"),
    ):
        with pytest.raises(ParallelPlanError, match=message):
            config.check_layout(layout)
    config.check_layout(ParallelLayout(2, cp=2), seq_length=16)
    with pytest.raises(ParallelPlanError, match=r"seq_length \(18\) must be a multiple of 2 cp"):
        config.check_layout(ParallelLayout(2, cp=2), seq_length=18)
    with pytest.raises(ParallelPlanError, match=r"ep \(2\) needs a model with experts"):
        config.check_layout(ParallelLayout(2, ep=2))
    with pytest.raises(ParallelPlanError, match=r"seq_length \(21\) must not exceed"):
        config.check_layout(ParallelLayout(2, tp=2), seq_length=21)
    with pytest.raises(ParallelPlanError, match=r"seq_length \(7\) must be a multiple of tp"):
        config.check_layout(ParallelLayout(2, tp=2), True, seq_length=7)


def test_rows_longer_than_the_position_table_are_refused() -> None:
    long_rows = torch.full((1, 30), 1)
    long_rows[0, :4] = 5
    with pytest.raises(
        ParallelPlanError, match=r"seq_length \(30\) must not exceed max_seq_length \(20\)"
    ):
        build_encoder()(EncoderInput(long_rows))
    model_with_token_positions = build_encoder(positions="tokens")
    assert torch.isfinite(
        model_with_token_positions(EncoderInput(long_rows, valid=long_rows != 1)).hidden
    ).all(), "padding has one position"
    with pytest.raises(IndexError):
        model_with_token_positions(EncoderInput(long_rows + 1))


def test_outputs_and_gradients_of_a_row_of_only_padding_are_finite() -> None:
    model = build_encoder()
    result = model(EncoderInput(TOKENS, valid=VALID & torch.tensor([[True], [False]])))
    (result.hidden.sum() + result.pooled.sum()).backward()
    assert torch.isfinite(result.hidden).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_an_encoder_draws_new_dropout_at_every_call() -> None:
    model = build_encoder(hidden_dropout=0.3, attention_dropout=0.3).train()
    rows = EncoderInput(TOKENS, valid=VALID)
    assert not torch.equal(model(rows).hidden, model(rows).hidden)
    model.eval()
    assert torch.equal(model(rows).hidden, model(rows).hidden)


def run_in_chunks(model: Encoder, rows: EncoderInput) -> Tensor:
    """Run the two chunks of a model one after the other in one process."""
    model.cursor = StageCursor(chunk=0)
    with pytest.raises(StageDone):
        model(rows)
    sent, model.cursor = model.cursor.sent, StageCursor(chunk=0, probe=True)
    with pytest.raises(StageDone):
        model(rows)
    assert model.cursor.tensor_specs == [(sent[0].shape, sent[0].dtype)]
    model.cursor = StageCursor(chunk=1, received=sent)
    return model(rows).pooled


def test_chunks_run_one_after_the_other_equal_the_full_model() -> None:
    rows = EncoderInput(TOKENS, valid=VALID)
    layout = ParallelLayout(1)
    object.__setattr__(layout, "vpp", 2)
    mesh = ParallelMesh.single(seed=3)
    object.__setattr__(mesh, "layout", layout)
    model = build_encoder(mesh)
    assert model.num_chunks == 2
    assert {model.chunk_of(f"layers.{index}.mlp.up.weight") for index in (0, 1)} == {0}
    assert [model.chunk_of(name) for name in ("embedding.norm.weight", "head.dense.bias")] == [0, 1]
    assert_equal(run_in_chunks(model, rows), build_encoder()(rows).pooled, "two chunks")


def check_tensor_parallel_models(rank: int, size: int) -> None:
    rows = EncoderInput(TOKENS, valid=VALID)
    for head in ("none", "pooler", "classifier", "masked_lm"):
        full_model = build_encoder(head=head)
        expected, weights = full_model(rows), full_weights(full_model, ParallelMesh.single())
        for sequence_parallel in (False, True):
            mesh = ParallelMesh.create(
                ParallelLayout(size, tp=size), sequence_parallel=sequence_parallel
            )
            # Models sharded when built, filled later, and sharded after the full model was built.
            with torch.device("meta"):
                late_model = build_encoder(mesh, head=head)
            initialize_(late_model, mesh.device, 3)
            root = nn.ModuleDict({"model": build_encoder(head=head)})
            (record,) = parallelize(root, mesh)
            assert (record.source, record.target) == ("Encoder", "Encoder")
            for model in (build_encoder(mesh, head=head), late_model, root["model"].eval()):
                for name, weight in full_weights(model, mesh).items():
                    assert_equal(
                        weight, weights[name], f"{head}: {name} does not depend on the layout"
                    )
                result = model.eval()(rows)
                if expected.hidden is not None:
                    assert_equal(
                        model.gather_hidden(result.hidden), expected.hidden.transpose(0, 1), head
                    )
                if expected.pooled is not None:
                    assert_equal(result.pooled, expected.pooled, head)
            mesh.destroy()


def test_tensor_parallel_encoders_equal_the_full_model() -> None:
    run_world(check_tensor_parallel_models, 2)
