"""Main parameters accumulate gradients in float32, and serve any attached torch optimizer and its
schedulers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import ShardSpec, set_shard_spec, shard_spec_of
from lightning_megatron.optimizer import MainParameters
from lightning_megatron.optimizer.sharding import check_granularity, finest_granularity
from lightning_megatron.plan.shards import ShardRange
from tests.optimizer.runs import single
from tests.worlds.test_hooks import Lookahead, SharpnessAware

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=True),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=0.1),
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
    dtype = next(module.parameters()).dtype
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
    return module(x).float().square().mean()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_attached_optimizer_trains_float32_main_parameters_and_keeps_its_scheduler(name):
    module = model(torch.bfloat16)
    named = dict(module.named_parameters())
    run = single(named, torch.float32, make=lambda _: OPTIMIZERS[name](groups_of(module)))
    main, optimizer = run.main, run.optimizer
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    assert main.attach(optimizer) == []

    # The twin keeps its weights in float32 and computes with their rounded values.
    rounded, twin = copy.deepcopy(module), model(torch.bfloat16).float()
    twin_optimizer = OPTIMIZERS[name](groups_of(twin))
    twin_scheduler = torch.optim.lr_scheduler.LambdaLR(twin_optimizer, lambda step: 1 / (1 + step))
    pairs = list(zip(rounded.parameters(), twin.parameters(), strict=True))
    for step in range(4):
        loss_of(module, step).backward()
        run.finish()
        run.step()
        run.zero_grad()
        scheduler.step()

        loss_of(rounded, step).backward()
        for half, full in pairs:
            full.grad, half.grad = half.grad.float(), None
        twin_optimizer.step()
        for half, full in pairs:
            half.data.copy_(full.data)
        twin_scheduler.step()
        assert optimizer.param_groups[1]["lr"] == pytest.approx(0.05 / (2 + step))
    for key, expected in twin.named_parameters():
        assert torch.equal(main.main(key), expected)
        assert torch.equal(main.parameter(key), expected.to(torch.bfloat16))
    assert set(optimizer.state) == {main.main(key) for key in main.names}
    values = [value for state in optimizer.state.values() for value in state.values()]
    assert {value.dtype for value in values if isinstance(value, Tensor)} <= {torch.float32}


def test_half_precision_gradients_accumulate_in_float32():
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    run = single({"weight": weight}, torch.float32)
    for scale in (256.0, 1.0, 1.0, 1.0):
        (weight * scale).sum().backward()
        assert weight.grad is None
    run.finish()
    # In bfloat16, 256 + 1 is 256.
    assert run.main.main("weight").grad.item() == 259.0
    run.zero_grad()
    assert run.main.main("weight").grad is None


def test_main_parameters_of_a_float32_model_share_its_memory():
    module = model(torch.float32)
    run = single(dict(module.named_parameters()), torch.float32)
    assert run.main.memory()["main_parameters"] == 0
    loss_of(module, 0).backward()
    run.finish()
    before = module[0].weight.detach().clone()
    run.optimizer.step()
    assert not torch.equal(module[0].weight, before)
    assert torch.equal(module[0].weight, run.main.main("0.weight"))


def test_frozen_parameters_take_no_memory_and_are_trained_after_unfreezing():
    named = {
        name: nn.Parameter(torch.ones(300, dtype=torch.bfloat16)) for name in ("first", "second")
    }
    named["second"].requires_grad_(False)
    run = single(named, torch.float32)
    assert run.main.trained == ("first",)
    assert run.main.memory()["main_parameters"] == 384 * 4
    assert not run.main.needs_attach(run.optimizer)
    named["second"].requires_grad_(True)
    assert run.main.needs_attach(run.optimizer)
    run.reducer.watch(run.main.attach(run.optimizer))
    run.backward({name: torch.ones(300, dtype=torch.bfloat16) for name in named})
    run.finish()
    run.step()
    assert run.main.main("second")[0].item() == pytest.approx(0.9)


def test_gradients_of_a_toggled_optimizer_are_dropped():
    weight = nn.Parameter(torch.ones(2))
    run = single({"weight": weight})
    # Lightning freezes the parameters of other optimizers.
    run.optimizer.param_groups[0]["params"][0].requires_grad_(False)
    run.backward({"weight": torch.ones(2)}, is_last=False)
    run.optimizer.param_groups[0]["params"][0].requires_grad_(True)
    run.backward({"weight": torch.full((2,), 4.0)})
    run.finish()
    assert run.main.gradients()[0].tolist() == [4.0, 4.0]


def test_optimizer_of_foreign_parameters_is_refused():
    main = MainParameters({"weight": nn.Parameter(torch.ones(2))}, ParallelMesh.single())
    with pytest.raises(UnsupportedError, match="group 0 of SGD"):
        main.attach(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))


def test_main_parameters_keep_the_shard_spec_and_higher_precision_than_the_model():
    spec = ShardSpec((4,), (ShardRange(0, 2),))
    named = {
        name: nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for name in ("kept", "changed")
    }
    set_shard_spec(named["kept"], spec)
    first = single(named, torch.float32).main
    assert shard_spec_of(first.main("kept")) == spec
    for name in named:
        first.main(name).data.fill_(1.001)
    first.publish()
    assert first.main("kept")[0].item() == pytest.approx(1.001)
    assert named["kept"].tolist() == [1.0, 1.0]
    # Other main parameters continue if the model still has their rounded values.
    named["changed"].data.fill_(2.0)
    second = single(named, torch.float32).main
    second.continue_from(first)
    assert second.main("kept")[0].item() == pytest.approx(1.001)
    assert second.main("changed")[0].item() == 2.0


class Lamb(torch.optim.Optimizer):
    """Scale updates by the norms of full parameters, like LAMB."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            self.update([p for p in self.param_groups[0]["params"] if p.grad is not None])

    def update(self, parameters: list[Any]) -> None:
        for p in parameters:
            p.sub_(p.grad * (0.1 * p.norm() / p.grad.norm()))


