"""Encoders check their settings and compute the same from lengths of rows as from their mask, with every
kernel.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.encoder import Encoder, EncoderInput, EncoderResult
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.plan.layout import ParallelLayout
from tests.models.flash_stand_in import flash_stand_in, padded_on_the_right
from tests.models.test_settings import in_float64
from tests.oracles import assert_equal, full_gradients
from tests.refusals import check_refusals
from tests.swap.parts import mesh_of

SIZES: dict[str, Any] = {"vocab_size": 53, "num_positions": 20, "num_layers": 4, "hidden_size": 24}
SIZES |= {"num_heads": 4, "ffn_hidden_size": 32, "padding_id": 1}
TOKENS = torch.arange(2, 26).view(2, 12)
#: The second row has 4 tokens of padding, the third row has no tokens.
LENGTHS = [12, 8, 0]
ROWS = torch.cat((TOKENS, TOKENS[:1].flip(1)))
VALID = padded_on_the_right(LENGTHS, 12)
LABELS = torch.where(VALID & (ROWS % 3 == 0), ROWS.flip(0), -100)
HEADS = ("none", "pooler", "classifier", "masked_lm", "pretraining", "span")


def build_encoder(mesh: ParallelMesh | None = None, **changes: Any) -> Encoder:
    with in_float64():
        return Encoder(EncoderConfig(**(SIZES | changes)), mesh, seed=3).eval()


def rows_with_mask() -> EncoderInput:
    return EncoderInput(ROWS, valid=VALID, token_types=ROWS % 2)


def rows_with_lengths() -> EncoderInput:
    return EncoderInput(ROWS, token_types=ROWS % 2, lengths=torch.tensor(LENGTHS))


def outputs_of(model: Encoder, result: EncoderResult) -> dict[str, Tensor]:
    """Return all outputs of all tokens."""
    outputs = {"pooled": result.pooled, "losses": result.losses, "order": result.order_logits}
    if result.hidden is not None:
        outputs["hidden"] = model.gather_hidden(result.hidden)
    if model.config.head not in ("masked_lm", "pretraining"):
        outputs["logits"] = result.logits
    elif result.losses is None:
        outputs["logits"] = model.gather_logits(result.logits)
    return {name: value for name, value in outputs.items() if value is not None}


def run(model: Encoder, rows: EncoderInput, labels: Tensor | None = None) -> dict[str, Tensor]:
    """Return the outputs and gradients, which are those of a loss of all outputs, by name."""
    model.zero_grad()
    outputs = outputs_of(model, model(rows, labels))
    # Not every parameter contributes to the outputs.
    total = 0.0 * sum(parameter.sum() for parameter in model.parameters())
    for value in outputs.values():
        weights = torch.linspace(-1, 1, value.numel(), dtype=value.dtype)
        total = total + (value * weights.view_as(value)).sum()
    total.backward()
    return outputs | {f"gradient of {k}": g for k, g in full_gradients(model, model.mesh).items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], label: str) -> None:
    assert actual.keys() == expected.keys(), label
    for name, value in expected.items():
        assert_equal(actual[name], value, f"{label}: {name}")


# ---- settings


def test_inconsistent_settings_and_layouts_raise():
    for change, message in (
        ({"hidden_size": 25}, r"hidden_size \(25\) must be a multiple of num_heads"),
        ({"head": "tail"}, "head must be none, pooler, masked_lm, .* or span: it is 'tail'"),
        ({"padding_id": 53}, r"padding_id \(53\) must be in \[0, 53\)"),
        ({"positions": "tokens", "padding_id": 30}, r"num_positions \(20\) must be above"),
    ):
        with pytest.raises(ParallelPlanError, match=message):
            EncoderConfig(**(SIZES | change))
    config = EncoderConfig(**SIZES)
    config.check_layout(ParallelLayout(2, cp=2), seq_length=16)
    for sizes, options, message in (
        ({"tp": 3}, {}, "heads"),
        ({"pp": 8}, {}, "layers"),
        ({"cp": 2}, {"seq_length": 18}, r"seq_length \(18\) must be a multiple of 2 cp"),
        ({"ep": 2}, {}, r"ep \(2\) needs a model with experts"),
        ({"tp": 2}, {"seq_length": 21}, r"seq_length \(21\) must not exceed"),
    ):
        with pytest.raises(ParallelPlanError, match=message):
            config.check_layout(ParallelLayout(max(sizes.values()), **sizes), **options)
    rows: list[Any] = [
        ({"valid": VALID, "lengths": torch.tensor(LENGTHS)}, "either valid or lengths"),
        (
            {"tokens": ROWS, "lengths": torch.tensor([3, 4])},
            "each of the 3 rows: its shape is (2,)",
        ),
    ]
    check_refusals(EncoderInput, rows, UnsupportedError)


def test_a_first_stage_has_placeholders_of_the_results_of_each_head():
    for head, name, shape in (("pooler", "pooled", (3, 24)), ("span", "logits", (3, 12, 2))):
        model = build_encoder(mesh_of(pp=2), head=head)
        assert getattr(model._placeholders(3, 12, False), name).shape == shape


# ---- padding


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("order", ["pre", "post"])
def test_results_with_lengths_equal_those_with_the_mask(order, head):
    for positions in ("row", "tokens"):
        model = build_encoder(head=head, norm_position=order, positions=positions)
        for labels in (LABELS, None) if head in ("masked_lm", "pretraining") else (None,):
            expected, label = run(model, rows_with_mask(), labels), f"{head} {order} {positions}"
            assert all(value.isfinite().all() for value in expected.values()), "an empty row"
            assert_same(run(model, rows_with_lengths(), labels), expected, label)
            with flash_stand_in() as spans:
                assert_same(run(model, rows_with_lengths(), labels), expected, f"{label}, flash")
            assert len(spans) == 8, "four layers, forward and backward"
            assert all(span.key_borders is not None for span in spans)


def test_vectors_and_positions_with_lengths_equal_those_with_the_mask():
    vectors = torch.linspace(-1, 1, 3 * 12 * 24, dtype=torch.float64).view(3, 12, 24)
    positions = (torch.arange(36).view(3, 12) * 7) % 12
    inputs: dict[str, Any] = {"vectors": vectors, "positions": positions}
    model = build_encoder()
    expected = outputs_of(model, model(EncoderInput(**inputs, valid=VALID)))
    with flash_stand_in() as spans:
        rows = EncoderInput(**inputs, lengths=torch.tensor(LENGTHS))
        assert_same(outputs_of(model, model(rows)), expected, "vectors")
    assert spans


class Reversed(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.flip(0)


def test_rows_are_not_joined_if_a_module_may_mix_positions():
    model = build_encoder()
    model.layers["1"].mlp = nn.Sequential(model.layers["1"].mlp, Reversed())
    expected = outputs_of(model, model(rows_with_mask()))
    with flash_stand_in() as spans:
        assert_same(outputs_of(model, model(rows_with_lengths())), expected, "mixed")
    assert spans, "attention needs no mask nevertheless"


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "full_except_core"])
def test_recomputation_and_attention_dropout_need_no_mask(recompute):
    expected = run(build_encoder(), rows_with_mask())
    for dropout in (0.0, 0.3) if recompute != "full_except_core" else (0.0,):
        model = build_encoder(attention_dropout=dropout)
        model.recompute = recompute
        with flash_stand_in() as calls:
            # The stand-in drops nothing.
            assert_same(run(model.train(), rows_with_lengths()), expected, recompute)
            assert not dropout or calls == [dropout] * (4 if recompute == "none" else 8)
            calls.clear()
            model.eval()(rows_with_lengths())
            assert len(calls) == 4
            assert 0.3 not in calls
