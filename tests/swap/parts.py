"""Parts of models as single ranks hold them, and comparisons of replaced models with Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from lightning_megatron.swap.families import Family
from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from lightning_megatron.swap.tensors.packed import class_parameters_of
from lightning_megatron.swap.weights.load import reader_of
from tests.oracles import assert_equal, copy_to_full, float32_as_float64, gather_all
from tests.swap.families import EXPERTS, WITH_SLOPES, V

B, S = 3, 10
Call = dict[str, Any]
#: Logits, loss and gradients by name.
Reference = tuple[Tensor, Tensor, dict[str, Tensor]]


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


def part_on_meta(config: Any, mesh: ParallelMesh) -> GPT | Encoder:
    """Return a rank's part of a model on the meta device."""
    with torch.device("meta"):
        return (Encoder if isinstance(config, EncoderConfig) else GPT)(config, mesh)


def swapped(model: Any, mesh: ParallelMesh | None = None) -> Any:
    """Replace the layers of a model in place, and return the model."""
    root = nn.ModuleDict({"model": model})
    parallelize(root, mesh or ParallelMesh.single())
    assert root["model"] is model
    assert isinstance(model, ReplacedModel)
    return model


def name_of_values(name: str, parameter: Tensor) -> str:
    """Return the name of the parameter whose values a parameter has, which is the original of a tied
    copy, in a model that the root calls ``model``.
    """
    tied_to = shard_spec_of(parameter).tied_to
    return name if tied_to is None else tied_to.removeprefix("model.")


def full_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the full tensors of a model that one process holds."""
    tensors = {}
    for name, parameter in model.named_parameters():
        spec = shard_spec_of(parameter)
        tensors[name] = parameter.new_empty(spec.full_shape)
        copy_to_full(spec, parameter.detach(), tensors[name])
    return tensors


def in_class_tree(
    full: Iterable[tuple[str, Tensor]], family: Family, config: Any
) -> Iterator[tuple[str, Tensor]]:
    """Convert full tensors of layers to those of the class's module tree."""
    table = {tensor.target: tensor for tensor in family.tensors(config)}
    for name, tensor in full:
        parameters = class_parameters_of(table[name], family.packed)
        parts = tensor.split([parameter.num_rows for parameter in parameters])
        yield from zip([parameter.name for parameter in parameters], parts, strict=True)


def inputs() -> dict[str, Call]:
    """Return calls of every kind: full rows, padding on either side, packed sequences and odd
    lengths.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, V, (B, S), generator=generator)
    labels = tokens.clone()
    labels[0, 4:6] = -100
    right, left = torch.ones(B, S, dtype=torch.long), torch.ones(B, S, dtype=torch.long)
    right[1, 7:], left[2, :3] = 0, 0
    packed = torch.cat([torch.arange(4), torch.arange(6)]).expand(B, S)
    gaps = torch.tensor([0, 2, 4, 5, 6, 9, 11, 12, 20, 21]).expand(B, S)
    # The first token follows padding and cannot be predicted.
    ignored = F.pad(left, (1, 0), value=1)[:, :-1] * left == 0
    whole = {"input_ids": tokens, "labels": labels}
    to_the_right = {**whole, "attention_mask": right}
    return {
        "whole": whole,
        "padded right": {**to_the_right, "labels": labels.masked_fill(right == 0, -100)},
        "padded right, with labels there": to_the_right,
        "padded left": {
            **whole,
            "attention_mask": left,
            "labels": labels.masked_fill(ignored, -100),
            "position_ids": (left.cumsum(-1) - 1).clamp(min=0),
        },
        "packed": {**whole, "position_ids": packed, "use_cache": False},
        # Positions cut rows only where Hugging Face's model fills no cache.
        "restarting positions": {**whole, "position_ids": packed},
        "positions with gaps": {**whole, "position_ids": gaps},
        "positions with gaps, without a cache": {**whole, "position_ids": gaps, "use_cache": False},
        "odd": {"input_ids": tokens[:, :7], "labels": labels[:, :7]},
    }


def expected_of(twin: Any, call: Mapping[str, Any]) -> Reference:
    """Return Hugging Face's logits, the loss in float64 and the gradients by name."""
    twin.zero_grad()
    logits = logits_of(twin, {name: tensor for name, tensor in call.items() if name != "labels"})
    shifted = F.pad(call["labels"], (0, 1), value=-100)[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), shifted.flatten())
    loss.backward()
    gradients = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    return logits.detach(), loss.detach(), gradients


