"""Tests that fits by CUDA graphs on a GPU equal eager fits where two eager fits are equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron import CudaGraphs, GPTConfig
from lightning_megatron.plan.cuda_graphs import GraphMode
from tests.fits import SIZES, Job, Report
from tests.graphs.jobs import VALIDATED, VARIED, differences, run_graphs

SMALL: dict[str, Any] = {**SIZES, "num_layers": 2, "hidden_size": 64}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, "aux_loss": 0.01}
MODELS = {
    "gpt2": GPTConfig.gpt2(**SMALL, hidden_dropout=0.1),
    "experts": GPTConfig.gpt2(**SMALL, mlp_bias=False, experts=EXPERTS),
}


def fit_on_gpu(graphs: CudaGraphs | None, model: str) -> Report:
    """Train twenty steps in bfloat16 on a GPU, with validation in between."""
    trainer = {"accelerator": "gpu", **VALIDATED}
    job = Job(MODELS[model], None, "bf16-mixed", 20, trainer, VARIED, VARIED, batch=4)
    return run_graphs(job, graphs)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_a_fit_by_graphs_has_the_bits_of_an_eager_fit(model):
    before = torch.cuda.current_stream()
    eager = fit_on_gpu(None, model)
    repeated = differences(fit_on_gpu(None, model), eager)
    modes: tuple[GraphMode, ...] = ("segments", "full")
    for mode in modes:
        by_graphs = fit_on_gpu(CudaGraphs(mode, on_failure="error"), model)
        assert torch.cuda.current_stream() == before, "the run has not restored the current stream"
        assert by_graphs.graphs[-1] > 0, mode
        assert set(differences(by_graphs, eager)) <= set(repeated), mode
