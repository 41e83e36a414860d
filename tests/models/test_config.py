"""Model configurations check sizes and layouts with clear errors, and divide layers among stages."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.rotary_scaling import RotaryScaling
from tests.refusals import check_refusals

SIZES: dict[str, Any] = {"vocab_size": 100, "max_seq_length": 32, "num_layers": 4}
SIZES |= {"hidden_size": 36, "num_heads": 9}
LONGROPE: dict[str, Any] = {"kind": "longrope", "original_length": 8}
LONGROPE |= {"short_factors": [1.0] * 3, "long_factors": [2.0] * 3}
ROTARY = {"position": "rotary"}


def test_layouts_and_lengths_that_do_not_fit_the_model_raise():
    cases: list[tuple[dict[str, Any], dict[str, int], str]] = [
        ({}, {"tp": 2}, "num_attention_heads (9) must be a multiple of tp (2), because each rank holds whole heads"),
        ({"ffn_hidden_size": 40}, {"tp": 3}, "ffn_hidden_size (40) must be a multiple of tp (3)"),
        ({"num_heads": 12, "num_kv_heads": 4}, {"tp": 6}, "num_kv_heads (4) must be a multiple or a divisor of tp (6)"),
        ({}, {"pp": 6}, "num_layers (4) must be at least pp x vpp (6 x 1 = 6)"),
        ({}, {"ep": 2}, "ep (2) needs a model with experts"),
    ]  # fmt: skip
    for sizes, layout, message in cases:
        config = GPTConfig.gpt2(**(SIZES | sizes))
        check_refusals(config.check_layout, [((ParallelLayout(6, **layout),), message)])
    config = GPTConfig.gpt2(**SIZES)
    config.check_layout(ParallelLayout(4, cp=4), seq_length=16)
    config.check_layout(ParallelLayout(3, tp=3), sequence_parallel=False, seq_length=31)
    lengths: list[tuple[dict[str, int], bool, int, str]] = [
        ({"cp": 4}, False, 12, "seq_length (12) must be a multiple of 2 cp (8)"),
        ({"tp": 3}, True, 31, "seq_length (31) must be a multiple of tp (3)"),
        ({"tp": 3}, False, 33, "seq_length (33) must not exceed max_seq_length (32)"),
        ({"tp": 3, "cp": 2}, True, 36, "rows of a multiple of 12 tokens. Use at most 24 tokens"),
    ]
    for sizes, shares, length, message in lengths:
        given = {"layout": ParallelLayout(12, **sizes), "sequence_parallel": shares}
        check_refusals(config.check_layout, [({**given, "seq_length": length}, message)])


INCONSISTENT: list[tuple[dict[str, Any], str]] = [
    ({"num_layers": 0}, "num_layers must be a whole number of at least 1: it is 0"),
    ({"hidden_dropout": 1.0}, "hidden_dropout must be a finite number of at least 0 and below 1: it is 1.0"),
    ({"activation": "tanh"}, "activation must be gelu, gelu_tanh, relu, swiglu, geglu"),
    ({"hidden_size": 40}, "hidden_size (40) must be a multiple of num_heads (9)"),
    ({**ROTARY, "head_dim": 5}, "head_dim (5) must be even"),
    ({"rotary_dim": 2}, "rotary_dim (2) must be None, because position (learned) has no rotary angles"),
    ({**ROTARY, "rotary_scaling": LONGROPE}, "rotary_scaling's factors (3) must be 2"),
    ({"window_layers": (True,) * 4}, "must be None without sliding_window"),
    ({"sliding_window": 8, "window_layers": (True,)}, "the number of window_layers (1) must be num_layers"),
    ({"norm_offset": 1.0}, "norm_offset (1.0) must be 0, because norm (layernorm)"),
    ({"parallel_residual": True, "norm_position": "post"}, "norm_position (post) must be pre"),
]  # fmt: skip
SCALINGS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "dynamic"}, "kind must be linear, llama3, yarn or longrope: it is 'dynamic'"),
    ({"kind": "linear", "factor": 0.0}, "rotary_scaling.factor must be a finite number above 0: it is 0.0"),
    ({"kind": "yarn", "factor": 4.0}, "original_length (None) must be given"),
    ({**LONGROPE, "long_factors": [1.0]}, "long_factors ((1.0,)) must be as many as short_factors (3, not 1)"),
    ({**LONGROPE, "long_factors": [1.0] * 99}, "long_factors ((1.0, 1.0, 1.0, 1.0, 1.0, 1.0, ...)) must be"),
]  # fmt: skip


def test_inconsistent_sizes_and_rotary_scalings_raise():
    check_refusals(GPTConfig.gpt2, [(SIZES | sizes, message) for sizes, message in INCONSISTENT])
    check_refusals(RotaryScaling, SCALINGS)


def test_layers_are_divided_among_stages_by_work():
    def layers_of_stages(num_layers: int, vocab_size: int, pp: int, vpp: int = 1) -> list[int]:
        config = GPTConfig.gpt2(num_layers=num_layers, vocab_size=vocab_size)
        return list(config.partition(ParallelLayout(world_size=pp, pp=pp, vpp=vpp)).counts)

    # A vocabulary of 50257 costs as much as 5 layers of GPT-2 small; one of 256 almost nothing.
    assert layers_of_stages(12, 50257, 4) == [4, 4, 4, 0]
    assert layers_of_stages(12, 256, 4) == [3, 3, 3, 3]
    assert layers_of_stages(8, 50257, 2, 2) == [3, 2, 3, 0]
    assert layers_of_stages(10, 256, 4) == [2, 3, 3, 2]
    assert layers_of_stages(13, 50257, 4) == [4, 4, 5, 0]


def test_configurations_from_plain_values_are_hashable():
    windows = {"sliding_window": 8, "window_layers": [True, False, True, False]}
    scaling = LONGROPE | {"short_factors": [1.0, 1.0], "long_factors": [2.0, 3.0]}
    config = GPTConfig.llama(**SIZES, **windows, rotary_scaling=scaling)
    assert config.rotary_scaling.long_factors == (2.0, 3.0)
    assert [config.window_of(layer) for layer in range(4)] == [8, None, 8, None]
    assert hash(GPTConfig(**asdict(config))) == hash(config)
