"""Hugging Face encoders that are replaced in place keep their outputs, losses and gradients in one
process, with every kind of padding, and refuse what they cannot compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.swap import parallelize
from lightning_megatron.swap.hugging_face.encoder_model import HuggingFaceEncoder
from tests.oracles import assert_equal
from tests.swap.families import ENCODERS, PADDING, V, exact_twin, transformers, twin_of
from tests.swap.parts import Call, check_gradients, mesh_of, swapped

B, S = 3, 10
MESH = ParallelMesh.single()
TOKENS = torch.arange(16).view(2, 8)
#: Entries of outputs that are compared.
NAMES = ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")


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
    to_the_right, to_the_left = (tokens.masked_fill(m == 0, PADDING) for m in (right, left))
    return {
        "whole": {"input_ids": tokens.masked_fill(tokens == PADDING, 0)},
        "padded right": {"input_ids": to_the_right, "attention_mask": right},
        "padded left": {"input_ids": to_the_left, "attention_mask": left},
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
        is_ignored = torch.rand(labels.shape, generator=generator) < 0.5
        return {**call, "labels": labels.masked_fill(is_ignored, -100)}
    if "classes" in case:
        return {**call, "labels": torch.tensor([1, 4, 0])}
    if "choices" in case:
        # Each sample has two choices; the second choice is the row of another sample.
        choices = {name: torch.stack((x, x.roll(1, 0)), 1) for name, x in call.items()}
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


def compare(
    case: str, mesh: ParallelMesh, kinds: Iterable[str] | None = None, **changes: Any
) -> None:
    """Compare outputs, losses and gradients of calls, all recomputations of one call included."""
    twin, model = exact_twin(case), swapped(exact_twin(case, **changes), mesh)
    calls = inputs(twin)
    for kind in kinds or calls:
        call = labelled(case, calls[kind])
        twin.zero_grad()
        expected = twin(**call)
        loss_of(expected).backward()
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in twin.named_parameters()
        }
        for recompute in ("none", "selective", "full") if kind == "padded left" else ("none",):
            label = f"{case}, {kind}, {recompute}, {mesh.layout} {mesh.context.transport}"
            model.body.recompute = recompute
            model.zero_grad()
            output = model(**call)
            assert isinstance(output, type(expected)), label
            assert tuple(output) == tuple(expected), label
            for name in NAMES:
                if expected.get(name) is not None:
                    assert_equal(getattr(output, name), expected[name], f"{label}: {name}", 1e-9)
            assert_equal(loss_of(output), loss_of(expected), f"{label}: loss", 1e-9)
            loss_of(output).backward()
            unused = torch.zeros(())
            check_gradients(model, mesh, (unused, unused, gradients), label)


def loss_and_gradients_under_dropout(
    case: str, model: Any, recompute: str, step: int
) -> list[Tensor]:
    """Return the loss and the gradients of a model in training mode."""
    call = labelled(case, inputs(exact_twin(case))["padded right"])
    model.body.recompute = recompute
    model.zero_grad()
    model.body.mesh.random.begin_microbatch(step, 0)
    loss = loss_of(model(**call))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("case", ENCODERS)
def test_encoders_match_hugging_face(case):
    compare(case, MESH)


PROBLEMS = {
    "regression": torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5),
    "single_label_classification": torch.tensor([1, 4, 0]),
    "multi_label_classification": torch.tensor(
        [[1.0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.float64
    ),
}


@pytest.mark.parametrize("case", ["bert classes", "roberta classes"])
def test_classification_losses_match_hugging_face_for_every_problem_type(case):
    settings = [({"problem_type": problem}, targets) for problem, targets in PROBLEMS.items()]
    settings += [({}, PROBLEMS["single_label_classification"])]
    settings += [({}, PROBLEMS["multi_label_classification"])]
    for changes, targets in [*settings, ({"num_labels": 1}, PROBLEMS["regression"][:, :1])]:
        twin, model = exact_twin(case, **changes), swapped(exact_twin(case, **changes))
        call = {**inputs(twin)["padded left"], "labels": targets}
        assert_equal(model(**call).loss, twin(**call).loss, f"{case}, {changes}", 1e-9)


REFUSED: list[tuple[str, Call, str]] = [
    ("bert", {"labels": TOKENS}, "takes no labels"),
    ("bert masked", {"output_attentions": True}, "takes no output_attentions"),
    ("bert choices", {}, r"takes input_ids of the shape \(batch, choices, tokens\)"),
    ("roberta", {"encoder_hidden_states": TOKENS}, "takes no encoder_hidden_states"),
    ("roberta", {"attention_mask": torch.ones(2, 8, 8)}, "attention_mask must have a number for each token"),
    ("bert", {"inputs_embeds": torch.ones(2, 8, 48)}, "either tokens or vectors, .*: both"),
]  # fmt: skip


def test_unsupported_arguments_of_calls_are_refused_by_name():
    for case, call, message in REFUSED:
        model = swapped(twin_of(case))
        with pytest.raises(UnsupportedError, match=message):
            model(TOKENS, **call)


def test_encoders_inside_other_modules_are_replaced_only_if_their_class_has_a_table():
    model = transformers.BertForPreTraining(transformers.BertConfig(**ENCODERS["bert"][1]))
    parallelize(nn.ModuleDict({"model": model}), MESH)
    assert type(model.bert) is transformers.BertModel
    user_module = nn.Sequential(nn.ModuleDict({"body": twin_of("roberta")}))
    parallelize(user_module, MESH)
    assert isinstance(user_module[0]["body"], HuggingFaceEncoder)


@pytest.mark.parametrize("case", ["bert masked", "roberta classes"])
def test_frozen_encoders_stay_frozen_after_replacement(case):
    for pp_rank in (0, 1):
        twin = twin_of(case)
        twin.base_model.requires_grad_(False)
        base = f"{twin.base_model_prefix}."
        model = swapped(twin, mesh_of(2, 2, 0, pp_rank))
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        heads = {name for name, _ in model.named_parameters() if not name.startswith(base)}
        # A tied weight belongs to the embedding, and BERT's pooler to the encoder.
        assert trained == heads - {"cls.predictions.decoder.weight"}
        assert bool(heads) == bool(pp_rank)
