"""Main parameters: fp32 accumulation, and any torch optimizer with its schedulers after they are attached."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.shard_spec import ShardSpec, set_shard_spec, shard_spec_of
from lightning_megatron.plan.shards import ShardRange
from lightning_megatron.training import MainParameters

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=True),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
}


def model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    weights = [p for name, p in module.named_parameters() if "weight" in name]
    return [
        {"params": weights, "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.ndim == 1], "lr": 0.05},
    ]


def loss_of(module: nn.Module, step: int) -> Tensor:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).to(next(module.parameters()).dtype)
    return module(x).float().square().mean()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_attached_optimizer_trains_fp32_mains_and_its_scheduler_keeps_working(name: str) -> None:
    module = model(torch.bfloat16)
    optimizer = OPTIMIZERS[name](groups_of(module))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    main = MainParameters(dict(module.named_parameters()), torch.float32)
    main.attach(optimizer)
    main.attach(optimizer)

    # The twin keeps its weights in float32 and computes with their rounded values, written out by hand.
    rounded = copy.deepcopy(module)
    twin = model(torch.bfloat16).float()
    twin_optimizer = OPTIMIZERS[name](groups_of(twin))
    twin_scheduler = torch.optim.lr_scheduler.LambdaLR(twin_optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        loss_of(module, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        main.copy_to_model()
        scheduler.step()

        loss_of(rounded, step).backward()
        for half, full in zip(rounded.parameters(), twin.parameters(), strict=True):
            full.grad, half.grad = half.grad.float(), None
        twin_optimizer.step()
        for half, full in zip(rounded.parameters(), twin.parameters(), strict=True):
            half.data.copy_(full.data)
        twin_scheduler.step()
        assert optimizer.param_groups[1]["lr"] == pytest.approx(0.05 / (2 + step))
    for key, want in twin.named_parameters():
        torch.testing.assert_close(main.main(key), want, rtol=0, atol=0)
        assert torch.equal(main.parameter(key), want.to(torch.bfloat16))
    state = optimizer.state[main.main("0.weight")]
    assert all(value.dtype == torch.float32 for value in state.values() if isinstance(value, Tensor))
    assert set(optimizer.state) == {main.main(key) for key in main.names}


def test_half_precision_gradients_accumulate_in_float32() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    main = MainParameters({"weight": weight}, torch.float32)
    for scale in (256.0, 1.0, 1.0, 1.0):
        (weight * scale).sum().backward()
        assert weight.grad is None
    # In bfloat16, 256 + 1 is 256.
    assert main.main("weight").grad.item() == 259.0
    main.zero_grad()
    assert main.main("weight").grad is None


def test_full_precision_parameters_are_their_own_mains() -> None:
    module = model(torch.float32)
    main = MainParameters(dict(module.named_parameters()), torch.float32)
    assert all(main.main(name) is parameter for name, parameter in module.named_parameters())
    loss_of(module, 0).backward()
    assert module[0].weight.grad is not None
    main.copy_to_model()


def test_a_shared_parameter_is_kept_once_under_its_first_name() -> None:
    weight = nn.Parameter(torch.ones(2))
    main = MainParameters({"embedding": weight, "head": weight, "other": nn.Parameter(torch.ones(1))})
    assert main.names == ("embedding", "other")


def test_frozen_parameters_are_left_alone() -> None:
    frozen = nn.Parameter(torch.ones(1, dtype=torch.bfloat16), requires_grad=False)
    main = MainParameters({"frozen": frozen}, torch.float32)
    assert main.main("frozen") is frozen
    assert list(main.trainable()) == []
    frozen.requires_grad_(True)
    with pytest.raises(UnsupportedError, match="must stay frozen"):
        list(main.trainable())


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    main = MainParameters({"weight": nn.Parameter(torch.ones(2))})
    with pytest.raises(UnsupportedError, match="group 0 of SGD"):
        main.attach(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))


def test_mains_keep_the_spec_and_more_digits_than_the_model() -> None:
    spec = ShardSpec((4,), (ShardRange(0, 2),))
    weight = set_shard_spec(nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), spec)
    main = MainParameters({"weight": weight}, torch.float32)
    assert shard_spec_of(main.main("weight")) == spec
    main.main("weight").data.copy_(torch.tensor([1.001, 2.0]))
    main.copy_to_model()
    assert main.main("weight")[0].item() == pytest.approx(1.001)
    assert weight.tolist() == [1.0, 2.0]


def test_names_of_an_optimizer_are_found_before_and_after_attaching() -> None:
    module = model(torch.bfloat16)
    optimizer = OPTIMIZERS["AdamW"](groups_of(module))
    main = MainParameters(dict(module.named_parameters()), torch.float32)
    want = [["0.weight", "2.weight"], ["0.bias", "2.bias"]]
    assert main.names_of(optimizer) == want
    main.attach(optimizer)
    assert main.names_of(optimizer) == want


def test_gradients_stay_with_the_model_once_hooks_are_detached() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    MainParameters({"weight": weight}, torch.float32).detach_hooks()
    weight.sum().backward()
    assert weight.grad is not None
