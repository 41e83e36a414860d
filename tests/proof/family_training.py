"""Hugging Face models trained by their own code and under layouts, and what comes out compared."""

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
    """Train a Hugging Face model, and keep this rank's parts of what comes out."""

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
        spec, found = module.parts[name]
        full = weights[name_of_values(name, parameter)]
        part = spec.shard(full, found.shape[spec.dim])
        assert_equal(found, part, f"{case}, {layout}: {name}", 1e-8)
    return outcome.losses


def trained_by_theirs(cases: Iterable[str]) -> dict[str, FineTune]:
    """Train Hugging Face's models in this process."""
    found = {}
    for case in cases:
        with float32_as_float64():
            module = FineTune(case)
            outcome = run(module, steps=STEPS)
        assert not outcome.error, outcome.error
        assert not isinstance(module.net, HuggingFaceLM)
        found[case] = module
    return found


def weights_by_name(theirs: dict[str, FineTune]) -> dict[str, dict[str, Tensor]]:
    """Return the weights that training by Hugging Face's code left, by model."""
    return {
        case: {name.removeprefix("net."): one for name, one in module.weights.items()}
        for case, module in theirs.items()
    }
