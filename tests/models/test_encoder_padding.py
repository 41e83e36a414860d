"""An encoder computes the same from lengths of rows as from their mask, with every kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.models.encoder import Encoder, EncoderResult
from lightning_megatron.models.encoder_rows import EncoderInput
from lightning_megatron.models.stage import StageCursor, StageDone
from lightning_megatron.plan.context_transport import ContextLinks
from lightning_megatron.plan.layout import ParallelLayout
from tests.models.flash_stand_in import flash_stand_in, padded_on_the_right
from tests.models.test_encoder import TOKENS, build_encoder, run_in_chunks
from tests.oracles import assert_equal, full_gradients
from tests.world import run_world

#: The second row has 4 tokens of padding, the third row has no tokens.
LENGTHS = [12, 8, 0]
ROWS = torch.cat((TOKENS, TOKENS[:1].flip(1)))
VALID = padded_on_the_right(LENGTHS, 12)
LABELS = torch.where(VALID & (ROWS % 3 == 0), ROWS.flip(0), -100)
HEADS = ("none", "pooler", "classifier", "masked_lm", "pretraining", "span")


def rows_with_mask() -> EncoderInput:
    return EncoderInput(ROWS, valid=VALID, token_types=ROWS % 2)


def rows_with_lengths() -> EncoderInput:
    return EncoderInput(ROWS, token_types=ROWS % 2, lengths=torch.tensor(LENGTHS))


def outputs_of(model: Encoder, result: EncoderResult) -> dict[str, Tensor]:
    """Return all outputs of all tokens."""
    outputs = {"pooled": result.pooled, "losses": result.losses, "order": result.order_logits}
    if result.hidden is not None:
        outputs["hidden"] = model.gather_hidden(result.hidden)
    if model.config.head in ("masked_lm", "pretraining"):
        if result.losses is None:
            outputs["logits"] = model.gather_logits(result.logits)
    else:
        outputs["logits"] = result.logits
    return {name: value for name, value in outputs.items() if value is not None}


def run_forward_and_backward(
    model: Encoder, rows: EncoderInput, labels: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the outputs, and run the backward pass of a loss of all outputs."""
    model.zero_grad()
    outputs = outputs_of(model, model(rows, labels))
    total = sum(
        (value * torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view_as(value)).sum()
        for value in outputs.values()
    )
    assert isinstance(total, Tensor)
    # Not every parameter contributes to the outputs.
    total = total + 0.0 * sum(parameter.sum() for parameter in model.parameters())
    total.backward()
    return {name: value.detach() for name, value in outputs.items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], case_name: str) -> None:
    assert actual.keys() == expected.keys(), case_name
    for name, expected_value in expected.items():
        assert_equal(actual[name], expected_value, f"{case_name}: {name}")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("order", ["pre", "post"])
def test_results_with_lengths_equal_those_with_the_mask(order: str, head: str) -> None:
    for positions in ("row", "tokens"):
        options: dict[str, Any] = {"head": head, "norm_position": order, "positions": positions}
        labels = LABELS if head in ("masked_lm", "pretraining") else None
        for given_labels in {labels, None}:
            model = build_encoder(**options)
            expected = run_forward_and_backward(model, rows_with_mask(), given_labels)
            gradients = full_gradients(model, model.mesh)
            for uses_flash in (False, True):
                model_with_lengths = build_encoder(**options)
                if uses_flash:
                    with flash_stand_in() as spans:
                        actual = run_forward_and_backward(
                            model_with_lengths, rows_with_lengths(), given_labels
                        )
                    assert len(spans) == 8, "four layers, forward and backward"
                    for span in spans:
                        assert isinstance(span, AttentionSpan)
                        assert span.key_borders is not None
                else:
                    actual = run_forward_and_backward(
                        model_with_lengths, rows_with_lengths(), given_labels
                    )
                case_name = f"{head} {order} {positions}, flash {uses_flash}"
                assert_same(actual, expected, case_name)
                assert_same(
                    full_gradients(model_with_lengths, model_with_lengths.mesh),
                    gradients,
                    f"gradients of {case_name}",
                )


def test_vectors_and_positions_with_lengths_equal_those_with_the_mask() -> None:
    vectors = torch.linspace(-1, 1, 3 * 12 * 24, dtype=torch.float64).view(3, 12, 24)
    positions = (torch.arange(36).view(3, 12) * 7) % 12
    inputs: dict[str, Any] = {"vectors": vectors, "positions": positions}
    expected = outputs_of(build_encoder(), build_encoder()(EncoderInput(**inputs, valid=VALID)))
    with flash_stand_in() as spans:
        rows = EncoderInput(**inputs, lengths=torch.tensor(LENGTHS))
        assert_same(outputs_of(build_encoder(), build_encoder()(rows)), expected, "vectors")
    assert spans


