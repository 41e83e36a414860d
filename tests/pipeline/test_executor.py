"""Steps of one stage, weights of attached losses and parameters of chunks; several stages: see
tests/worlds/test_pipelines.py.
"""

from __future__ import annotations

import torch
from torch import nn

from lightning_megatron import GPT, GPTConfig
from lightning_megatron.experts.routing.attached_loss import LossWeight
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.layered import WORD_EMBEDDING
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import split_batch
from lightning_megatron.pipeline.step_run import BackwardPasses, MicrobatchWeights, new_weight
from lightning_megatron.plan.layout import ParallelLayout

CPU = torch.device("cpu")


def test_one_stage_runs_any_step_without_a_pipelined_module() -> None:
    model, batch = nn.Linear(4, 1).double(), {"x": torch.randn(6, 4, dtype=torch.float64)}
    executor = PipelineExecutor(ParallelMesh.single(), None)
    results = executor.run(
        lambda data: model(data["x"]).mean(),
        split_batch(batch, 2),
        BackwardPasses(lambda result, _: result / 3),
    )
    gradient = model.weight.grad
    model.zero_grad()
    model(batch["x"]).mean().backward()
    torch.testing.assert_close(gradient, model.weight.grad)
    assert len(results) == 3


def test_a_fixed_weight_made_in_validation_changes_only_at_the_backward_pass() -> None:
    with torch.inference_mode():
        fixed, loss_weight = new_weight(CPU), LossWeight()
    weights = MicrobatchWeights(loss_weight, CPU, fixed)
    for number in (0, 1):
        weights.begin_forward(number)
        weights.fill(number, 10.0 + number)
        assert loss_weight.value is fixed
        assert fixed.item() == 0.0
    for number in (0, 1):
        weights.begin_backward(number)
        assert loss_weight.value is fixed
        assert fixed.item() == 10.0 + number


def test_a_tied_embedding_in_a_v_belongs_to_no_single_chunk() -> None:
    sizes = {"vocab_size": 50, "max_seq_length": 8, "num_layers": 8, "num_heads": 2}
    for is_tied in (True, False):
        mesh = ParallelMesh.single()
        object.__setattr__(mesh, "layout", ParallelLayout(2, pp=2, vpp=2, shape="v"))
        with torch.device("meta"):
            model = GPT(GPTConfig.llama(**sizes, hidden_size=16, tie_embeddings=is_tied), mesh)
        assert (model.head is None) == is_tied
        assert model.chunk_of(WORD_EMBEDDING) is None
        assert model.chunk_of("layers.0.mlp.up.weight") == 0
        assert model.chunk_of("layers.7.mlp.up.weight") == 1
        assert model.chunk_of("final_norm.weight") == 1
