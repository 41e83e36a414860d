"""Losses and biases balance experts: gradients of losses, and updates by the load of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.experts.routing.attached_loss import attach_loss
from lightning_megatron.experts.routing.balance import update_bias_
from lightning_megatron.experts.routing.router import Router
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.recompute import replayed
from tests.experts.routed_by_hand import (
    B,
    D,
    E,
    K,
    S,
    config_of,
    draw,
    gradients,
    losses_of,
    main_loss,
    router_of,
)
from tests.oracles import assert_equal


def test_an_attached_loss_has_its_gradient_for_any_scale() -> None:
    router = router_of(config_of())
    hidden = [draw(S, B, D, seed=seed).requires_grad_() for seed in (4, 5)]
    # Two microbatches and a loss scale of 1024.
    scale = 1024.0 / 2
    total = sum(
        (
            main_loss(routing_result.probabilities) + losses_of(routing_result)
            for routing_result in map(router, hidden)
        ),
        start=torch.zeros(()),
    )
    expected = gradients(total * scale, *hidden, router.weight)
    for scale_form in (scale, torch.tensor(scale)):
        router.weight.grad = None
        for microbatch in hidden:
            microbatch.grad = None
            routing = router(microbatch)
            attached = attach_loss(routing.probabilities, losses_of(routing), scale_form)
            assert torch.equal(attached, routing.probabilities)
            (main_loss(attached) * scale).backward()
        for leaf, expected_gradient in zip((*hidden, router.weight), expected, strict=True):
            assert_equal(
                leaf.grad,
                expected_gradient,
                f"gradient with a scale of type {type(scale_form).__name__}",
            )


def test_a_scale_on_the_device_is_read_in_the_backward_pass() -> None:
    x, loss, scale = (
        torch.ones(2, requires_grad=True),
        torch.ones((), requires_grad=True),
        torch.tensor(1.0),
    )
    attached = attach_loss(x, loss, scale)
    scale.fill_(3.0)
    attached.sum().backward()
    assert float(loss.grad) == 3.0


def test_a_loss_first_read_without_gradients_has_a_gradient() -> None:
    router = router_of(config_of())
    routing = router(draw(S, B, D, seed=4))
    with torch.no_grad():
        losses = routing.balance_loss, routing.z_loss
    assert losses[0] is routing.balance_loss, "computed twice"
    assert losses[1] is routing.z_loss, "computed twice"
    second_routing = router(draw(S, B, D, seed=4))
    (expected,) = gradients(losses_of(second_routing), router.weight)
    router.weight.grad = None
    assert float(expected.abs().max()) > 0.0
    assert_equal(
        gradients(losses_of(routing), router.weight)[0], expected, "gradient of both losses"
    )


def test_a_loss_attached_in_recomputed_code_counts_once() -> None:
    mesh = ParallelMesh.single(seed=5)
    router = router_of(config_of(jitter=0.2), mesh)

    def weigh(hidden: Tensor) -> Tensor:
        routing = router(hidden)
        return attach_loss(routing.probabilities, losses_of(routing), 1.0).square()

    def run(call: Any) -> list[Tensor]:
        hidden = draw(S, B, D, seed=4).requires_grad_()
        mesh.random.begin_microbatch(1, 2)
        mesh.random.seek(3)
        output = call(hidden)
        # Another microbatch runs before the backward pass.
        mesh.random.begin_microbatch(1, 3)
        return gradients(main_loss(output), hidden, router.weight)

    expected_gradients, actual_gradients = (
        run(weigh),
        run(lambda hidden: replayed(weigh, mesh.random, 3, hidden)),
    )
    for expected, actual in zip(expected_gradients, actual_gradients, strict=True):
        assert_equal(actual, expected, "gradient")


def test_biases_move_towards_the_mean_load_and_shares_equal_the_load() -> None:
    router = router_of(config_of(expert_bias=True, expert_bias_rate=0.125, aux_loss_scope="global"))
    bias = router.expert_bias.clone()
    router.update_(torch.tensor([4, 0, 4, 9, 3, 5, 4, 3]))
    moved = torch.tensor([0.0, 1, 0, -1, 1, -1, 0, 1], dtype=torch.float64) * 0.125
    assert_equal(router.expert_bias - bias, moved, "change of biases")
    assert_equal(router.step_shares, torch.tensor([4, 0, 4, 9, 3, 5, 4, 3]).double() / 32, "shares")
    large = torch.tensor([2**31 - 1, 2**31 - 2], dtype=torch.int32)
    update_bias_(zeros := torch.zeros(2), large, 1.0)
    assert zeros.tolist() == [-1.0, 1.0]


def test_biases_balance_experts_without_a_loss() -> None:
    router = router_of(
        config_of(scoring="sigmoid", expert_bias=True, expert_bias_rate=0.02, aux_loss=0.0)
    )
    hidden = draw(40, B, D, seed=9)
    before = router(hidden).load
    for _ in range(60):
        router.update_(router(hidden).load)
    after = router(hidden).load
    assert int(before.max()) > 1.3 * 40 * B * K / E
    assert int(after.max()) <= 1.1 * 40 * B * K / E


def test_even_shares_of_the_first_step_give_no_gradient() -> None:
    config = config_of(aux_loss_scope="global", z_loss=0.0)
    router, hidden = Router(config, D, ParallelMesh.single()).double(), draw(S, B, D)
    with torch.no_grad():
        router.weight.copy_(draw(E, D, seed=1))
    routing = router(hidden)
    assert_equal(routing.balance_loss, torch.tensor(0.3, dtype=torch.float64), "loss", 1e-7)
    assert float(gradients(routing.balance_loss, router.weight)[0].abs().max()) < 1e-8