def logits_of(twin: Any, call: Mapping[str, Any]) -> Tensor:
    """Return Hugging Face's logits, in float64 throughout."""
    kind, is_packed = twin.config.model_type, not call.get("use_cache", True)
    if kind not in (*WITH_SLOPES, *EXPERTS):
        return twin(**call).logits
    with float32_as_float64():
        if not is_packed or "position_ids" not in call or kind not in (*WITH_SLOPES, "gpt_oss"):
            return twin(**call).logits
        cuts = call["position_ids"].diff(prepend=call["position_ids"][:, :1] - 1) != 1
        if kind == "gpt_oss":
            return twin(**call, attention_mask=masks_of_sequences(cuts.cumsum(-1), twin)).logits
        # Hugging Face's models with slopes do not support packed sequences.
        starts = [*(cuts[0].nonzero().flatten().tolist()), S]
        starts = starts if starts[0] == 0 else [0, *starts]
        parts = call["input_ids"].split([end - start for start, end in pairwise(starts)], 1)
        return torch.cat([twin(input_ids=part).logits for part in parts], 1)


def masks_of_sequences(sequence: Tensor, twin: Any) -> dict[str, Tensor]:
    """Return the masks that the class of gpt-oss needs for packed sequences."""
    index = torch.arange(sequence.shape[-1])
    distance = index[:, None] - index
    attends = (sequence[:, :, None] == sequence[:, None]) & (distance >= 0)
    near = attends & (distance < twin.config.sliding_window)
    lowest = torch.finfo(torch.float64).min
    return {
        name: torch.zeros(mask.shape, dtype=torch.float64).masked_fill_(~mask, lowest)[:, None]
        for name, mask in (("full_attention", attends), ("sliding_attention", near))
    }


def expected_gradients(model: ReplacedModel, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the full gradients of a replaced model's parameters, converted from Hugging Face's
    gradients by the family's table.
    """
    reader = reader_of(gradients, model.family)
    return {
        tensor.target: tensor.full(reader, torch.float64)
        for tensor in model.family.class_tensors(model.body.config)
        if not tensor.target.endswith("e_score_correction_bias")
    }


def check_outputs(model: Any, call: Mapping[str, Any], expected: Reference, label: str) -> Tensor:
    """Compare the loss of a call and its logits outside of padding; return the loss."""
    logits, loss, _ = expected
    output = model(**call)
    unpadded = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
    assert_equal(output.logits[unpadded], logits[unpadded], f"{label}: logits", 1e-9)
    assert_equal(output.loss, loss, f"{label}: loss", 1e-9)
    return output.loss


def check_gradients(model: Any, mesh: ParallelMesh, expected: Reference, label: str) -> None:
    """Compare the gradients of this rank's parameters, averaged over data ranks as in training."""
    full, placed = expected_gradients(model, expected[2]), {}
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    is_tied = getattr(model.body.config, "tie_embeddings", False)
    for name, parameter in model.named_parameters():
        spec = shard_spec_of(parameter, mesh.tp.rank)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        all_reduce_(gradient, mesh.replica_axis(spec.is_expert)).div_(mesh.data.size)
        if mesh.pp.size > 1 and (spec.tied_to or (is_tied and parameter is embedding)):
            # Each copy of a tied weight has a part of its gradient.
            all_reduce_(gradient, mesh.embedding)
        if not spec.is_expert:
            placed[name] = gradient, spec
            continue
        if spec.partial:
            all_reduce_(gradient, mesh.tp)
        part = spec.shard(full[name], gradient.shape[spec.dim])
        assert_equal(gradient, part, f"{label}: gradient of {name}", 1e-9)
    names = {name: name_of_values(name, model.get_parameter(name)) for name in placed}
    for name, gradient in gather_all(placed, mesh, sum_copies=True).items():
        assert_equal(gradient, full[names[name]], f"{label}: gradient of {name}", 1e-9)


def check_call(model: Any, mesh: ParallelMesh, call: Call, expected: Reference, label: str) -> None:
    """Compare logits, loss and gradients of a call with Hugging Face's."""
    model.zero_grad()
    check_outputs(model, call, expected, label).backward()
    check_gradients(model, mesh, expected, label)