class GlobalNorm(Lamb):
    """Scale all updates by the norm of all gradients."""

    def update(self, parameters: list[Any]) -> None:
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.sub_(p.grad * (0.1 / norm))


class BlockwiseMoments(Lamb):
    """Keep one number for every eight elements, like optimizers with 8-bit moments."""

    def update(self, parameters: list[Any]) -> None:
        for p in parameters:
            parts = [part.abs().max() for part in p.grad.flatten().split(8)]
            self.state[p]["largest"] = torch.stack(parts)
            p.sub_(p.grad * 0.1)


GRANULARITIES: dict[str, list[Callable[[Any], Any]]] = {
    "elements": [lambda p: torch.optim.AdamW(p, fused=True), torch.optim.Adagrad, torch.optim.NAdam],
    "parameters": [torch.optim.Adafactor, torch.optim.Muon, Lamb, BlockwiseMoments],
    "model": [SharpnessAware, lambda p: Lookahead(torch.optim.SGD(p)), GlobalNorm, torch.optim.LBFGS],
}  # fmt: skip


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_finest_granularity_of_an_optimizer_is_found_by_trial_steps(granularity):
    for make in GRANULARITIES[granularity]:
        optimizer = make([nn.Parameter(torch.ones(3, 2))])
        assert finest_granularity(optimizer) == granularity, type(optimizer)


@pytest.mark.parametrize("axis", ["tp", "etp", "pp", "ep"])
def test_optimizer_is_refused_if_a_rank_has_less_than_it_needs(axis):
    lamb = Lamb([nn.Parameter(torch.ones(1))])
    sizes = {name: 2 if name == axis else 1 for name in ("tp", "etp", "pp", "ep")}
    check_granularity(lamb, "elements", sizes)
    refused = {"parameters": "whole parameters", "model": "the whole model"}
    if axis in ("pp", "ep"):
        check_granularity(lamb, "parameters", sizes)
        refused.pop("parameters")
    for granularity, needed in refused.items():
        with pytest.raises(UnsupportedError, match=rf"Lamb .* {axis} \(2\) .* needs {needed}"):
            check_granularity(lamb, granularity, sizes)  # type: ignore[arg-type]
