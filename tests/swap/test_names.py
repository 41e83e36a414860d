"""A replaced Hugging Face model remains the same object, with its module tree, its names and its
separate parameters.
"""

from __future__ import annotations

from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups import after_run
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.parameter_stack import ParameterStack
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from tests.oracles import assert_equal, gather_full
from tests.swap.encoders import CASES as ENCODERS
from tests.swap.encoders import encoder_of
from tests.swap.families import CASES, V, twin_of
from tests.swap.test_language_models import exact_twin
from tests.world import run_world

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(0, V, (2, 8), generator=torch.Generator().manual_seed(0))
#: Names of layers that pack rows of several projections into one tensor, or store it transposed.
PACKED = ("c_attn", "c_proj", "c_fc", "query_key_value", "qkv_proj", "gate_up_proj")


def swapped(model: Any, mesh: ParallelMesh | None = None) -> Any:
    root = nn.ModuleDict({"model": model})
    parallelize(root, mesh or ParallelMesh.single())
    assert root["model"] is model
    return model


@pytest.mark.parametrize("case", CASES)
def test_a_decoder_keeps_its_tree_and_the_names_and_order_of_its_parameters(case: str) -> None:
    twin = twin_of(case)
    model = swapped(deepcopy(twin))
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in twin.named_parameters()
    ]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in twin.named_modules()]
    assert set(model.state_dict()) == set(twin.state_dict())
    assert isinstance(model, type(twin))
    assert repr(model) == repr(twin)
    assert all(
        isinstance(ours, type(theirs))
        for ours, theirs in zip(model.modules(), twin.modules(), strict=True)
    )
    assert model.num_parameters() == twin.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == twin.num_parameters(
        exclude_embeddings=True
    )


@pytest.mark.parametrize("case", ENCODERS)
def test_an_encoder_keeps_the_names_and_order_of_its_parameters(case: str) -> None:
    twin = encoder_of(case)
    model = swapped(deepcopy(twin))
    assert repr(model) == repr(twin)
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in twin.named_parameters()
    ]
    assert set(model.state_dict()) == set(dict(twin.named_parameters(remove_duplicate=False)))


def groups_of(model: Any) -> list[dict[str, Any]]:
    """Return optimizer groups by parts of names, like scripts for Hugging Face models."""
    no_decay = ("bias", "layernorm.weight", "ln_", "norm.weight")
    decayed, undecayed, embedding = [], [], []
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or "wte" in name:
            embedding.append(parameter)
        elif any(part in name for part in no_decay):
            undecayed.append(parameter)
        elif parameter.requires_grad:
            decayed.append(parameter)
    return [
        {"params": decayed, "weight_decay": 0.3},
        {"params": undecayed, "weight_decay": 0.0},
        {"params": embedding, "weight_decay": 0.0, "lr": 1e-4},
    ]


def train(model: Any, freeze: str, num_steps: int = 3) -> list[Tensor]:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(freeze not in name)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    assert all(group["params"] for group in optimizer.param_groups)
    losses = []
    for _ in range(num_steps):
        logits = model(input_ids=TOKENS).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(
    ("case", "freeze"),
    [("llama", "layers.1"), ("llama", "k_proj"), ("gpt2", "h.0."), ("qwen2", "q_proj.weight")],
)
def test_groups_and_freezing_by_names_train_like_hugging_face(case: str, freeze: str) -> None:
    expected_losses = train(exact_twin(case), freeze)
    losses = train(swapped(exact_twin(case)), freeze)
    assert expected_losses[0] != expected_losses[-1]
    for step, (loss, expected_loss) in enumerate(zip(losses, expected_losses, strict=True)):
        assert_equal(loss, expected_loss, f"{case} without {freeze}, step {step}", 1e-9)


def test_projections_of_a_joint_layer_have_separate_gradients() -> None:
    twin, model = exact_twin("llama"), swapped(exact_twin("llama"))
    for network in (twin, model):
        network.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
        network(input_ids=TOKENS).logits.square().mean().backward()
    for name, parameter in twin.named_parameters():
        gradient = model.get_parameter(name).grad
        if parameter.grad is None:
            assert gradient is None, name
        else:
            assert_equal(gradient[: len(parameter)], parameter.grad, name, 1e-9)


