"""Order of parameters in checkpoints of one process, and states of random generators."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.placement import PlacementShape
from lightning_megatron.strategy.checkpoints.name_order import (
    merge_orders,
    named_numbers,
    order_groups,
)
from lightning_megatron.strategy.process.random_states import random_states, restore_random_states


def _model_and_stage_names(
    pp: int,
    vpp: int,
    stage_layers: Sequence[int] | None = None,
    shape: PlacementShape = "loop",
) -> tuple[list[str], list[list[str]]]:
    """Return the parameter names of a GPT of eight layers, of the full model and of each stage."""
    config = GPTConfig.gpt2(
        vocab_size=32, max_seq_length=8, num_layers=8, hidden_size=8, num_heads=2
    )
    with torch.device("meta"):
        names = [f"net.{name}" for name, _ in GPT(config).named_parameters()]
    stages: list[list[str]] = []
    layout = ParallelLayout(pp, pp=pp, vpp=vpp, stage_layers=stage_layers, shape=shape)
    layers = config.partition(layout).by_stage(layout.placement)
    for number, chunks in enumerate(layers):
        held = {str(layer) for chunk in chunks for layer in chunk}
        first, last = number == 0, number == (0 if shape == "v" else pp - 1)
        parts = {"embedding": first, "final_norm": last, "head": last}
        stages.append(
            [name for name in names if name.split(".")[2] in held or parts.get(name.split(".")[1])]
        )
    return names, stages


@pytest.mark.parametrize(
    ("pp", "vpp", "stage_layers", "shape"),
    [
        *((pp, vpp, None, "loop") for pp, vpp in ((1, 1), (2, 1), (4, 1), (2, 2), (2, 4), (8, 1))),
        (2, 1, [8, 0], "loop"),
        (2, 1, [0, 8], "loop"),
        (4, 1, [0, 5, 3, 0], "loop"),
        (3, 1, [0, 8, 0], "loop"),
        (2, 2, None, "v"),
        (4, 2, None, "v"),
    ],
)
def test_names_of_stages_merge_into_the_order_of_the_full_model(
    pp: int, vpp: int, stage_layers: list[int] | None, shape: PlacementShape
) -> None:
    names, stages = _model_and_stage_names(pp, vpp, stage_layers, shape)
    assert sorted(name for stage in stages for name in stage) == sorted(names)
    assert merge_orders(stages) == names
    decays = [
        [[n for n in stage if "norm" not in n], [n for n in stage if "norm" in n]]
        for stage in stages
    ]
    expected = [[n for n in names if "norm" not in n], [n for n in names if "norm" in n]]
    assert order_groups(decays, names) == expected


def test_names_before_the_blocks_of_the_last_stage_come_before_all_blocks() -> None:
    stages = [["words", "blocks.0"], ["norm", "blocks.1", "head"]]
    assert merge_orders(stages) == ["words", "norm", "blocks.0", "blocks.1", "head"]


def test_groups_not_in_the_models_order_are_refused_on_several_stages() -> None:
    names, stages = _model_and_stage_names(2, 1)
    backwards = [[stage[::-1]] for stage in stages]
    with pytest.raises(
        CheckpointMismatchError, match="must be in the model's order to be numbered"
    ):
        order_groups(backwards, names)
    # One process may have any order.
    assert order_groups([[names[::-1]]], names) == [names[::-1]]


def test_saved_parameter_numbers_map_to_saved_names_or_else_to_the_group_names() -> None:
    assert named_numbers({"params": [0, 1]}, ["a", "b"]) == ["a", "b"]
    assert named_numbers({"params": [0, 1], "param_names": ["b", "a"]}, ["a", "b"]) == ["b", "a"]
    with pytest.raises(CheckpointMismatchError, match="3 were saved, the group has 2"):
        named_numbers({"params": [0, 1, 2]}, ["a", "b"])


def test_random_generators_continue_from_states_that_load_with_weights_only() -> None:
    device = torch.device("cpu")
    for draw in (
        lambda: np.random.standard_normal(),
        lambda: random.gauss(0, 1),
        lambda: torch.randn(3),
    ):
        draw()  # The generator now holds the second number of a pair of normal numbers.
    file = io.BytesIO()
    torch.save(random_states(device), file)
    expected = [
        torch.rand(4).tolist(),
        np.random.standard_normal(3).tolist(),
        [random.gauss(0, 1) for _ in range(3)],
    ]
    torch.manual_seed(9)
    np.random.seed(9)
    random.seed(9)
    file.seek(0)
    restore_random_states(torch.load(file, weights_only=True), device)
    actual = [
        torch.rand(4).tolist(),
        np.random.standard_normal(3).tolist(),
        [random.gauss(0, 1) for _ in range(3)],
    ]
    assert actual == expected
