"""Hooks run in the order of Lightning's own strategies and see the same gradients."""

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
def test_hooks_run_in_lightnings_order_and_see_the_same_gradients(accumulated: int) -> None:
    expected = order_of_calls("auto", accumulate_grad_batches=accumulated)
    actual = order_of_calls(ours((0, 1)), accumulate_grad_batches=accumulated)
    assert len({hook for hook, _ in expected}) > 50
    assert_same_calls(expected, actual)


def assert_same_calls(expected: list[Call], actual: list[Call]) -> None:
    assert [hook for hook, _ in actual] == [hook for hook, _ in expected]
    for (hook, expected_norms), (_, actual_norms) in zip(expected, actual, strict=True):
        # Accumulated gradients are hidden while a backward pass adds to them.
        assert actual_norms == expected_norms or (
            hook == "module.backward" and not any(actual_norms)
        ), hook


def assert_same_weights_and_norms(expected: Any, actual: Any) -> None:
    for expected_weight, actual_weight in zip(expected[0], actual[0], strict=True):
        torch.testing.assert_close(actual_weight, expected_weight, rtol=0, atol=1e-9)
    assert len(actual[1]) == len(expected[1])
    for expected_norms, actual_norms in zip(expected[1], actual[1], strict=True):
        assert actual_norms == pytest.approx(expected_norms, abs=1e-9)


@pytest.mark.parametrize("name", USES)
def test_gradient_uses_have_the_same_effect_as_on_one_device(name: str) -> None:
    assert_same_weights_and_norms(use(name, "auto"), use(name, ours((0, 1))))


@pytest.mark.parametrize("name", USES)
def test_gradient_uses_in_mixed_precision_match_float32_on_one_device(name: str) -> None:
    kind, options = USES[name]
    module, exact = kind(), kind()
    fit(module, ours((0, 1)), precision="bf16-mixed", **options)
    fit(exact, "auto", precision="32-true", **options)
    for expected, actual in zip(exact.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(actual.float(), expected, rtol=0, atol=0.02)


@pytest.fixture(scope="module")
def results_of_ranks() -> list[dict[str, Any]]:
    return run_world(two_ranks, 2)


@pytest.mark.parametrize("name", USES)
def test_gradient_uses_on_two_ranks_have_the_same_effect_as_under_ddp(
    results_of_ranks: list[dict[str, Any]], name: str
) -> None:
    expected = use(name, "auto") if name in NOT_UNDER_DDP else None
    for results in results_of_ranks:
        assert_same_weights_and_norms(expected or results["ddp"][name], results["ours"][name])


@pytest.mark.parametrize("name", IN_PARTS)
def test_norms_of_tensor_parallel_gradients_equal_norms_of_full_gradients(
    results_of_ranks: list[dict[str, Any]], name: str
) -> None:
    _, expected = use(name, "auto")
    assert len(expected) in (8, 16)
    for results in results_of_ranks:
        assert [
            {parameter: pytest.approx(norm, abs=1e-9) for parameter, norm in norms.items()}
            for norms in expected
        ] == results["tp2"][name]


def test_hooks_run_in_the_order_of_ddp_and_see_the_same_gradients(
    results_of_ranks: list[dict[str, Any]],
) -> None:
    for results in results_of_ranks:
        assert_same_calls(results["ddp"]["calls"], results["ours"]["calls"])


def test_each_microbatch_runs_backward_and_on_after_backward_runs_once() -> None:
    hooks = [
        hook
        for hook, _ in order_of_calls(MegatronStrategy(microbatch_size=2, check_microbatches=False))
    ]
    step = hooks[
        hooks.index("module.training_step") : hooks.index("module.on_before_optimizer_step")
    ]
    module_hooks = [hook.removeprefix("module.") for hook in step if hook.startswith("module.")]
    per_microbatch = ["training_step", "on_before_backward", "backward"]
    zero_grad = ["on_before_zero_grad", "optimizer_zero_grad"]
    assert module_hooks == [
        per_microbatch[0],
        *zero_grad,
        *per_microbatch[1:],
        *per_microbatch,
        "on_after_backward",
    ]
    module, halved = HalfTheLoss(), HalfTheLoss()
    fit(module, MegatronStrategy(microbatch_size=2))
    fit(halved, "auto")
    for actual, expected in zip(module.parameters(), halved.parameters(), strict=True):
        torch.testing.assert_close(actual, expected)


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


def test_hooks_that_take_the_loss_are_refused_with_pipeline_stages() -> None:
    for first, second in run_world(two_stages, 2):
        assert first.startswith(
            "ChangesLoss.backward cannot be called with pp (2) above 1, because it gets the loss"
        )
        assert second.startswith(
            "LambdaCallback.on_before_backward cannot be called with pp (2) above 1"
        )
