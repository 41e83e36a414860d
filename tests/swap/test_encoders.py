"""Hugging Face encoders that are replaced in place keep their outputs, losses and gradients in every
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
SINGLE_CASES = chosen(
    list(CASES), "bert", "roberta masked", "bert classes", "bert choices", "roberta spans"
)
TWO_RANK_CASES = chosen(
    list(CASES), "bert masked", "roberta", "roberta classes", "roberta choices", "bert spans"
)
Call = dict[str, Any]
#: Entries of outputs that are compared.
NAMES = ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")


def exact_encoder(case: str, **changes: Any) -> nn.Module:
    return encoder_of(case, torch.float64, attn_implementation="sdpa", **changes).eval()


def inputs(model: nn.Module) -> dict[str, Call]:
    """Return calls of every kind: full rows, padding on either side, token types, positions, odd
    lengths and vectors.
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
    batch = call["input_ids"] if "input_ids" in call else call["inputs_embeds"]
    generator = torch.Generator().manual_seed(2)
    if "masked" in case:
        labels = torch.randint(0, V, batch.shape[:2], generator=generator)
        return {
            **call,
            "labels": labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.5, -100),
        }
    if "classes" in case:
        return {**call, "labels": torch.tensor([1, 4, 0])}
    if "choices" in case:
        # Each sample has two choices; the second choice is the row of another sample.
        choices = {
            name: torch.stack((tensor, tensor.roll(1, 0)), 1) for name, tensor in call.items()
        }
        return {**choices, "labels": torch.tensor([1, 0, 1])}
    if "spans" in case:
        # The last end lies behind its row and is ignored.
        spans = torch.tensor([1, 4, 0]), torch.tensor([[5], [4], [S + 7]])
        return {**call, "start_positions": spans[0], "end_positions": spans[1]}
    return call


def loss_of(output: Any) -> Tensor:
    """Return a loss that depends on every output."""
    if output.get("loss") is not None:
        return output.loss
    return output.last_hidden_state.square().mean() + output.pooler_output.sin().sum()


def swapped(model: nn.Module, mesh: ParallelMesh) -> HuggingFaceEncoder:
    root = nn.ModuleDict({"model": model})
    parallelize(root, mesh)
    assert isinstance(root["model"], HuggingFaceEncoder)
    return root["model"]


@dataclass(frozen=True)
class Reference:
    """Hold the output of Hugging Face's model for a call, and the gradients of its parameters."""

    kind: str
    call: Call
    output: Any
    gradients: dict[str, Tensor]


def references_of(case: str) -> list[Reference]:
    twin, references = exact_encoder(case), []
    for kind, call in inputs(twin).items():
        call = labelled(case, call)
        twin.zero_grad()
        output = twin(**call)
        output.loss = output.get("loss")
        loss_of(output).backward()
        gradients = {
            n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in twin.named_parameters()
        }
        references.append(Reference(kind, call, output, gradients))
    return references


def compare(case: str, *meshes: ParallelMesh, **changes: Any) -> None:
    references = references_of(case)
    for mesh in meshes:
        model = swapped(exact_encoder(case, **changes), mesh)
        for reference in references:
            compare_call(
                model,
                reference,
                f"{case}, {reference.kind}, tp={mesh.tp.size} sp={mesh.sequence_parallel} "
                f"cp={mesh.cp.size} {mesh.context.transport}",
                mesh,
            )


def compare_call(
    model: HuggingFaceEncoder, reference: Reference, label: str, mesh: ParallelMesh
) -> None:
    for recompute in (
        ("none", "selective", "full") if reference.kind == "padded left" else ("none",)
    ):
        model.body.recompute = recompute
        model.zero_grad()
        output = model(**reference.call)
        for name in NAMES:
            if reference.output.get(name) is not None:
                assert_equal(
                    getattr(output, name), reference.output[name], f"{label}: {name}", 1e-9
                )
        loss = loss_of(output)
        assert_equal(loss, loss_of(reference.output), f"{label}: loss", 1e-9)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
            if mesh.cp.size > 1:
                # Ranks that share sequences are data ranks, so gradients are means over them.
                all_reduce_(parameter.grad.div_(mesh.cp.size), mesh.cp)
        assert_same_gradients(model, mesh, expected_gradients(model, reference.gradients), label)


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
        for problem, targets in labels.items():
            for declared in (problem, None) if problem != "regression" else (problem,):
                twin, model = (
                    exact_encoder(case, problem_type=declared),
                    swapped(exact_encoder(case, problem_type=declared), mesh),
                )
                call = {**inputs(twin)["padded left"], "labels": targets}
                assert_equal(model(**call).loss, twin(**call).loss, f"{case}, {problem}", 1e-9)
        single_label = {"num_labels": 1}
        twin, model = (
            exact_encoder(case, **single_label),
            swapped(exact_encoder(case, **single_label), mesh),
        )
        call = {**inputs(twin)["padded left"], "labels": labels["regression"][:, :1]}
        assert_equal(model(**call).loss, twin(**call).loss, f"{case}, one number", 1e-9)


def check_dropout(mesh: ParallelMesh) -> None:
    """Check that tensor-parallel ranks and recomputation drop the same elements."""
    for case in CASES:
        model = swapped(exact_encoder(case), mesh).train()
        call = labelled(case, inputs(exact_encoder(case))["padded right"])
        results = []
        for recompute in ("none", "full"):
            model.body.recompute = recompute
            model.zero_grad()
            mesh.random.begin_microbatch(7, 0)
            loss = loss_of(model(**call))
            loss.backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            results.append([loss.detach(), *gradients])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), case
        loss_of_rank_0 = loss.detach().clone()
        torch.distributed.broadcast(loss_of_rank_0, 0)
        assert torch.equal(loss_of_rank_0, loss.detach()), (
            f"{case}: the loss is the same on all ranks"
        )
        mesh.random.begin_microbatch(8, 0)
        assert not torch.equal(loss_of(model(**call)), loss), (
            f"{case}: another step drops other elements"
        )


def check_twins(rank: int, size: int) -> None:
    layout = ParallelLayout(world_size=size, tp=size)
    meshes = [ParallelMesh.create(layout, sequence_parallel=parallel) for parallel in (False, True)]
    for case in TWO_RANK_CASES if size == 2 else chosen(list(CASES), "roberta masked"):
        compare(case, *meshes)
    for mesh in meshes:
        if size == 2:
            check_problems(mesh)
            check_dropout(mesh)
        mesh.destroy()


@pytest.mark.parametrize("case", SINGLE_CASES)
def test_encoders_on_one_process_match_hugging_face(case: str) -> None:
    compare(case, ParallelMesh.single())


def test_classification_losses_match_hugging_face_for_every_problem_type() -> None:
    check_problems(ParallelMesh.single())


@pytest.mark.parametrize("size", chosen([2, 3, 4], 2, 3))
def test_encoders_on_several_ranks_match_hugging_face(size: int) -> None:
    run_world(check_twins, size)
