"""The rule chooses the fastest measured variant of the grouped GEMM."""

from __future__ import annotations

import pytest

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan.grouped_gemm import (
    VARIANTS,
    Pass,
    VariantChoice,
    choose_variant,
    pass_of,
    reason_against_fusion,
    workspace_bytes,
)

C, W, S = "cooperative_128x256_1x1", "pingpong_128x192_1x2", "pingpong_128x128_1x2"
# Rows, groups, n and k of the measured shapes, and the tiles of forward, data gradient, bf16 weight
# gradient and accumulating weight gradient.
MEASURED = {
    "qwen3": ((32768, 32, 1536, 2048), (W, S, S, f"reduce_{S}")),
    "qwen3 second": ((32768, 32, 2048, 768), (S, W, W, f"reduce_{W}")),
    "qwen3 with few rows": ((4096, 32, 1536, 2048), (S, S, C, f"read_{S}")),
    "deepseek": ((16384, 32, 4096, 7168), (C, C, W, f"read_{S}")),
    "deepseek second": ((16384, 32, 7168, 2048), (W, C, S, f"read_{S}")),
    "mixtral": ((16384, 8, 28672, 4096), (C, C, W, f"reduce_{W}")),
    "mixtral second": ((16384, 8, 4096, 14336), (C, C, W, f"reduce_{W}")),
}
PASSES = (Pass.FORWARD, Pass.DATA_GRAD, Pass.WEIGHT_GRAD_BF16, Pass.WEIGHT_GRAD_ADD)


@pytest.mark.parametrize("shape", MEASURED)
def test_measured_shapes_get_their_fastest_variants(shape: str) -> None:
    sizes, tiles = MEASURED[shape]
    chosen = [choose_variant(which, *sizes).variant for which in PASSES]
    assert chosen == [f"{which}_{tile}" for which, tile in zip(PASSES, tiles, strict=True)]


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ((32768, 32, 1536, 2048), "pingpong_128x192_1x1"),
        ((32768, 64, 1536, 2048), "pingpong_128x192_1x1"),
        ((16384, 32, 4096, 7168), "pingpong_128x192_1x1"),
        ((16384, 8, 28672, 4096), "pingpong_128x192_1x1"),
        ((4096, 32, 1536, 2048), S),
        ((32768, 32, 1024, 2048), S),
    ],
)
def test_swiglu_fused_into_the_product_gets_its_fastest_variant(
    sizes: tuple[int, int, int, int], tile: str
) -> None:
    assert choose_variant(Pass.FORWARD_SWIGLU, *sizes).variant == f"forward_swiglu_{tile}"


def test_swiglu_is_not_fused_where_a_separate_product_has_a_faster_variant() -> None:
    assert reason_against_fusion(1536, 2048) is None
    assert reason_against_fusion(1024, 2048) is None
    assert reason_against_fusion(28672, 4096) is None
    assert reason_against_fusion(4096, 7168) == "the reduction over 7168 is at least 6144"
    assert (
        reason_against_fusion(1024, 4096)
        == "the reduction over 4096 is at least 4096, and 1024 columns do not fill multiples of 192"
    )
    assert "520 rows of a weight are not a multiple of 16" in str(reason_against_fusion(520, 2048))
    with pytest.raises(UnsupportedError, match=r"n \(520\) must be a multiple of 16"):
        choose_variant(Pass.FORWARD_SWIGLU, 1000, 8, 520, 384)


def test_every_variant_belongs_to_the_pass_with_the_longest_matching_name() -> None:
    assert pass_of("forward_pingpong_128x128_1x2") is Pass.FORWARD
    assert pass_of("forward_swiglu_pingpong_128x128_1x2") is Pass.FORWARD_SWIGLU
    assert {pass_of(variant) for variant in VARIANTS} == set(Pass)


def test_weight_gradients_walk_along_their_longer_side() -> None:
    tall, wide = (16384, 8, 28672, 4096), (16384, 8, 4096, 14336)
    assert choose_variant(Pass.WEIGHT_GRAD_BF16, *tall).along_n
    assert not choose_variant(Pass.WEIGHT_GRAD_BF16, *wide).along_n
    assert not choose_variant(Pass.WEIGHT_GRAD_ADD, *wide).along_n
    assert choose_variant(Pass.WEIGHT_GRAD_ADD, 4096, 32, 1536, 2048).along_n  # sums that are read


def test_only_the_largest_tile_of_plain_activations_walks_in_bands() -> None:
    assert choose_variant(Pass.FORWARD, 16384, 8, 28672, 4096).band == 16
    assert choose_variant(Pass.FORWARD, 32768, 32, 1536, 2048).band == 0


def test_long_reductions_with_swiglu_walk_in_bands() -> None:
    assert choose_variant(Pass.FORWARD_SWIGLU, 16384, 8, 28672, 4096).band == 16
    assert choose_variant(Pass.FORWARD_SWIGLU, 32768, 32, 1536, 2048).band == 0


def test_the_rule_chooses_every_variant_for_some_sizes() -> None:
    sizes = (384, 1024, 2048, 4096, 7168)
    chosen = {
        choose_variant(which, rows, 8, n, k).variant
        for which in Pass
        for rows in (0, 1024, 4096, 16384)
        for n in sizes
        for k in sizes
    }
    assert chosen == set(VARIANTS)


def test_the_reason_of_a_choice_has_the_compared_numbers() -> None:
    assert (
        choose_variant(Pass.FORWARD, 1000, 8, 384, 384).reason
        == "125 rows a group are fewer than 256"
    )
    assert "7168 is at least 4096" in choose_variant(Pass.FORWARD, 16384, 32, 4096, 7168).reason


def test_a_variant_can_be_requested() -> None:
    choice = choose_variant(Pass.FORWARD, 1000, 8, 384, 384, variant=f"forward_{C}")
    assert choice == VariantChoice(f"forward_{C}", along_n=False, band=0, reason="it was asked for")
    with pytest.raises(
        UnsupportedError,
        match="must compute the product data_grad: 'forward_.* Use data_grad_cooperative",
    ):
        choose_variant(Pass.DATA_GRAD, 1000, 8, 384, 384, variant=f"forward_{C}")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1000, 0, 384, 384), "between 1 and 1024: it is 0"),
        ((1000, 1025, 384, 384), "between 1 and 1024: it is 1025"),
        ((1000, 8, 380, 384), r"n \(380\) and k \(384\) must be positive multiples of 8"),
        ((1000, 8, 384, 0), r"n \(384\) and k \(0\) must be positive"),
        ((-1, 8, 384, 384), r"rows \(-1\) not negative"),
        ((1000, 1024, 2**22, 8), "sizes must fit 32 bits"),
    ],
)
def test_sizes_that_the_kernels_do_not_support_are_refused(
    sizes: tuple[int, int, int, int], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        choose_variant(Pass.FORWARD, *sizes)


def test_the_workspace_is_small() -> None:
    assert workspace_bytes(256, 132) < 200_000
