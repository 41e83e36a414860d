"""Every family in two pipeline stages has the loss and all gradients of Hugging Face's model."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from tests.oracles import assert_equal
from tests.swap.families import CASES
from tests.swap.parts import expected_gradients, name_of_values
from tests.swap.test_language_models import exact_twin, expected_of, inputs
from tests.world import run_world

pytest.importorskip("transformers")


def compare_stages(case: str, mesh: ParallelMesh) -> None:
    # The padding token occurs in the input, and some families do not train its vector.
    changes = {"pad_token_id": int(inputs()["whole"]["input_ids"][0, 1])}
    changes |= {"n_layer": 4} if case == "gpt2" else {"num_hidden_layers": 4}
    types = CASES[case][1].get("layer_types")
    changes |= {} if types is None else {"layer_types": [*types, types[0]]}
    twin, root = exact_twin(case, **changes), nn.ModuleDict({"model": exact_twin(case, **changes)})
    parallelize(root, mesh)
    model, call = root["model"], inputs()["padded left"]
    _, loss, gradients = expected_of(twin, call)
    executor = PipelineExecutor(mesh, model.gpt)
    microbatch = Microbatch(call, len(call["input_ids"]))
    results = executor.run(
        lambda data: model(**data).loss, [microbatch], backward=True, loss_of=lambda loss, _: loss
    )
    assert len(results) == (1 if mesh.pp.is_last else 0)
    for result in results:
        assert_equal(result.detach(), loss, f"{case}: loss", 1e-9)
    expected = expected_gradients(model, gradients)
    for name, parameter in model.named_parameters():
        spec = shard_spec_of(parameter)
        embedding_weight = getattr(model.get_input_embeddings(), "weight", None)
        if spec.tied_to or (parameter is embedding_weight and model.gpt.config.tie_embeddings):
            # Each copy of a tied weight has a part of its gradient.
            all_reduce_(parameter.grad, mesh.embedding)
        assert_equal(
            parameter.grad[: spec.full_shape[0]],
            expected[name_of_values(name, parameter)],
            f"{case}: {name}",
            1e-9,
        )


def check_families(rank: int, size: int) -> None:
    mesh = ParallelMesh.create(ParallelLayout(size, pp=size))
    for case in CASES:
        compare_stages(case, mesh)
    mesh.destroy()


def test_two_stages_have_the_loss_and_gradients_of_hugging_face() -> None:
    run_world(check_families, 2)
