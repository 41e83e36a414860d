"""An encoder computes the same from the lengths of rows as from their mask, with every kernel."""

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
from tests.models.test_encoder import TOKENS, built, in_stages
from tests.oracles import assert_equal, full_gradients
from tests.world import run_world

#: The second row has 4 tokens of padding, the third one has no tokens.
LENGTHS = [12, 8, 0]
ROWS = torch.cat((TOKENS, TOKENS[:1].flip(1)))
VALID = padded_on_the_right(LENGTHS, 12)
LABELS = torch.where(VALID & (ROWS % 3 == 0), ROWS.flip(0), -100)
HEADS = ("none", "pooler", "classifier", "masked_lm", "pretraining", "span")


def by_mask() -> EncoderInput:
    return EncoderInput(ROWS, valid=VALID, token_types=ROWS % 2)


def by_lengths() -> EncoderInput:
    return EncoderInput(ROWS, token_types=ROWS % 2, lengths=torch.tensor(LENGTHS))


def outputs(model: Encoder, result: EncoderResult) -> dict[str, Tensor]:
    """Return all outputs of all tokens."""
    found = {"pooled": result.pooled, "losses": result.losses, "order": result.order_logits}
    if result.hidden is not None:
        found["hidden"] = model.gather_hidden(result.hidden)
    if model.config.head in ("masked_lm", "pretraining"):
        if result.losses is None:
            found["logits"] = model.gather_logits(result.logits)
    else:
        found["logits"] = result.logits
    return {name: one for name, one in found.items() if one is not None}


