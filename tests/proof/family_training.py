"""Training of Hugging Face models by their own code and in layouts, and comparison of weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_megatron.groups.shard_spec import ShardSpec, shard_spec_of
from lightning_megatron.swap.hugging_face.causal_lm import HuggingFaceLM
from tests.oracles import assert_equal, float32_as_float64
from tests.strategy.replica_runs import Predict, V, run
from tests.swap.expert_models import exact_twin_of
from tests.swap.parts import expected_gradients, name_of_values

STEPS = 4


class FineTune(Predict):
    """Train a Hugging Face model, and keep this rank's parts of the trained weights."""

    def __init__(self, case: str) -> None:
        super().__init__(lambda: exact_twin_of(case, vocab_size=V))
        self.parts: dict[str, tuple[ShardSpec, Tensor]] = {}

    def on_train_end(self) -> None:
        if not isinstance(self.net, HuggingFaceLM):
            super().on_train_end()
            return
        strategy: Any = self.trainer.strategy
        strategy.run.state.main.wait()
        self.parts = {
            name: (shard_spec_of(parameter), parameter.detach().clone())
            for name, parameter in self.net.named_parameters()
        }


def train_family(case: str, layout: dict[str, Any], size: int, expected: dict[str, Tensor]) -> Any:
    """Train a Hugging Face model under a layout, and compare this rank's parts of its weights."""
    module = FineTune(case)
    outcome = run(module, size, layout, STEPS)
    assert not outcome.error, outcome.error
    assert isinstance(module.net, HuggingFaceLM)
    weights = expected_gradients(module.net, expected)
    for name, parameter in module.net.named_parameters():
        spec, actual = module.parts[name]
        full = weights[name_of_values(name, parameter)]
        expected_part = spec.shard(full, actual.shape[spec.dim])
        assert_equal(actual, expected_part, f"{case}, {layout}: {name}", 1e-8)
    return outcome.losses


def train_with_hugging_face(cases: Iterable[str]) -> dict[str, FineTune]:
    """Train Hugging Face's models in this process."""
    modules = {}
    for case in cases:
        with float32_as_float64():
            module = FineTune(case)
            outcome = run(module, steps=STEPS)
        assert not outcome.error, outcome.error
        assert not isinstance(module.net, HuggingFaceLM)
        modules[case] = module
    return modules


def weights_by_name(theirs: dict[str, FineTune]) -> dict[str, dict[str, Tensor]]:
    """Return the weights after training by Hugging Face's code, by model."""
    return {
        case: {name.removeprefix("net."): tensor for name, tensor in module.weights.items()}
        for case, module in theirs.items()
    }
