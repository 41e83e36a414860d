"""Hooks run in Lightning's order, ``backward`` is called, and gradients are where users look for
them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback

from lightning_megatron import MegatronStrategy, UnsupportedError
from tests.strategy.hook_cases import (
    IN_PARTS,
    NOT_UNDER_DDP,
    USES,
    Call,
    HalfTheLoss,
    fit,
    order_of_calls,
    ours,
    two_ranks,
    use,
)
from tests.strategy.tiny import TinyLM, loader
from tests.world import run_world


@pytest.mark.parametrize("accumulated", [1, 3])
def test_hooks_run_in_lightnings_order_and_see_its_gradients(accumulated: int) -> None:
    expected = order_of_calls("auto", accumulate_grad_batches=accumulated)
    found = order_of_calls(ours((0, 1)), accumulate_grad_batches=accumulated)
    assert len({who for who, _ in expected}) > 50
    assert_called_alike(expected, found)


def assert_called_alike(expected: list[Call], found: list[Call]) -> None:
    assert [who for who, _ in found] == [who for who, _ in expected]
    for (who, norms), (_, others) in zip(expected, found, strict=True):
        # Gradients that accumulate are hidden while others are added to them.
        assert others == norms or (who == "module.backward" and not any(others)), who


def assert_used_alike(expected: Any, found: Any) -> None:
    for weight, other in zip(expected[0], found[0], strict=True):
        torch.testing.assert_close(other, weight, rtol=0, atol=1e-9)
    assert len(found[1]) == len(expected[1])
    for norms, others in zip(expected[1], found[1], strict=True):
        assert others == pytest.approx(norms, abs=1e-9)


@pytest.mark.parametrize("name", USES)
def test_a_use_of_gradients_has_the_effect_that_it_has_on_one_device(name: str) -> None:
    assert_used_alike(use(name, "auto"), use(name, ours((0, 1))))


@pytest.mark.parametrize("name", USES)
def test_gradients_of_mixed_precision_are_used_alike(name: str) -> None:
    kind, options = USES[name]
    module, exact = kind(), kind()
    fit(module, ours((0, 1)), precision="bf16-mixed", **options)
    fit(exact, "auto", precision="32-true", **options)
    for weight, other in zip(exact.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(other.float(), weight, rtol=0, atol=0.02)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_world(two_ranks, 2)


@pytest.mark.parametrize("name", USES)
def test_a_use_of_gradients_has_the_effect_that_it_has_under_ddp(
    ranks: list[dict[str, Any]], name: str
) -> None:
    expected = use(name, "auto") if name in NOT_UNDER_DDP else None
    for found in ranks:
        assert_used_alike(expected or found["ddp"][name], found["ours"][name])


@pytest.mark.parametrize("name", IN_PARTS)
def test_norms_of_gradients_in_parts_are_those_of_whole_ones(
    ranks: list[dict[str, Any]], name: str
) -> None:
    _, expected = use(name, "auto")
    assert len(expected) in (8, 16)
    for found in ranks:
        assert [
            {k: pytest.approx(v, abs=1e-9) for k, v in one.items()} for one in expected
        ] == found["tp2"][name]


def test_hooks_run_in_the_order_of_ddp_and_see_its_gradients(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert_called_alike(found["ddp"]["calls"], found["ours"]["calls"])


def test_microbatches_have_a_backward_pass_each_and_one_hook_after_all() -> None:
    found = [
        who
        for who, _ in order_of_calls(MegatronStrategy(microbatch_size=2, check_microbatches=False))
    ]
    step = found[
        found.index("module.training_step") : found.index("module.on_before_optimizer_step")
    ]
    of_module = [who.removeprefix("module.") for who in step if who.startswith("module.")]
    each = ["training_step", "on_before_backward", "backward"]
    forget = ["on_before_zero_grad", "optimizer_zero_grad"]
    assert of_module == [each[0], *forget, *each[1:], *each, "on_after_backward"]
    module, halved = HalfTheLoss(), HalfTheLoss()
    fit(module, MegatronStrategy(microbatch_size=2))
    fit(halved, "auto")
    for weight, other in zip(module.parameters(), halved.parameters(), strict=True):
        torch.testing.assert_close(weight, other)


class ChangesLoss(TinyLM):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        (loss / 2).backward()


def two_stages(rank: int, size: int) -> list[str]:
    messages = []
    for module, callbacks in (
        (ChangesLoss(), []),
        (TinyLM(), [LambdaCallback(on_before_backward=lambda trainer, module, loss: None)]),
    ):
        options: dict[str, Any] = {
            "logger": False,
            "enable_progress_bar": False,
            "enable_checkpointing": False,
        }
        strategy = MegatronStrategy(pp=2)
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=strategy, callbacks=callbacks, **options
        )
        with pytest.raises(UnsupportedError) as raised:
            trainer.fit(module, loader())
        messages.append(str(raised.value))
    return messages


def test_hooks_that_take_the_loss_are_refused_with_stages() -> None:
    for first, second in run_world(two_stages, 2):
        assert first.startswith(
            "ChangesLoss.backward cannot be called with pp (2) above 1, because it gets the loss"
        )
        assert second.startswith(
            "LambdaCallback.on_before_backward cannot be called with pp (2) above 1"
        )
