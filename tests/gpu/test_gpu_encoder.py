"""Tests that an encoder on a GPU skips the padding of rows with lengths, without a mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import CudaGraphs, Encoder, EncoderConfig, EncoderInput
from lightning_megatron.layers.attention.choose_core import choose_core
from lightning_megatron.layers.attention.core import attend
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.models import encoder
from tests.fits import Report
from tests.graphs.jobs import differences, run_graphs
from tests.models.flash_stand_in import padded_on_the_right
from tests.oracles import relative_difference
from tests.strategy.test_cuda_graphs import bert_job

pytestmark = pytest.mark.gpu

ROWS, LENGTH = 6, 256
LENGTHS = [256, 200, 64, 1, 0, 131]
#: Largest norm of a difference, relative to that of the expected values.
BOUND = 0.03


def build_encoder(dtype: torch.dtype, **changes: Any) -> Encoder:
    sizes: dict[str, Any] = {
        "vocab_size": 128, "num_positions": LENGTH, "num_layers": 3, "hidden_size": 256,
        "num_heads": 4, "ffn_hidden_size": 512, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "init_std": 0.1,
    }  # fmt: skip
    config = EncoderConfig.bert(**sizes | changes)
    return Encoder(config, seed=3).to(device="cuda", dtype=dtype)


def losses_and_gradients(model: Encoder, rows: EncoderInput, labels: Tensor) -> dict[str, Tensor]:
    """Return losses, logits and gradients."""
    result = model(rows, labels)
    assert result.losses is not None
    assert result.order_logits is not None
    (result.losses.mean() + result.order_logits.float().square().mean()).backward()
    tensors = {"losses": result.losses, "order": result.order_logits}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        tensors[name] = parameter.grad
    return {name: tensor.detach() for name, tensor in tensors.items()}


@pytest.fixture
def without_masks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that forbids masks from now on."""

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("rows with lengths need no mask")

    return partial(monkeypatch.setattr, encoder, "prepared", refuse)


@pytest.mark.parametrize("order", ["pre", "post"])
def test_rows_with_lengths_equal_rows_with_a_mask(order, without_masks):
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randint(4, 128, (ROWS, LENGTH), generator=draw).cuda()
    valid = padded_on_the_right(LENGTHS, LENGTH).cuda()
    labels = tokens.masked_fill(~valid | (tokens % 3 > 0), -100)
    exact, masked = (
        losses_and_gradients(
            build_encoder(dtype, norm_position=order), EncoderInput(tokens, valid=valid), labels
        )
        for dtype in (torch.float32, torch.bfloat16)
    )
    model = build_encoder(torch.bfloat16, norm_position=order)
    shapes: list[torch.Size] = []
    model.layers["1"].register_forward_hook(lambda layer, inputs, out: shapes.append(out.shape))
    without_masks()
    lengths = torch.tensor(LENGTHS, device="cuda")
    actual = losses_and_gradients(model, EncoderInput(tokens, lengths=lengths), labels)
    assert shapes == [(ROWS * LENGTH, 1, 256)]
    for name, tensor in actual.items():
        assert torch.isfinite(tensor).all(), name
        error = relative_difference(tensor, exact[name])
        usual = relative_difference(masked[name], exact[name])
        assert error < max(1.5 * usual, BOUND), f"{name}: off by {error:.2g}, a mask by {usual:.2g}"


def test_keys_and_values_of_padding_get_no_gradients():
    query, key, value = (
        torch.randn(LENGTH, ROWS, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    span = AttentionSpan.padded(torch.tensor(LENGTHS, device="cuda"), LENGTH)
    for dropout in (0.0, 0.2):
        output = attend(query, key, value, span, dropout=dropout)
        gradients = torch.autograd.grad(output.float().square().sum(), (query, key, value))
        assert all(torch.isfinite(tensor).all() for tensor in (output, *gradients))
        # A row that consists of padding counts as a row without padding.
        attended = [LENGTH if length == 0 else length for length in LENGTHS]
        hidden = ~padded_on_the_right(attended, LENGTH).cuda()
        for gradient in gradients[1:]:
            assert not gradient.transpose(0, 1)[hidden].any()
            assert gradient.transpose(0, 1)[~hidden].any()


def test_both_passes_drop_the_same_attention_weights():
    length, rows, heads, share = 64, 2, 3, 0.25
    draw = torch.Generator("cuda").manual_seed(1)
    options: Any = {"device": "cuda", "dtype": torch.bfloat16}
    query, key, outer = (
        torch.randn(length, rows, heads, 64, generator=draw, **options) for _ in range(3)
    )
    # With unit vectors as values, the output consists of the weights that are not dropped. Scores
    # with a variance of 1 keep all weights far above 0, so that only dropped weights and weights of
    # padding are 0.
    value = torch.eye(length, **options)[:, None, None].expand(-1, rows, heads, -1).contiguous()
    inputs = query.requires_grad_(), key.requires_grad_(), value.requires_grad_()
    span = AttentionSpan.padded(torch.tensor([length, 40], device="cuda"), length)
    choice = choose_core(query.device, query.dtype, span, length, dropout=share, head_dim=64)
    assert choice.core == "flash"
    torch.manual_seed(5)
    output, second_output = (attend(query, key, value, span, dropout=share) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(attend(query, key, value, span, dropout=share), output)
    assert not torch.equal(second_output, output), "both calls drop the same weights"
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    scores = torch.einsum("sbhd,tbhd->bhst", wide[0], wide[1]) / 8.0
    is_padding = ~padded_on_the_right([length, 40], length).cuda()
    weights = scores.masked_fill(is_padding[:, None, None], -torch.inf).softmax(-1)
    is_kept = (output.unflatten(-1, (heads, -1)) > 0).permute(1, 2, 0, 3)
    is_attended = (~is_padding)[:, None, None].expand_as(is_kept)
    assert float(is_kept[is_attended].double().mean()) == pytest.approx(1 - share, abs=0.03)
    kept = weights * is_kept / (1 - share)
    expected_output = torch.einsum("bhst,tbhd->sbhd", kept, wide[2]).flatten(2)
    outer = outer.flatten(2)
    gradients = torch.autograd.grad(output, inputs, outer)
    expected_gradients = torch.autograd.grad(expected_output, wide, outer.double())
    assert relative_difference(output, expected_output) < BOUND
    for number, (actual, expected) in enumerate(zip(gradients, expected_gradients, strict=True)):
        assert relative_difference(actual, expected) < BOUND, number


@pytest.mark.parametrize("dropout", [(0.0, 0.0), (0.1, 0.1)])
@pytest.mark.parametrize("order", ["pre", "post"])
def test_graphs_follow_the_lengths_of_each_batch(order, dropout, without_masks):
    def fit(graphs: CudaGraphs | None, **more: Any) -> Report:
        job = bert_job(order=order, dropout=dropout, **more)
        trainer = {**job.trainer, "accelerator": "gpu"}
        return run_graphs(replace(job, precision="bf16-mixed", trainer=trainer), graphs)

    by_mask = fit(None, has_lengths=False)
    without_masks()
    eager = fit(None)
    repeated = differences(fit(None), eager)
    if not any(dropout):
        assert eager.losses == pytest.approx(by_mask.losses, rel=0.05)
    for mode in ("segments", "full"):
        by_graphs = fit(CudaGraphs(mode, warmup_steps=2, on_failure="error"))
        assert by_graphs.graphs[-1] > 0, mode
        assert set(differences(by_graphs, eager)) <= set(repeated), mode
