"""The rule chooses the fastest measured variant of the grouped GEMM."""

from __future__ import annotations

from lightning_megatron.plan.grouped_gemm import (
    VARIANTS,
    Pass,
    choose_variant,
    pass_of,
    reason_against_fusion,
    workspace_bytes,
)
from tests.refusals import check_refusals

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


def test_measured_shapes_get_their_fastest_variants():
    for shape, (sizes, tiles) in MEASURED.items():
        chosen = [choose_variant(which, *sizes).variant for which in PASSES]
        expected = [f"{which}_{tile}" for which, tile in zip(PASSES, tiles, strict=True)]
        assert chosen == expected, shape
    wide = "pingpong_128x192_1x1"
    for sizes, tile in (
        ((32768, 32, 1536, 2048), wide),
        ((16384, 32, 4096, 7168), wide),
        ((4096, 32, 1536, 2048), S),
        ((32768, 32, 1024, 2048), S),
    ):
        variant = choose_variant(Pass.FORWARD_SWIGLU, *sizes).variant
        assert variant == f"forward_swiglu_{tile}", sizes


def test_swiglu_is_not_fused_where_a_separate_product_has_a_faster_variant():
    assert reason_against_fusion(1536, 2048) is None
    assert "the reduction over 7168 is at least 6144" in str(reason_against_fusion(4096, 7168))
    assert "over 4096 is at least 4096, and" in str(reason_against_fusion(1024, 4096))
    assert "520 rows of a weight are not a multiple of 16" in str(reason_against_fusion(520, 2048))


def test_every_variant_belongs_to_a_pass_and_is_chosen_for_some_sizes():
    assert {pass_of(variant) for variant in VARIANTS} == set(Pass)
    sizes = (384, 1024, 2048, 4096, 7168)
    chosen = {
        choose_variant(which, rows, 8, n, k).variant
        for which in Pass
        for rows in (0, 1024, 4096, 16384)
        for n in sizes
        for k in sizes
    }
    assert chosen == set(VARIANTS)


def test_walks_through_tiles_follow_the_sizes():
    tall, wide = (16384, 8, 28672, 4096), (16384, 8, 4096, 14336)
    assert choose_variant(Pass.WEIGHT_GRAD_BF16, *tall).along_n, "along the longer side"
    assert not choose_variant(Pass.WEIGHT_GRAD_BF16, *wide).along_n
    assert not choose_variant(Pass.WEIGHT_GRAD_ADD, *wide).along_n
    assert choose_variant(Pass.WEIGHT_GRAD_ADD, 4096, 32, 1536, 2048).along_n, "sums that are read"
    for which in (Pass.FORWARD, Pass.FORWARD_SWIGLU):
        assert choose_variant(which, *tall).band == 16
        assert choose_variant(which, 32768, 32, 1536, 2048).band == 0


def test_the_workspace_of_many_groups_is_small():
    assert 256 * 132 < workspace_bytes(256, 132) < 200_000


def test_sizes_and_variants_that_the_kernels_do_not_support_are_refused():
    check_refusals(
        choose_variant,
        [
            ((Pass.FORWARD, 1000, 0, 384, 384), "between 1 and 1024: it is 0"),
            ((Pass.FORWARD, 1000, 8, 380, 384), "must be positive multiples of 8"),
            ((Pass.FORWARD, -1, 8, 384, 384), "rows (-1) not negative"),
            ((Pass.FORWARD, 1000, 1024, 2**22, 8), "sizes must fit 32 bits"),
            ((Pass.FORWARD_SWIGLU, 1000, 8, 520, 384), "n (520) must be a multiple of 16"),
        ],
    )
