"""Test that two microbatches on two streams of a GPU train with the bits of one after the other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from lightning_megatron import GPTConfig
from lightning_megatron.groups.turns import PassTurns
from tests.fits import EXPERTS, LLAMA_SIZES, Job, Tokens, differences, run_job
from tests.gpu.ranks import run_ranks

SIZES: dict[str, Any] = {**LLAMA_SIZES, "hidden_size": 256, "ffn_hidden_size": 512}
MODEL = GPTConfig.llama(
    **SIZES,
    experts={**EXPERTS, "ffn_hidden_size": 256, "shared_ffn_hidden_size": 128},
    hidden_dropout=0.1,
)
#: Options of the strategy, by the number of ranks.
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "gathered": {"experts.transport": "all_gather"},
        "each to its experts": {"experts.transport": "all_to_all", "recompute": "full"},
    },
    4: {"dualpipe-v": {"pp": 2, "vpp": 2, "schedule": "dualpipe-v", "recompute": "experts"}},
}
BATCH, STEPS = 16, 6


def train_both(rank: int, size: int) -> dict[str, Any]:
    """Return what differs with turns and without, what differs without, and the streams of turns."""
    found = {}
    for name, options in CASES[size].items():
        streams: set[int] = set()
        end_turn = PassTurns.end_turn

        def note(self: PassTurns, streams: set[int] = streams, end_turn: Any = end_turn) -> None:
            streams.add(torch.cuda.current_stream().cuda_stream)
            end_turn(self)

        data = partial(Tokens, STEPS * BATCH, BATCH)
        options = {"ep": 2, "microbatch_size": 1, **options}
        job = Job(MODEL, options, "bf16-mixed", STEPS, {"accelerator": "gpu"}, data, batch=BATCH)
        plain, again = run_job(job, size), run_job(job, size)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PassTurns, "end_turn", note)
            turns = run_job(replace(job, strategy={**options, "experts.overlap": True}), size)
        found[name] = differences(turns, plain), differences(again, plain), len(streams)
    return found


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.gpu2), pytest.param(4, marks=pytest.mark.gpu4)]
)
def test_turns_on_two_streams_train_bitwise_as_without(size: int):
    for found in run_ranks(train_both, size):
        for name, (with_turns, repeated, num_streams) in found.items():
            assert num_streams == 2, name
            assert set(with_turns) <= set(repeated), name
