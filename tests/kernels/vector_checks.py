"""Checks of products of a weight and one vector against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional as F

from lightning_megatron.kernels import triton as kernels

if TYPE_CHECKING:
    from tests.kernels.checks import Draw, Sizes

#: Rows and columns of the weights: one element, odd sizes, and more columns than a program reads.
SHAPES = ((1, 1), (5, 37), (3, 1024), (7, 2049), (33, 3584))


def check_vector_products(draw: Draw, sizes: Sizes) -> None:
    """Compare products with and without a bias."""
    from tests.kernels.checks import check_rounded

    for shape in SHAPES:
        vector, weight, bias = draw(shape[1]), draw(*shape), draw(shape[0])
        for bias_or_none in (None, bias):
            actual = kernels.multiply_vector(vector, weight, bias_or_none, is_stored=True)
            expected = F.linear(
                vector.double(),
                weight.double(),
                None if bias_or_none is None else bias_or_none.double(),
            )
            check_rounded(actual, expected, f"weight {shape}, bias {bias_or_none is not None}")
