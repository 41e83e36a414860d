"""The strategy accepts the memory cases, and their table shows which estimate is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.memory import CASES, table
from benchmarks.shapes import SHAPES
from lightning_megatron import GPTConfig, MegatronStrategy
from lightning_megatron.plan import ParallelLayout
from lightning_megatron.strategy.options.sizes import check_batch_size


@pytest.mark.parametrize("name", list(CASES))
def test_the_strategy_accepts_every_case(name: str) -> None:
    case = CASES[name]
    options = MegatronStrategy(microbatch_size=case.microbatch, **case.options).options
    layout = ParallelLayout(case.devices, **options.sizes())
    config = SHAPES[case.model]
    config = GPTConfig(**{**vars(config), "num_layers": case.layers or config.num_layers})
    config.check_layout(layout, options.shards_sequence, config.max_seq_length)
    check_batch_size(case.batch, options, layout)


def test_the_table_has_a_row_for_every_stage_and_every_failed_case() -> None:
    num_bytes = {"parameters": 2**30, "gradients": 2**31}
    stage: dict[str, Any] = {
        "stage": 1,
        "held": num_bytes,
        "peak": 2**33,
        "ratio": 0.5,
        "bytes_per_parameter": 12.004,
    }
    stage["estimate"] = {**num_bytes, "peak": 2**32}
    unknown = {**stage, "peak": None, "ratio": None}
    assert table({"one": [stage, unknown], "two": []}).splitlines()[2:] == [
        "| one | 1 | 3.00 | 3.00 | 12.00 | 4.00 | 8.00 | 0.500 |",
        "| one | 1 | 3.00 | 3.00 | 12.00 | 4.00 | n/a | n/a |",
        "| two | failed | | | | | | |",
    ]
