"""Complex parameters and buffers keep their imaginary parts, or are refused by name."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy, UnsupportedError
from tests.world import run_world


class Waves(L.LightningModule):
    """A filter in the frequency domain, learnt or fixed."""

    def __init__(self, is_learnt: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        values = torch.randn(8, dtype=torch.complex64)
        if is_learnt:
            self.filter = nn.Parameter(values)
        else:
            self.register_buffer("filter", values)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.first(batch[0]).double()
        hidden = torch.fft.ifft(torch.fft.fft(hidden) * self.filter).real
        return self.last(hidden.to(self.last.weight.dtype)).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(strategy: Any, precision: Any, is_learnt: bool, devices: int = 1) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    module = Waves(is_learnt)
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, precision=precision, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    data = TensorDataset(torch.randn(16, 4, generator=generator))
    trainer.fit(module, DataLoader(data, batch_size=4))
    assert module.filter.is_complex()
    return module.losses


@pytest.mark.parametrize("is_learnt", [True, False])
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_complex_tensors_train_as_without_the_strategy(precision: Any, is_learnt: bool) -> None:
    expected = fit("auto", precision, is_learnt)
    actual = fit(MegatronStrategy(), precision, is_learnt)
    assert actual == pytest.approx(expected, rel=1e-6 if precision == "32-true" else 1e-12)
    assert len(set(actual)) > 1


def test_complex_buffers_stay_complex_in_half_precision() -> None:
    actual = fit(MegatronStrategy(), "bf16-mixed", False)
    assert actual == pytest.approx(fit("auto", "32-true", False), rel=0.05)


def test_complex_parameters_are_refused_in_half_precision() -> None:
    words = "precision bf16-mixed needs real parameters: 'filter' is torch.complex64"
    with pytest.raises(UnsupportedError, match=words):
        fit(MegatronStrategy(), "bf16-mixed", True)


def _fit_on_ranks(rank: int, size: int) -> list[float]:
    return fit(MegatronStrategy(), "64-true", True, size)


def test_complex_parameters_on_two_data_ranks_match_one_process() -> None:
    expected = fit("auto", "64-true", True)
    for actual in run_world(_fit_on_ranks, 2):
        assert actual == pytest.approx(expected, rel=1e-12)
