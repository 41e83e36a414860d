"""Fits by CUDA graphs on a GPU equal eager fits where two eager fits are equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron import CudaGraphs
from lightning_megatron.plan.experts import ExpertsConfig
from tests.strategy.graph_fits import Fit, fit

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"hidden_dropout": 0.1},
    "experts": {
        "experts": ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=32, aux_loss=0.01),
        "mlp_bias": False,
        "hidden_size": 64,
    },
}


def on_gpu(mode: str | None, model: str, **options: Any) -> Fit:
    """Train twenty steps in bfloat16 on a GPU."""
    graphs = None if mode is None else CudaGraphs(mode, on_failure="error")  # type: ignore[arg-type]
    arguments = {
        "accelerator": "gpu",
        "precision": "bf16-mixed",
        "max_steps": 20,
        "num_samples": 160,
        "model": MODELS[model],
    }
    return fit(graphs, **{**arguments, **options})


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_a_fit_by_graphs_has_the_bits_of_an_eager_one(model: str) -> None:
    before = torch.cuda.current_stream()
    eager = on_gpu(None, model)
    repeated = on_gpu(None, model).differences_from(eager)
    for mode in ("segments", "full"):
        found = on_gpu(mode, model)
        assert torch.cuda.current_stream() == before, "the run has given its stream back"
        assert found.num_graphs[-1] > 0, mode
        assert set(found.differences_from(eager)) <= set(repeated), mode
