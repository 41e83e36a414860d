"""Parameters of replaced models and their optimizer states convert to tensors of the Hugging Face
class and back.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.swap import parallelize
from lightning_megatron.swap.hugging_face.class_tensors import (
    ClassTensors,
    class_name_in,
    class_states,
    in_class_order,
    state_from_class,
)
from tests.swap import encoders, expert_models, families

TWINS: dict[str, Any] = dict.fromkeys(families.CASES, families.twin_of)
TWINS |= dict.fromkeys(expert_models.CASES, expert_models.twin_of) | dict.fromkeys(
    encoders.CASES, encoders.encoder_of
)


def swapped(twin: nn.Module) -> tuple[nn.Module, list[ClassTensors]]:
    root = nn.ModuleDict({"model": deepcopy(twin)})
    parallelize(root, ParallelMesh.single())
    return root, ClassTensors.of_module(root)


def unpadded(root: nn.Module) -> dict[str, Tensor]:
    """Return parameters as checkpoints store them, with vocabularies without padding."""
    shapes = {
        name: shard_spec_of(parameter).full_shape or parameter.shape
        for name, parameter in root.named_parameters()
    }
    return {
        name: parameter.detach()[: shapes[name][0]] for name, parameter in root.named_parameters()
    }


@pytest.mark.parametrize("case", TWINS)
def test_parameters_convert_to_class_tensors_in_class_order_and_back(case: str) -> None:
    twin = TWINS[case](case)
    root, models = swapped(twin)
    ours, theirs = (
        unpadded(root),
        {
            f"model.{name}": class_parameter.detach()
            for name, class_parameter in twin.named_parameters()
        },
    )
    assert list(dict.fromkeys(class_name_in(models, name) for name in ours)) == list(theirs)
    reversed_names = in_class_order(models, ["first", *reversed(ours), "last"])
    assert list(dict.fromkeys(class_name_in(models, name) for name in reversed_names)) == [
        "first",
        *theirs,
        "last",
    ]
    converted = class_states(models, "exp_avg", ours)
    assert converted.keys() == theirs.keys()
    for name, tensor in converted.items():
        assert torch.equal(tensor, theirs[name]), name
    for name, parameter in ours.items():
        class_tensor = theirs[class_name_in(models, name)]
        restored = state_from_class(models[0], name, "exp_avg", class_tensor, class_tensor.shape)
        assert torch.equal(restored, parameter), name


def states_of(case: str, state_of: Any) -> tuple[list[ClassTensors], dict[str, Any]]:
    root, models = swapped(TWINS[case](case))
    return models, {name: state_of(parameter) for name, parameter in root.named_parameters()}


def test_different_scalar_states_of_one_class_tensor_are_refused() -> None:
    models, steps = states_of("mixtral", lambda _: torch.tensor(3.0))
    assert all(step == 3 for step in class_states(models, "step", steps).values())
    expert = next(name for name in steps if name.endswith("gate_up_proj.2"))
    steps[expert] = torch.tensor(2.0)
    with pytest.raises(UnsupportedError, match=rf"'step' is .* and 2.0 for '{expert}'"):
        class_states(models, "step", steps)


def test_states_of_an_expert_stack_without_one_expert_are_refused() -> None:
    models, states = states_of("mixtral", lambda parameter: parameter.detach())
    del states["model.model.layers.1.mlp.experts.down_proj.4"]
    with pytest.raises(
        CheckpointMismatchError, match=r"'model.layers.1.mlp.experts.down_proj.4' of .* missing"
    ):
        class_states(models, "exp_avg", states)


def test_row_states_are_refused_for_tensors_that_the_class_stores_differently() -> None:
    models, states = states_of("gpt2", lambda parameter: parameter.detach().sum(-1))
    assert class_states(
        models, "row", {"model.transformer.ln_f.weight": states["model.transformer.ln_f.weight"]}
    )
    with pytest.raises(
        UnsupportedError, match=r"'row' of 'model.transformer.h.0.attn.c_attn.weight' has shape"
    ):
        class_states(models, "row", states)
    name = "model.transformer.h.0.attn.c_attn.weight"
    with pytest.raises(UnsupportedError, match=r"an element-wise optimizer such as AdamW"):
        state_from_class(models[0], name, "row", torch.ones(48), (48, 144))
