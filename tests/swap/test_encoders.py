"""Hugging Face encoders replaced in place: their own outputs, losses and gradients, in every
layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from lightning_megatron.swap.hugging_face.encoder_model import HuggingFaceEncoder
from tests.oracles import assert_equal, assert_same_gradients
from tests.swap.encoders import CASES, PADDING, V, encoder_of
from tests.swap.parts import expected_gradients
from tests.sweeps import chosen
from tests.world import run_world

B, S = 3, 10
ALONE = chosen(
    list(CASES), "bert", "roberta masked", "bert classes", "bert choices", "roberta spans"
)
SHARED = chosen(
    list(CASES), "bert masked", "roberta", "roberta classes", "roberta choices", "bert spans"
)
Call = dict[str, Any]
#: Entries of outputs.
NAMES = ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")


def exact(case: str, **changes: Any) -> nn.Module:
    return encoder_of(case, torch.float64, attn_implementation="sdpa", **changes).eval()


def inputs(model: nn.Module) -> dict[str, Call]:
    """Return calls of every kind: whole rows, padding on either side, positions and kinds of
    tokens, vectors.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, V, (B, S), generator=generator)
    right, left = torch.ones(B, S, dtype=torch.long), torch.ones(B, S, dtype=torch.long)
    right[1, 7:], left[2, :3] = 0, 0
    kinds = torch.randint(0, 3, (B, S), generator=generator)
    vectors = model.get_input_embeddings()(tokens).detach()
    positions = torch.randint(0, 20, (B, S), generator=generator)
    return {
        "whole": {"input_ids": tokens.masked_fill(tokens == PADDING, 0)},
        "padded right": {
            "input_ids": tokens.masked_fill(right == 0, PADDING),
            "attention_mask": right,
        },
        "padded left": {
            "input_ids": tokens.masked_fill(left == 0, PADDING),
            "attention_mask": left,
        },
        "kinds": {"input_ids": tokens, "token_type_ids": kinds},
        "positions": {"input_ids": tokens, "position_ids": positions},
        "odd": {"input_ids": tokens[:, :7], "attention_mask": right[:, :7]},
        "vectors": {"inputs_embeds": vectors, "attention_mask": left},
    }


def labelled(case: str, call: Call) -> Call:
    """Return the call with labels, if the class takes some."""
    given = call["input_ids"] if "input_ids" in call else call["inputs_embeds"]
    generator = torch.Generator().manual_seed(2)
    if "masked" in case:
        labels = torch.randint(0, V, given.shape[:2], generator=generator)
        return {
            **call,
            "labels": labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.5, -100),
        }
    if "classes" in case:
        return {**call, "labels": torch.tensor([1, 4, 0])}
    if "choices" in case:
        # Two answers of each sample; the second one has other rows.
        both = {name: torch.stack((one, one.roll(1, 0)), 1) for name, one in call.items()}
        return {**both, "labels": torch.tensor([1, 0, 1])}
    if "spans" in case:
        # One end lies behind the row, and does not count.
        places = torch.tensor([1, 4, 0]), torch.tensor([[5], [4], [S + 7]])
        return {**call, "start_positions": places[0], "end_positions": places[1]}
    return call


def loss_of(output: Any) -> Tensor:
    """Return a number that depends on all of the output."""
    if output.loss is not None:
        return output.loss
    return output.last_hidden_state.square().mean() + output.pooler_output.sin().sum()


def swapped(model: nn.Module, mesh: ParallelMesh) -> HuggingFaceEncoder:
    root = nn.ModuleDict({"model": model})
    parallelize(root, mesh)
    assert isinstance(root["model"], HuggingFaceEncoder)
    return root["model"]


@dataclass(frozen=True)
class Truth:
    """Hold what Hugging Face's model answers to a call, and the gradients of its parameters."""

    kind: str
    call: Call
    output: Any
    gradients: dict[str, Tensor]


def truths(case: str) -> list[Truth]:
    twin, found = exact(case), []
    for kind, call in inputs(twin).items():
        call = labelled(case, call)
        twin.zero_grad()
        output = twin(**call)
        output.loss = output.get("loss")
        loss_of(output).backward()
        gradients = {
            n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in twin.named_parameters()
        }
        found.append(Truth(kind, call, output, gradients))
    return found