def test_layers_process_padded_rows_as_one_row_with_flash_attention() -> None:
    model = build_encoder()
    shapes: list[torch.Size] = []
    model.layers["1"].register_forward_hook(
        lambda layer, inputs, output: shapes.append(output.shape)
    )
    with flash_stand_in():
        model(rows_with_lengths())
    model(rows_with_lengths())
    model(rows_with_mask())
    assert shapes == [(36, 1, 24), (12, 3, 24), (12, 3, 24)]


class Reversed(nn.Module):
    """Reverse positions."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.flip(0)


def test_rows_are_not_joined_if_a_module_may_mix_positions() -> None:
    reference, model = build_encoder(), build_encoder()
    for encoder in (reference, model):
        encoder.layers["1"].mlp = nn.Sequential(encoder.layers["1"].mlp, Reversed())
    expected = outputs_of(reference, reference(rows_with_mask()))
    with flash_stand_in() as spans:
        assert_same(outputs_of(model, model(rows_with_lengths())), expected, "mixed")
    assert spans, "attention needs no mask nevertheless"


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_attention_dropout_needs_no_mask(recompute: Any) -> None:
    reference, model = build_encoder(), build_encoder(attention_dropout=0.3)
    expected = run_forward_and_backward(reference, rows_with_mask())
    with flash_stand_in() as calls:
        model.recompute = recompute
        assert_same(
            run_forward_and_backward(model.train(), rows_with_lengths()), expected, "in training"
        )
        assert calls == [0.3] * (4 if recompute == "none" else 8)
        calls.clear()
        model.eval()(rows_with_lengths())
        assert len(calls) == 4
        assert 0.3 not in calls
    gradients = full_gradients(reference, reference.mesh)
    assert_same(full_gradients(model, model.mesh), gradients, "gradients in training")


@pytest.mark.parametrize("recompute", ["selective", "full", "full_except_core"])
def test_recomputed_layers_with_lengths_equal_those_with_the_mask(recompute: Any) -> None:
    reference, model = build_encoder(), build_encoder()
    expected = run_forward_and_backward(reference, rows_with_mask())
    with flash_stand_in() as spans:
        model.recompute = recompute
        assert_same(run_forward_and_backward(model, rows_with_lengths()), expected, recompute)
    assert spans
    assert_same(
        full_gradients(model, model.mesh), full_gradients(reference, reference.mesh), recompute
    )


def test_stages_exchange_joined_rows() -> None:
    layout = ParallelLayout(1)
    object.__setattr__(layout, "vpp", 2)
    mesh = ParallelMesh.single(seed=3)
    object.__setattr__(mesh, "layout", layout)
    model = build_encoder(mesh)
    with flash_stand_in():
        actual = run_in_chunks(model, rows_with_lengths())
        model.cursor = StageCursor(chunk=0)
        with pytest.raises(StageDone):
            model(rows_with_lengths())
    assert model.cursor is not None
    assert [tensor.shape for tensor in model.cursor.sent] == [(36, 1, 24)]
    assert_equal(actual, build_encoder()(rows_with_mask()).pooled, "two chunks")


def check_layouts(rank: int, size: int) -> None:
    for head in ("pretraining", "span"):
        labels = LABELS if head == "pretraining" else None
        full_model = build_encoder(head=head)
        expected = run_forward_and_backward(full_model, rows_with_mask(), labels)
        gradients = full_gradients(full_model, full_model.mesh)
        for options in (
            {"tp": 2},
            {"tp": 2, "sequence_parallel": True},
            {"cp": 2, "transport": "all_to_all"},
            {"cp": 2, "transport": "ring"},
            {"cp": 2, "transport": "all_gather"},
        ):
            layout_sizes: dict[str, Any] = dict(options)
            mesh_options: dict[str, Any] = {
                "sequence_parallel": layout_sizes.pop("sequence_parallel", False)
            }
            if "transport" in layout_sizes:
                mesh_options["context"] = ContextLinks(layout_sizes.pop("transport"))
            mesh = ParallelMesh.create(ParallelLayout(size, **layout_sizes), **mesh_options)
            model = build_encoder(mesh, head=head)
            with flash_stand_in() as spans:
                actual = run_forward_and_backward(model, rows_with_lengths(), labels)
            assert spans
            assert_same(actual, expected, f"{head} {options}")
            if "tp" in layout_sizes:
                case_name = f"gradients of {head} {options}"
                assert_same(full_gradients(model, mesh), gradients, case_name)
            mesh.destroy()


def test_padded_rows_in_parallel_layouts_match_one_process() -> None:
    run_world(check_layouts, 2)


def test_contradictory_descriptions_of_padding_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="either valid or lengths"):
        EncoderInput(ROWS, valid=VALID, lengths=torch.tensor(LENGTHS))
    with pytest.raises(UnsupportedError, match=r"each of the 3 rows: its shape is \(2,\)"):
        EncoderInput(ROWS, lengths=torch.tensor([3, 4]))
