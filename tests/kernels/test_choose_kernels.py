"""Tests of the choice of fused kernels, and of the logged reasons against them."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.layers.fused import choose_kernels


def test_cpu_tensors_get_no_fused_kernels():
    assert choose_kernels.fused_kernels(torch.ones(2, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize(
    ("capability", "module", "reason"),
    [
        ((7, 5), "lightning_megatron.errors", "7.5 is below 8.0"),
        ((9, 0), "no_such_module", "cannot be imported"),
    ],
)
def test_the_reason_against_fused_kernels_is_logged_once(
    monkeypatch, caplog, capability, module, reason
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(choose_kernels, "_KERNELS", module)
    choose_kernels.choose_kernels.cache_clear()
    with caplog.at_level("INFO", logger=choose_kernels.__name__):
        for _ in range(2):
            choice = choose_kernels.choose_kernels(torch.device("cuda", 0))
    choose_kernels.choose_kernels.cache_clear()
    assert choice.kernels is None
    assert reason in choice.reason
    assert len(caplog.records) == 1
    assert reason in caplog.text
