"""Comparison of models in 8 bits with and without magnitudes that operators hand to layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.fp8_layers import set_fp8
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.fp8 import FP8
from tests.kernels.models import deterministic, run

#: All sizes are multiples of 16, also with tp 2.
SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "max_seq_length": 16,
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "vocab_multiple": 16,
}
FFN = {**SIZES, "ffn_hidden_size": 96}
LATENT = {
    "key_value_rank": 32,
    "query_rank": 48,
    "plain_dim": 16,
    "rotary_dim": 16,
    "value_dim": 16,
}
CONFIGS = {
    "llama": GPTConfig.llama(**FFN, num_kv_heads=2),
    "gpt2": GPTConfig.gpt2(**SIZES),
    "post-norm": GPTConfig.gpt2(**SIZES, norm_position="post"),
    "dropout": GPTConfig.llama(**FFN, hidden_dropout=0.1),
    "gemma": GPTConfig.llama(**FFN, num_kv_heads=2, activation="geglu_tanh", norm_offset=1.0),
    "neox": GPTConfig.gpt2(**SIZES, position="rotary", rotary_dim=4, parallel_residual=True, activation="relu"),
    "glm": GPTConfig.llama(**FFN, num_kv_heads=2, norm_position="sandwich", qkv_bias=True),
    "latent attention": GPTConfig.llama(**FFN, latent_attention=LATENT),
}  # fmt: skip
#: For each linear layer of a block, whether its input (first tuple) and the gradient of its output
#: (second tuple) come with their magnitudes. The layers are: fused queries, keys and values, or
#: queries and then keys and values; output; up; down.
GIVEN = {
    "llama": ((True, False, True, True), (False, False, True, False)),
    "gpt2": ((True, False, True, False), (False, False, False, False)),
    "post-norm": ((False, False, False, False), (False, False, False, False)),
    "dropout": ((True, False, True, True), (False, False, True, False)),
    "gemma": ((True, False, True, False), (False, False, False, False)),
    "neox": ((True, False, False, False), (False, False, False, False)),
    "glm": ((True, False, True, True), (False, False, True, False)),
    "latent attention": ((True, True, False, True, True), (False, False, False, True, False)),
}


def spread(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw numbers whose magnitudes spread over several orders, as those of activations do."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(*shape, generator=generator) * torch.randn(*shape, generator=generator).exp()
    ).to(dtype)


class NotedCast(NamedTuple):
    """A recorded cast: the role of the matrix, whether its magnitude was known, and the bits of
    numbers and scales of the operands.
    """

    use: str
    is_given: bool
    numbers: tuple[Tensor, ...]


@contextmanager
def noting_casts(hands_over: bool = True) -> Iterator[list[NotedCast]]:
    """Record every cast; without hand-over layers compute all magnitudes themselves."""
    casts: list[NotedCast] = []
    original: Any = Scaling.cast

    def cast(
        self: Scaling, matrix: Tensor, use: Any, *, bits: Tensor | None = None, **options: Any
    ) -> Any:
        result = original(self, matrix, use, bits=bits, **options)
        operands = [operand for operand in (result.rows, result.columns) if operand is not None]
        numbers = [operand.values.view(torch.uint8).clone() for operand in operands]
        numbers += [operand.scale.view(torch.int32).clone() for operand in operands]
        casts.append(NotedCast(use, bits is not None, tuple(numbers)))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scaling, "cast", cast)
        if not hands_over:
            patch.setattr(Scaling, "reads_magnitudes", property(lambda self: False))
        yield casts


def assert_same_casts(actual: list[NotedCast], expected: list[NotedCast]) -> None:
    """Demand the same bits of all casts, in the same order."""
    assert actual, "nothing was cast"
    for number, (cast, reference) in enumerate(zip(actual, expected, strict=True)):
        assert (cast.use, reference.is_given) == (reference.use, False)
        for bits, reference_bits in zip(cast.numbers, reference.numbers, strict=True):
            assert torch.equal(bits, reference_bits), f"cast {number}, of a {cast.use}"


def compare_hand_over(
    config: GPTConfig,
    mesh: ParallelMesh,
    *,
    dtype: torch.dtype = torch.float32,
    recompute: Any = "none",
    emulate: bool = True,
    batch: int = 2,
    length: int = 8,
    recipe: str = "tensorwise",
) -> list[NotedCast]:
    """Train a model for two steps with and without hand-over of magnitudes; return the casts.

    All casts, losses and gradients of the two runs must have the same bits.
    """
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, config.vocab_size, (batch, length + 1), generator=generator)
    tokens = tokens.to(mesh.device)
    results = []
    for hands_over in (True, False):
        model = GPT(config, mesh, seed=1).to(dtype)
        model.recompute = recompute
        settings = FP8(recipe, emulate=emulate)  # type: ignore[arg-type]
        set_fp8(model, settings, emulate, mesh.device)
        with noting_casts(hands_over) as casts, deterministic():
            numbers = [
                run(model, rows[:, :-1], rows[:, 1:].contiguous(), 0.0)
                for rows in (tokens, tokens.flip(1).contiguous())
            ]
        results.append((casts, numbers))
    (casts, numbers), (expected_casts, expected_numbers) = results
    assert_same_casts(casts, expected_casts)
    for step, expected_step in zip(numbers, expected_numbers, strict=True):
        assert step.keys() == expected_step.keys()
        for name, value in step.items():
            assert torch.equal(value, expected_step[name]), name
    return casts


def given(casts: list[NotedCast], use: str) -> list[bool]:
    """Return, for each cast of a use in order, whether its magnitude was known."""
    return [cast.is_given for cast in casts if cast.use == use]
