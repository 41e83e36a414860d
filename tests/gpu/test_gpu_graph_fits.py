"""Tests that fits by CUDA graphs on a GPU equal eager fits where two eager fits are equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron import CudaGraphs
from lightning_megatron.plan.cuda_graphs import GraphMode
from lightning_megatron.plan.experts import ExpertsConfig
from tests.graphs.trained import two_alive
from tests.strategy.graph_fits import Fit, fit

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"hidden_dropout": 0.1},
    "experts": {
        "experts": ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=32, aux_loss=0.01),
        "mlp_bias": False,
        "hidden_size": 64,
    },
}


def fit_on_gpu(graphs: CudaGraphs | None, model: str, **options: Any) -> Fit:
    """Train twenty steps in bfloat16 on a GPU."""
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
def test_a_fit_by_graphs_has_the_bits_of_an_eager_fit(model: str) -> None:
    before = torch.cuda.current_stream()
    eager = fit_on_gpu(None, model)
    repeated = fit_on_gpu(None, model).differences_from(eager)
    modes: tuple[GraphMode, ...] = ("segments", "full")
    for mode in modes:
        by_graphs = fit_on_gpu(CudaGraphs(mode, on_failure="error"), model)
        assert torch.cuda.current_stream() == before, "the run has not restored the current stream"
        assert by_graphs.num_graphs[-1] > 0, mode
        assert set(by_graphs.differences_from(eager)) <= set(repeated), mode


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_graphs_of_evaluation_and_several_shapes_have_the_bits_of_eager_steps(model: str) -> None:
    # The last batch of an epoch and of a validation has a microbatch of one sample.
    options: dict[str, Any] = {
        "num_samples": 19,
        "num_evaluated": 11,
        "limit_val_batches": 1.0,
        "max_steps": 20,
    }
    eager = fit_on_gpu(None, model, **options)
    repeated = fit_on_gpu(None, model, **options).differences_from(eager)
    settings = CudaGraphs("segments", evaluation=True, on_new_shape="capture", on_failure="error")
    by_graphs = fit_on_gpu(settings, model, **options)
    assert by_graphs.replays["training"] > 0
    assert by_graphs.replays["evaluation"] > 0
    assert set(by_graphs.differences_from(eager)) <= set(repeated)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_two_microbatches_in_flight_share_one_set_of_graphs_of_recomputed_layers(
    model: str,
) -> None:
    layout = {"schedule": two_alive, "recompute": "full"}
    eager = fit_on_gpu(None, model, layout=layout)
    repeated = fit_on_gpu(None, model, layout=layout).differences_from(eager)
    by_graphs = fit_on_gpu(CudaGraphs("segments", on_failure="error"), model, layout=layout)
    assert set(by_graphs.differences_from(eager)) <= set(repeated)
    # Embedding, layers and head have forward and backward graphs for the first microbatch of a step
    # and for the second; the layers have them in one slot.
    assert by_graphs.num_graphs[-1] == 3 * 2 * 2