def test_projections_of_a_joint_layer_are_adjacent_in_memory() -> None:
    model = swapped(twin_of("llama"))
    attention = model.model.layers[1].self_attn
    stacks = [part for part in model.body.modules() if isinstance(part, ParameterStack)]
    stack = next(candidate for candidate in stacks if candidate.parts[0] is attention.q_proj.weight)
    assert [id(part) for part in stack.parts] == [
        id(layer.weight) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    assert stack.concatenate().data_ptr() == attention.q_proj.weight.data_ptr()
    with torch.no_grad():
        attention.k_proj.weight.fill_(7.0)
    start, stop = (
        len(attention.q_proj.weight),
        len(attention.q_proj.weight) + len(attention.k_proj.weight),
    )
    assert (stack.concatenate()[start:stop] == 7).all()
    model.half()
    assert_equal(
        stack.concatenate().float(),
        torch.cat([part.float() for part in stack.parts]),
        "separate in memory",
    )


def test_hooks_of_parameters_change_gradients_like_in_hugging_face() -> None:
    expected: dict[str, Tensor] = {}
    for network in (exact_twin("llama"), swapped(exact_twin("llama"))):
        for number, name in enumerate(
            ("embed_tokens.weight", "layers.1.self_attn.q_proj.weight", "norm.weight")
        ):
            parameter = network.model.get_parameter(name)
            handle = parameter.register_hook(lambda gradient, factor=number + 2: gradient * factor)
            network(input_ids=TOKENS).logits.square().mean().backward()
            handle.remove()
            hooked_gradient = parameter.grad[:V]
            assert_equal(hooked_gradient, expected.setdefault(name, hooked_gradient), name, 1e-9)
            network.zero_grad()


REFUSED = {
    "call": lambda model: model.model(TOKENS),
    "call of a block": lambda model: model.model.layers[0](torch.ones(1, 1, 48)),
    "hook": lambda model: model.model.layers[0].register_forward_hook(print),
    "backward hook": lambda model: model.lm_head.register_full_backward_hook(print),
    "other head": lambda model: setattr(model, "lm_head", nn.Linear(48, V)),
    "other weight": lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.ones(V, 48))),
    "assignment of a state": lambda model: model.load_state_dict(model.state_dict(), assign=True),
    "resize_token_embeddings": lambda model: model.resize_token_embeddings(V + 8),
    "set_input_embeddings": lambda model: model.set_input_embeddings(nn.Embedding(V, 48)),
    "push_to_hub": lambda model: model.push_to_hub("somewhere"),
}


@pytest.mark.parametrize("action", REFUSED)
def test_calls_and_changes_without_effect_are_refused(action: str) -> None:
    model = swapped(twin_of("llama"))
    with pytest.raises(UnsupportedError, match=r"cut over ranks"):
        REFUSED[action](model)


def test_forward_hooks_of_the_full_model_run() -> None:
    model, calls = twin_of("llama"), []
    model.register_forward_hook(lambda *_: calls.append("before"))
    swapped(model)
    model.register_forward_hook(lambda *_: calls.append("after"))
    model(input_ids=TOKENS)
    assert calls == ["before", "after"]


def test_training_modes_follow_the_module_tree() -> None:
    model = twin_of("llama", attention_dropout=0.5).train()
    model.model.layers[0].eval()
    swapped(model)
    blocks = model.body.layers
    assert not blocks["0"].attention.training
    assert blocks["1"].attention.training
    model.eval()
    assert not any(part.training for part in model.body.modules())
    model.model.layers[1].self_attn.training = True
    assert blocks["1"].attention.training
    assert not blocks["1"].mlp.training


def test_a_copy_computes_with_its_own_parameters() -> None:
    model = swapped(twin_of("llama").eval())
    copied = deepcopy(model)
    expected = model(input_ids=TOKENS).logits
    with torch.no_grad():
        copied.model.layers[0].self_attn.q_proj.weight.mul_(3)
    assert_equal(model(input_ids=TOKENS).logits, expected, "the original model")
    assert not torch.equal(copied(input_ids=TOKENS).logits, expected)
    shared = {id(parameter) for parameter in copied.parameters()}
    assert shared.isdisjoint(map(id, model.parameters()))


def save_on_all_ranks(rank: int, size: int, folder: str) -> None:
    for number, (case, sizes) in enumerate(
        [("llama", {"tp": 2}), ("gpt_neox", {"tp": 2}), ("gpt2", {"pp": 2}), ("phi3", {})]
    ):
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes), sequence_parallel=False)
        model = swapped(twin_of(case), mesh)
        model.save_pretrained(Path(folder) / str(number), max_shard_size="20KB")
        mesh.destroy()
        # As after Trainer.fit.
        model.save_pretrained(Path(folder) / f"{number}_after")
        # Rank 0 refuses the folder, and all ranks raise.
        with pytest.raises(UnsupportedError, match="folder without weights"):
            model.save_pretrained(Path(folder) / str(number))