def compare(case: str, *meshes: ParallelMesh, **changes: Any) -> None:
    expected = truths(case)
    for mesh in meshes:
        model = swapped(exact(case, **changes), mesh)
        for truth in expected:
            compare_call(
                model,
                truth,
                f"{case}, {truth.kind}, tp={mesh.tp.size} sp={mesh.sequence_parallel} "
                f"cp={mesh.cp.size} {mesh.context.transport}",
                mesh,
            )


def compare_call(model: HuggingFaceEncoder, truth: Truth, what: str, mesh: ParallelMesh) -> None:
    for recompute in ("none", "selective", "full") if truth.kind == "padded left" else ("none",):
        model.body.recompute = recompute
        model.zero_grad()
        output = model(**truth.call)
        for name in NAMES:
            if truth.output.get(name) is not None:
                assert_equal(getattr(output, name), truth.output[name], f"{what}: {name}", 1e-9)
        loss = loss_of(output)
        assert_equal(loss, loss_of(truth.output), f"{what}: loss", 1e-9)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
            if mesh.cp.size > 1:
                # Ranks that share sequences are data ranks: gradients are means over them.
                all_reduce_(parameter.grad.div_(mesh.cp.size), mesh.cp)
        assert_same_gradients(model, mesh, expected_gradients(model, truth.gradients), what)


def check_problems(mesh: ParallelMesh) -> None:
    labels = {
        "regression": torch.randn(
            B, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
        ),
        "single_label_classification": torch.tensor([1, 4, 0]),
        "multi_label_classification": torch.tensor(
            [[1.0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
        ).double(),
    }
    for case in ("bert classes", "roberta classes"):
        for problem, given in labels.items():
            for said in (problem, None) if problem != "regression" else (problem,):
                twin, model = (
                    exact(case, problem_type=said),
                    swapped(exact(case, problem_type=said), mesh),
                )
                call = {**inputs(twin)["padded left"], "labels": given}
                assert_equal(model(**call).loss, twin(**call).loss, f"{case}, {problem}", 1e-9)
        one = {"num_labels": 1}
        twin, model = exact(case, **one), swapped(exact(case, **one), mesh)
        call = {**inputs(twin)["padded left"], "labels": labels["regression"][:, :1]}
        assert_equal(model(**call).loss, twin(**call).loss, f"{case}, one number", 1e-9)


def check_dropout(mesh: ParallelMesh) -> None:
    """Check that the tensor-parallel ranks drop alike, and recomputation drops the same again."""
    for case in CASES:
        model = swapped(exact(case), mesh).train()
        call = labelled(case, inputs(exact(case))["padded right"])
        found = []
        for recompute in ("none", "full"):
            model.body.recompute = recompute
            model.zero_grad()
            mesh.random.begin_microbatch(7, 0)
            loss = loss_of(model(**call))
            loss.backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            found.append([loss.detach(), *gradients])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True)), case
        full = loss.detach().clone()
        torch.distributed.broadcast(full, 0)
        assert torch.equal(full, loss.detach()), f"{case}: the loss is the same on all ranks"
        mesh.random.begin_microbatch(8, 0)
        assert not torch.equal(loss_of(model(**call)), loss), f"{case}: another step drops others"


def check_twins(rank: int, size: int) -> None:
    layout = ParallelLayout(world_size=size, tp=size)
    meshes = [ParallelMesh.create(layout, sequence_parallel=parallel) for parallel in (False, True)]
    for case in SHARED if size == 2 else chosen(list(CASES), "roberta masked"):
        compare(case, *meshes)
    for mesh in meshes:
        if size == 2:
            check_problems(mesh)
            check_dropout(mesh)
        mesh.destroy()


@pytest.mark.parametrize("case", ALONE)
def test_one_process_computes_what_hugging_face_does(case: str) -> None:
    compare(case, ParallelMesh.single())


def test_losses_are_those_of_the_kind_of_problem() -> None:
    check_problems(ParallelMesh.single())


@pytest.mark.parametrize("size", chosen([2, 3, 4], 2, 3))
def test_ranks_compute_what_hugging_face_does(size: int) -> None:
    run_world(check_twins, size)
