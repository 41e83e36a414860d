"""Tests that fits by CUDA graphs on a GPU equal eager fits where two eager fits are equal."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_megatron import CudaGraphs, GPTConfig
from lightning_megatron.plan.cuda_graphs import GraphMode
from tests.fits import SIZES, Job, Report, Tokens
from tests.graphs.jobs import VALIDATED, VARIED, differences, run_graphs
from tests.graphs.trained import two_alive

SMALL: dict[str, Any] = {**SIZES, "num_layers": 2, "hidden_size": 64}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, "aux_loss": 0.01}
MODELS = {
    "gpt2": GPTConfig.gpt2(**SMALL, hidden_dropout=0.1),
    "experts": GPTConfig.gpt2(**SMALL, mlp_bias=False, experts=EXPERTS),
}


def fit_on_gpu(graphs: CudaGraphs | None, model: str, **options: Any) -> Report:
    """Train twenty steps in bfloat16 on a GPU."""
    trainer = {"accelerator": "gpu", **VALIDATED, **options.pop("trainer", {})}
    data = {"data": VARIED, "validation": VARIED, "batch": 4, **options}
    return run_graphs(
        Job(MODELS[model], precision="bf16-mixed", steps=20, trainer=trainer, **data), graphs
    )


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_a_fit_by_graphs_has_the_bits_of_an_eager_fit(model: str) -> None:
    before = torch.cuda.current_stream()
    eager = fit_on_gpu(None, model)
    repeated = differences(fit_on_gpu(None, model), eager)
    modes: tuple[GraphMode, ...] = ("segments", "full")
    for mode in modes:
        by_graphs = fit_on_gpu(CudaGraphs(mode, on_failure="error"), model)
        assert torch.cuda.current_stream() == before, "the run has not restored the current stream"
        assert by_graphs.graphs[-1] > 0, mode
        assert set(differences(by_graphs, eager)) <= set(repeated), mode


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_graphs_of_evaluation_and_several_shapes_have_the_bits_of_eager_steps(model: str) -> None:
    # The last batch of an epoch and of a validation has a microbatch of one sample.
    options: dict[str, Any] = {
        "data": partial(Tokens, 19, 19),
        "validation": partial(Tokens, 11, 11),
        "trainer": {"limit_val_batches": 1.0},
    }
    eager = fit_on_gpu(None, model, **options)
    repeated = differences(fit_on_gpu(None, model, **options), eager)
    settings = CudaGraphs("segments", evaluation=True, on_new_shape="capture", on_failure="error")
    by_graphs = fit_on_gpu(settings, model, **options)
    assert by_graphs.outcomes["replays"]["training"] > 0
    assert by_graphs.outcomes["replays"]["evaluation"] > 0
    assert set(differences(by_graphs, eager)) <= set(repeated)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_two_microbatches_in_flight_share_one_set_of_graphs_of_recomputed_layers(
    model: str,
) -> None:
    layout = {"schedule": two_alive, "recompute": "full"}
    eager = fit_on_gpu(None, model, strategy=layout)
    repeated = differences(fit_on_gpu(None, model, strategy=layout), eager)
    by_graphs = fit_on_gpu(CudaGraphs("segments", on_failure="error"), model, strategy=layout)
    assert set(differences(by_graphs, eager)) <= set(repeated)
    # Embedding, layers and head have forward and backward graphs for the first microbatch of a step
    # and for the second; the layers have them in one slot.
    assert by_graphs.graphs[-1] == 3 * 2 * 2
