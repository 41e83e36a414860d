"""Batches whose lengths contradict the padding mask are refused before they move to a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron import BERTPretraining, EncoderConfig
from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.strategy.checks.batch_checks import check_batch
from tests.models.flash_stand_in import padded_on_the_right


def make_module() -> BERTPretraining:
    sizes: dict[str, Any] = {
        "vocab_size": 20, "num_positions": 8, "num_layers": 1, "hidden_size": 8, "num_heads": 2,
    }  # fmt: skip
    module = BERTPretraining(EncoderConfig.bert(**sizes))
    module.configure_model()
    return module


def make_batch(lengths: list[int]) -> dict[str, torch.Tensor]:
    return {"valid": padded_on_the_right([8, 3], 8), "lengths": torch.tensor(lengths)}


def test_lengths_that_match_the_padding_mask_are_accepted() -> None:
    module = make_module()
    check_batch(make_batch([8, 3]), module)
    check_batch({"valid": make_batch([8, 3])["valid"]}, module)
    choices = {name: tensor.unflatten(0, (1, 2)) for name, tensor in make_batch([8, 3]).items()}
    check_batch(choices, module)
    with pytest.raises(ParallelPlanError, match="row 1 has the length 4 and 3 valid tokens"):
        check_batch(choices | {"lengths": torch.tensor([[8, 4]])}, module)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": torch.tensor([8, 4])}, "row 1 has the length 4 and 3 valid tokens"),
        ({"lengths": torch.tensor([7, 3])}, "row 0 has the length 7 and 8 valid tokens"),
        ({"valid": padded_on_the_right([8, 3], 8).flip(1)}, "row 1 .* 3 and 3 valid tokens"),
        ({"lengths": torch.tensor([8, 3, 1])}, r"of valid \(2, 8\), .* shape is \(3,\)"),
    ],
)
def test_lengths_that_contradict_the_padding_mask_are_refused(
    changes: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ParallelPlanError, match=message):
        check_batch(make_batch([8, 3]) | changes, make_module())


def test_lengths_on_a_device_are_not_read() -> None:
    on_device = {name: tensor.to("meta") for name, tensor in make_batch([1, 1]).items()}
    check_batch(on_device, make_module())
    check_batch(make_batch([1, 1]), torch.nn.Module())  # type: ignore[arg-type]
