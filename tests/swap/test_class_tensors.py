"""Every parameter of a replaced model, and what an optimizer keeps for it, is that of its class in
another form.
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
    """Return what checkpoints have of parameters: vocabularies without padding."""
    shapes = {
        name: shard_spec_of(one).full_shape or one.shape for name, one in root.named_parameters()
    }
    return {name: one.detach()[: shapes[name][0]] for name, one in root.named_parameters()}


@pytest.mark.parametrize("case", TWINS)
def test_parameters_become_those_of_the_class_in_its_order_and_come_back(case: str) -> None:
    twin = TWINS[case](case)
    root, models = swapped(twin)
    own, theirs = (
        unpadded(root),
        {f"model.{name}": one.detach() for name, one in twin.named_parameters()},
    )
    assert list(dict.fromkeys(class_name_in(models, name) for name in own)) == list(theirs)
    backwards = in_class_order(models, ["first", *reversed(own), "last"])
    assert list(dict.fromkeys(class_name_in(models, name) for name in backwards)) == [
        "first",
        *theirs,
        "last",
    ]
    found = class_states(models, "exp_avg", own)
    assert found.keys() == theirs.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, theirs[name]), name
    for name, parameter in own.items():
        whole = theirs[class_name_in(models, name)]
        again = state_from_class(models[0], name, "exp_avg", whole, whole.shape)
        assert torch.equal(again, parameter), name


def states_of(case: str, value: Any) -> tuple[list[ClassTensors], dict[str, Any]]:
    root, models = swapped(TWINS[case](case))
    return models, {name: value(one) for name, one in root.named_parameters()}


def test_scalars_of_what_is_one_in_the_class_must_agree() -> None:
    models, steps = states_of("mixtral", lambda _: torch.tensor(3.0))
    assert all(step == 3 for step in class_states(models, "step", steps).values())
    expert = next(name for name in steps if name.endswith("gate_up_proj.2"))
    steps[expert] = torch.tensor(2.0)
    with pytest.raises(UnsupportedError, match=rf"'step' is .* and 2.0 for '{expert}'"):
        class_states(models, "step", steps)


def test_a_stack_without_one_of_its_experts_is_refused() -> None:
    models, states = states_of("mixtral", lambda one: one.detach())
    del states["model.model.layers.1.mlp.experts.down_proj.4"]
    with pytest.raises(
        CheckpointMismatchError, match=r"'model.layers.1.mlp.experts.down_proj.4' of .* missing"
    ):
        class_states(models, "exp_avg", states)


def test_state_of_another_shape_stays_only_where_the_class_stores_the_same() -> None:
    models, states = states_of("gpt2", lambda one: one.detach().sum(-1))
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
