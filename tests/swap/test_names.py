"""A replaced Hugging Face model behaves like its class: parameters train, freeze, copy and take hooks by
their names, and changes without effect are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from tests.oracles import assert_equal
from tests.swap.families import V, exact_twin, twin_of
from tests.swap.parts import swapped

TOKENS = torch.randint(0, V, (2, 8), generator=torch.Generator().manual_seed(0))


def groups_of(model: Any) -> list[dict[str, Any]]:
    """Return optimizer groups by parts of names, like scripts for Hugging Face models."""
    no_decay = ("bias", "layernorm.weight", "ln_", "norm.weight")
    groups: list[list[Any]] = [[], [], []]
    for name, parameter in model.named_parameters():
        is_embedding = "embed_tokens" in name or "wte" in name
        groups[2 if is_embedding else any(part in name for part in no_decay)].append(parameter)
    settings = ({"weight_decay": 0.3}, {"weight_decay": 0.0}, {"weight_decay": 0.0, "lr": 1e-4})
    return [{"params": group, **values} for group, values in zip(groups, settings, strict=True)]


def train(model: Any, freeze: str, num_steps: int = 2) -> list[Tensor]:
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
def test_groups_and_freezing_by_names_train_like_hugging_face(case, freeze):
    expected_losses = train(exact_twin(case), freeze)
    losses = train(swapped(exact_twin(case)), freeze)
    assert expected_losses[0] != expected_losses[-1]
    for step, (loss, expected_loss) in enumerate(zip(losses, expected_losses, strict=True)):
        assert_equal(loss, expected_loss, f"{case} without {freeze}, step {step}", 1e-9)


def test_hooks_of_parameters_change_gradients_like_in_hugging_face():
    expected: dict[str, Tensor] = {}
    names = ("embed_tokens.weight", "layers.1.self_attn.q_proj.weight", "norm.weight")
    for network in (exact_twin("llama"), swapped(exact_twin("llama"))):
        for number, name in enumerate(names):
            parameter = network.model.get_parameter(name)
            handle = parameter.register_hook(lambda gradient, factor=number + 2: gradient * factor)
            network(input_ids=TOKENS).logits.square().mean().backward()
            handle.remove()
            gradient = parameter.grad[:V]
            assert_equal(gradient, expected.setdefault(name, gradient), name, 1e-9)
            network.zero_grad()


REFUSED: tuple[Callable[[Any], object], ...] = (
    lambda model: model.model(TOKENS),
    lambda model: model.model.layers[0](torch.ones(1, 1, 48)),
    lambda model: model.model.layers[0].register_forward_hook(print),
    lambda model: model.lm_head.register_full_backward_hook(print),
    lambda model: setattr(model, "lm_head", nn.Linear(48, V)),
    lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.ones(V, 48))),
    lambda model: model.load_state_dict(model.state_dict(), assign=True),
    lambda model: model.resize_token_embeddings(V + 8),
    lambda model: model.set_input_embeddings(nn.Embedding(V, 48)),
    lambda model: model.push_to_hub("somewhere"),
    lambda model: model.model.compile(),
    lambda model: model.model.layers.compile(),
)


def test_calls_and_changes_without_effect_are_refused():
    for action in REFUSED:
        model = swapped(twin_of("llama"))
        with pytest.raises(UnsupportedError, match=r"cut over ranks"):
            action(model)


def test_forward_hooks_of_the_full_model_run():
    model, calls = twin_of("llama"), []
    model.register_forward_hook(lambda *_: calls.append("before"))
    swapped(model)
    model.register_forward_hook(lambda *_: calls.append("after"))
    model(input_ids=TOKENS)
    assert calls == ["before", "after"]


def test_training_modes_follow_the_module_tree():
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


def test_a_copy_computes_with_its_own_parameters():
    model = swapped(twin_of("llama").eval())
    copied = deepcopy(model)
    expected = model(input_ids=TOKENS).logits
    with torch.no_grad():
        copied.model.layers[0].self_attn.q_proj.weight.mul_(3)
    assert_equal(model(input_ids=TOKENS).logits, expected, "the original model")
    assert not torch.equal(copied(input_ids=TOKENS).logits, expected)
    shared = {id(parameter) for parameter in copied.parameters()}
    assert shared.isdisjoint(map(id, model.parameters()))
