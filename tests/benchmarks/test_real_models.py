"""Layouts of real models have the sizes of their names, and held-out reviews are of other films."""

from __future__ import annotations

import pytest

from tests.corpora import REVIEWS, need

real_models = pytest.importorskip(
    "benchmarks.real_models", reason="transformers or tokenizers", exc_type=ImportError
)


@pytest.mark.parametrize(
    ("layout", "sizes"), [("tp3", (3, 1)), ("tp2_pp2", (2, 2)), ("pp2", (1, 2))]
)
def test_a_layout_has_the_sizes_of_its_name(layout: str, sizes: tuple[int, int]) -> None:
    trainer = real_models.trainer_of(layout, 4, accelerator="cpu", max_steps=1)
    options = trainer.strategy.options
    assert (options.tp, options.pp, options.microbatch_size) == (*sizes, 4)
    assert trainer.num_devices == sizes[0] * sizes[1]


def test_a_tenth_of_the_films_is_held_out() -> None:
    need(REVIEWS)
    train, held_out = real_models.reviews()
    assert (len(train), len(held_out)) == (11399, 1409)
    assert sum(is_good for _, is_good in held_out) == 822