def save_on_one_rank(rank: int, size: int, folder: str) -> str:
    mesh = ParallelMesh.create(ParallelLayout(size, tp=2), sequence_parallel=False)
    model = swapped(twin_of("llama"), mesh)
    mesh.destroy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(after_run, "_TIMEOUT", timedelta(seconds=1))
        try:
            if rank == 0:
                model.save_pretrained(Path(folder))
        except UnsupportedError as error:
            return str(error)
    return ""


def test_save_pretrained_after_a_run_on_one_rank_is_refused(tmp_path: Path) -> None:
    message, _ = run_world(save_on_one_rank, 2, str(tmp_path))
    assert "must be called on all ranks" in message
    assert "rank 1 did not join within 1 s" in message
    assert not list(tmp_path.iterdir())


def test_save_pretrained_writes_the_full_model_from_all_ranks(tmp_path: Path) -> None:
    run_world(save_on_all_ranks, 2, str(tmp_path))
    cases = ("llama", "gpt_neox", "gpt2", "phi3")
    for number, case in [
        *enumerate(cases),
        *((f"{number}_after", case) for number, case in enumerate(cases)),
    ]:
        reloaded, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / str(number), output_loading_info=True
        )
        assert not any(report.values()), report
        for name, tensor in twin_of(case).state_dict().items():
            assert torch.equal(reloaded.state_dict()[name], tensor), f"{case}: {name}"
    with pytest.raises(UnsupportedError, match=r"folder without weights"):
        swapped(twin_of("llama")).save_pretrained(tmp_path / "0")
    with pytest.raises(UnsupportedError, match=r"takes no variant"):
        swapped(twin_of("llama")).save_pretrained(tmp_path / "new", variant="fp16")
    with pytest.raises(UnsupportedError, match=r"max_shard_size must be"):
        swapped(twin_of("llama")).save_pretrained(tmp_path / "new", max_shard_size="much")


def check_states(mesh: ParallelMesh) -> None:
    for case in ("llama", "gpt2", "gemma"):
        twin = exact_twin(case)
        model = swapped(exact_twin(case), mesh)
        theirs = twin(input_ids=TOKENS, output_hidden_states=True)
        ours = model(input_ids=TOKENS, output_hidden_states=True)
        assert tuple(ours) == ("logits", "hidden_states")
        assert len(ours.hidden_states) == len(theirs.hidden_states)
        for layer, (our_state, their_state) in enumerate(
            zip(ours.hidden_states, theirs.hidden_states, strict=True)
        ):
            assert_equal(our_state, their_state, f"{case}: hidden states {layer}", 1e-9)
        assert model(input_ids=TOKENS).hidden_states is None
        vectors = [network.get_input_embeddings()(TOKENS) for network in (model, twin)]
        assert_equal(vectors[0], vectors[1], f"{case}: vectors", 1e-9)
        logits = [
            network(inputs_embeds=2 * vector).logits
            for network, vector in zip((model, twin), vectors, strict=True)
        ]
        assert_equal(logits[0], logits[1], f"{case}: from vectors", 1e-9)
        for network in (model, twin):
            network.zero_grad()
            state = network(
                inputs_embeds=network.get_input_embeddings()(TOKENS), output_hidden_states=True
            ).hidden_states[2]
            state.square().sum().backward()
        for name, parameter in model.named_parameters():
            expected = twin.get_parameter(name).grad
            is_stored_otherwise = any(part in name for part in PACKED)
            if expected is None or is_stored_otherwise:
                continue
            spec = shard_spec_of(parameter, mesh.tp.rank)
            gradient = gather_full(parameter.grad, spec, mesh, sum_copies=spec.partial)
            assert_equal(gradient, expected, f"{case}: gradient of {name}", 1e-8)


def check_states_on_ranks(rank: int, size: int) -> None:
    for shares_sequence in (False, True):
        mesh = ParallelMesh.create(ParallelLayout(size, tp=size), sequence_parallel=shares_sequence)
        check_states(mesh)
        mesh.destroy()
    mesh = ParallelMesh.create(ParallelLayout(size, pp=size))
    model = swapped(exact_twin("llama"), mesh)
    with pytest.raises(UnsupportedError, match=r"output_hidden_states cannot be used with pp"):
        model(input_ids=TOKENS, output_hidden_states=True)
    elsewhere = model.lm_head if rank == 0 else model.model.embed_tokens
    with pytest.raises(
        AttributeError, match=r"weight' is on another pipeline stage.*named_parameters"
    ):
        _ = elsewhere.weight
    mesh.destroy()


def test_hidden_states_and_token_vectors_match_hugging_face() -> None:
    check_states(ParallelMesh.single())
    run_world(check_states_on_ranks, 2)
