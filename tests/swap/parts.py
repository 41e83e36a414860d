"""Parts of models as single ranks hold them, built in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.families import Family
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from lightning_megatron.swap.pretrained.replace import build_swapped_model
from lightning_megatron.swap.weights.load import reader_of
from tests.oracles import assert_equal


def mesh_of(
    tp: int = 1,
    pp: int = 1,
    tp_rank: int = 0,
    pp_rank: int = 0,
    stage_layers: Sequence[int] | None = None,
) -> ParallelMesh:
    """Return the mesh of a rank without other processes, for code that does not communicate."""
    axes = {
        "tp": MeshAxis("tp", tuple(range(tp)), tp_rank),
        "pp": MeshAxis("pp", tuple(range(pp)), pp_rank),
    }
    layout = ParallelLayout(tp * pp, tp=tp, pp=pp, stage_layers=stage_layers)
    return replace(ParallelMesh.single(), layout=layout, **axes)


def expert_mesh_of(ep: int, etp: int, ep_rank: int, etp_rank: int) -> ParallelMesh:
    """Return the mesh of a rank of an expert grid without other processes; the rank holds full
    tensors, except for experts.
    """
    axes = {
        "ep": MeshAxis("ep", tuple(range(ep)), ep_rank),
        "etp": MeshAxis("etp", tuple(range(etp)), etp_rank),
    }
    return replace(ParallelMesh.single(), layout=ParallelLayout(ep * etp, ep=ep, etp=etp), **axes)


def part_on_meta(config: Any, mesh: ParallelMesh) -> GPT:
    """Return a rank's part of a model on the meta device."""
    with torch.device("meta"):
        return GPT(config, mesh)


def replaced(source: Any, family: Family, mesh: ParallelMesh) -> Any:
    """Replace the layers of a model by this rank's part of ours, and return the model."""
    swap = build_swapped_model("model", source, family, mesh)
    swap.fill()
    swap.install()
    assert isinstance(source, ReplacedModel)
    return source


def name_of_values(name: str, parameter: Tensor) -> str:
    """Return the name of the parameter whose values a parameter has, which is the original of a tied
    copy, in a model that the root calls ``model``.
    """
    tied_to = shard_spec_of(parameter).tied_to
    return name if tied_to is None else tied_to.removeprefix("model.")


def full_tensors(model: GPT) -> dict[str, Tensor]:
    """Return the full tensors of a model that one process holds."""
    tensors = {}
    for name, parameter in model.named_parameters():
        spec = shard_spec_of(parameter)
        tensors[name] = parameter.new_empty(spec.full_shape)
        spec.copy_to_full(parameter.detach(), tensors[name])
    return tensors


def expected_gradients(model: ReplacedModel, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the full gradients of a replaced model's parameters, converted from Hugging Face's
    gradients by the family's table.
    """
    reader, table = (
        reader_of(gradients, model.family),
        model.family.class_tensors(model.body.config),
    )
    return {
        tensor.target: tensor.full(reader, torch.float64)
        for tensor in table
        if not tensor.target.endswith("e_score_correction_bias")
    }


def check_call(
    model: Any, call: Mapping[str, Any], logits: Tensor, loss: Tensor, label: str
) -> None:
    """Compare the loss of a call and its logits outside of padding, and run the backward pass of the
    loss.
    """
    model.zero_grad()
    output = model(**call)
    unpadded = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
    assert_equal(output.logits[unpadded], logits[unpadded], f"{label}: logits", 1e-9)
    assert_equal(output.loss, loss, f"{label}: loss", 1e-9)
    output.loss.backward()
