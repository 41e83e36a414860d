"""The report of non-finite gradients names parameters, ranks and the step."""

from __future__ import annotations

from lightning_megatron.errors import NonFiniteGradientError
from lightning_megatron.strategy.optimization.gradient_report import describe_nonfinite


def test_message_names_parameter_rank_step_and_number_of_nan_elements() -> None:
    text = describe_nonfinite([(3, "layers.1.mlp.up.weight", 12_000, 0)], step=41)
    assert text.startswith(
        "all gradients must be finite: training batch 41 gave layers.1.mlp.up.weight on rank 3"
    )
    assert "(12,000 NaN)" in text
    assert "the batch that rank 3 had read" in text


def test_message_lists_only_the_first_non_finite_gradients() -> None:
    gradients = [(rank, f"layers.{layer}.weight", 1, 2) for rank in (0, 5) for layer in range(4)]
    text = describe_nonfinite(gradients, step=0)
    assert "layers.0.weight on rank 0 (1 NaN and 2 infinite); layers.1.weight on rank 0" in text
    assert "layers.0.weight on rank 5 (1 NaN and 2 infinite); and 3 more." in text
    assert "the batch that 2 ranks had read" in text
    assert "layers.1.weight on rank 5" not in text


def test_nonfinite_gradient_error_is_a_runtime_error() -> None:
    assert issubclass(NonFiniteGradientError, RuntimeError)