def trained(model: Encoder, rows: EncoderInput, labels: Tensor | None = None) -> dict[str, Tensor]:
    """Return the outputs and the gradients of a loss of all of them."""
    model.zero_grad()
    found = outputs(model, model(rows, labels))
    total = sum(
        (one * torch.linspace(-1, 1, one.numel(), dtype=one.dtype).view_as(one)).sum()
        for one in found.values()
    )
    assert isinstance(total, Tensor)
    # Heads also compute outputs of which only some are results.
    total = total + 0.0 * sum(one.sum() for one in model.parameters())
    total.backward()
    return {name: one.detach() for name, one in found.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys(), what
    for name, one in expected.items():
        assert_equal(found[name], one, f"{what}: {name}")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("order", ["pre", "post"])
def test_lengths_are_the_mask_that_they_describe(order: str, head: str) -> None:
    for positions in ("row", "tokens"):
        options: dict[str, Any] = {"head": head, "norm_position": order, "positions": positions}
        labels = LABELS if head in ("masked_lm", "pretraining") else None
        for given in {labels, None}:
            model = built(**options)
            expected = trained(model, by_mask(), given)
            gradients = full_gradients(model, model.mesh)
            for stands_in in (False, True):
                twin = built(**options)
                if stands_in:
                    with flash_stand_in() as spans:
                        found = trained(twin, by_lengths(), given)
                    assert len(spans) == 8, "four layers, forward and backward"
                    for one in spans:
                        assert isinstance(one, AttentionSpan)
                        assert one.key_borders is not None
                else:
                    found = trained(twin, by_lengths(), given)
                what = f"{head} {order} {positions}, flash {stands_in}"
                assert_same(found, expected, what)
                assert_same(full_gradients(twin, twin.mesh), gradients, f"gradients of {what}")


def test_vectors_and_given_positions_of_padded_rows() -> None:
    vectors = torch.linspace(-1, 1, 3 * 12 * 24, dtype=torch.float64).view(3, 12, 24)
    places = (torch.arange(36).view(3, 12) * 7) % 12
    own: dict[str, Any] = {"vectors": vectors, "positions": places}
    expected = outputs(built(), built()(EncoderInput(**own, valid=VALID)))
    with flash_stand_in() as spans:
        rows = EncoderInput(**own, lengths=torch.tensor(LENGTHS))
        assert_same(outputs(built(), built()(rows)), expected, "vectors")
    assert spans


def test_the_layers_process_padded_rows_as_one_row() -> None:
    model = built()
    shapes: list[torch.Size] = []
    model.layers["1"].register_forward_hook(lambda layer, given, found: shapes.append(found.shape))
    with flash_stand_in():
        model(by_lengths())
    model(by_lengths())
    model(by_mask())
    assert shapes == [(36, 1, 24), (12, 3, 24), (12, 3, 24)]


class Reversed(nn.Module):
    """Mixes positions."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.flip(0)


def test_rows_stay_apart_if_a_module_may_mix_their_positions() -> None:
    expected, model = built(), built()
    for one in (expected, model):
        one.layers["1"].mlp = nn.Sequential(one.layers["1"].mlp, Reversed())
    wanted = outputs(expected, expected(by_mask()))
    with flash_stand_in() as spans:
        assert_same(outputs(model, model(by_lengths())), wanted, "mixed")
    assert spans, "attention needs no mask nevertheless"


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_attention_dropout_needs_no_mask(recompute: Any) -> None:
    expected, model = built(), built(attention_dropout=0.3)
    wanted = trained(expected, by_mask())
    with flash_stand_in() as dropped:
        model.recompute = recompute
        assert_same(trained(model.train(), by_lengths()), wanted, "in training")
        assert dropped == [0.3] * (4 if recompute == "none" else 8)
        dropped.clear()
        model.eval()(by_lengths())
        assert len(dropped) == 4
        assert 0.3 not in dropped
    gradients = full_gradients(expected, expected.mesh)
    assert_same(full_gradients(model, model.mesh), gradients, "gradients in training")


@pytest.mark.parametrize("recompute", ["selective", "full", "full_except_core"])
def test_recomputed_layers_of_padded_rows(recompute: Any) -> None:
    model, twin = built(), built()
    expected = trained(model, by_mask())
    with flash_stand_in() as spans:
        twin.recompute = recompute
        assert_same(trained(twin, by_lengths()), expected, recompute)
    assert spans
    assert_same(full_gradients(twin, twin.mesh), full_gradients(model, model.mesh), recompute)


def test_stages_exchange_joined_rows() -> None:
    layout = ParallelLayout(1)
    object.__setattr__(layout, "vpp", 2)
    mesh = ParallelMesh.single(seed=3)
    object.__setattr__(mesh, "layout", layout)
    model = built(mesh)
    with flash_stand_in():
        found = in_stages(model, by_lengths())
        model.cursor = StageCursor(chunk=0)
        with pytest.raises(StageDone):
            model(by_lengths())
    assert model.cursor is not None
    assert [one.shape for one in model.cursor.sent] == [(36, 1, 24)]
    assert_equal(found, built()(by_mask()).pooled, "two chunks")


def check_layouts(rank: int, size: int) -> None:
    for head in ("pretraining", "span"):
        labels = LABELS if head == "pretraining" else None
        whole = built(head=head)
        expected = trained(whole, by_mask(), labels)
        gradients = full_gradients(whole, whole.mesh)
        for options in (
            {"tp": 2},
            {"tp": 2, "sequence_parallel": True},
            {"cp": 2, "transport": "all_to_all"},
            {"cp": 2, "transport": "ring"},
            {"cp": 2, "transport": "all_gather"},
        ):
            given: dict[str, Any] = dict(options)
            how: dict[str, Any] = {"sequence_parallel": given.pop("sequence_parallel", False)}
            if "transport" in given:
                how["context"] = ContextLinks(given.pop("transport"))
            mesh = ParallelMesh.create(ParallelLayout(size, **given), **how)
            model = built(mesh, head=head)
            with flash_stand_in() as spans:
                found = trained(model, by_lengths(), labels)
            assert spans
            assert_same(found, expected, f"{head} {options}")
            if "tp" in given:
                what = f"gradients of {head} {options}"
                assert_same(full_gradients(model, mesh), gradients, what)
            mesh.destroy()


def test_padded_rows_in_layouts_are_those_of_one_process() -> None:
    run_world(check_layouts, 2)


def test_contradicting_descriptions_of_padding_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="either valid or lengths"):
        EncoderInput(ROWS, valid=VALID, lengths=torch.tensor(LENGTHS))
    with pytest.raises(UnsupportedError, match=r"each of the 3 rows: its shape is \(2,\)"):
        EncoderInput(ROWS, lengths=torch.tensor([3, 4]))
