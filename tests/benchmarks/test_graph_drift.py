"""The search for drift names the first step and tensor in which a training with graphs differs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.attention_repeats import attention_repeats
from benchmarks.drift_settings import Setting, chosen_settings, settings_of
from benchmarks.graph_drift import Search, lines_of, parser
from benchmarks.shapes import LAYOUTS, SHAPES
from benchmarks.step_trace import Trace, digest, first_difference, largest_gap
from lightning_megatron.training.gradients import GradientReducer

NAMES = ("head", "query", "embedding")
#: Parameter whose gradient the spoiled training changes.
QUERY = "model.layers.1.attention.qkv.weight"


def trace(**changed: Any) -> Trace:
    """Return the trace of two steps."""
    default = Trace(
        [3.0, 2.0],
        NAMES,
        torch.arange(6).view(2, 3),
        torch.full((2, 3), 10.0, dtype=torch.float64),
        torch.arange(6).view(2, 3),
    )
    return replace(default, **changed)


def test_the_first_difference_is_the_earliest_stage_of_the_earliest_step() -> None:
    same = [trace(), trace()]
    assert first_difference(same, [trace(), trace()]) is None
    gradients = trace().gradients.clone()
    gradients[1, 1:] += 1
    updated = trace().updated + 1
    magnitudes = trace().magnitudes.clone()
    magnitudes[1, 1] += 1e-3
    last = trace(gradients=gradients, magnitudes=magnitudes)
    difference = first_difference(same, [trace(), last])
    assert difference is not None
    assert str(difference) == (
        "step 2, gradients of rank 1: 2 of 3: query (1.0e-04), embedding (0.0e+00)"
    )
    difference = first_difference(same, [trace(updated=updated), last])
    assert difference is not None
    assert (difference.step, difference.stage, difference.rank, difference.names) == (
        1,
        "parameters",
        0,
        NAMES,
    )
    drifted = [trace(losses=[3.0, 2.5]), last]
    assert str(first_difference(same, drifted)) == "step 2, loss of rank 0 (+5.0e-01)"
    assert largest_gap(same, drifted) == 0.5
    lost = [trace(losses=[float("nan"), 2.0]), last]
    assert str(first_difference(same, lost)) == "step 1, loss of rank 0 (+nan)"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_digest_distinguishes_single_bits_that_a_sum_does_not(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype)
    assert torch.equal(digest(tensor), digest(tensor.clone()))
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    changed = tensor.clone()
    changed.view(bits)[0] += 1
    changed.view(bits)[3] -= 1
    assert tensor.view(bits).sum() == changed.view(bits).sum()
    assert not torch.equal(digest(tensor), digest(changed))
    assert tensor.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_chosen_settings_include_their_twins_and_unknown_names_are_refused() -> None:
    settings = settings_of(SHAPES["tiny_moe"], LAYOUTS["ep2"])
    names = [setting.name for setting in settings]
    assert len(set(names)) == len(names)
    assert [setting.name for setting in chosen_settings(settings, ["segments again"])] == [
        "eager",
        "segments",
        "segments again",
    ]
    assert chosen_settings(settings, []) == settings
    dense = [setting.name for setting in settings_of(SHAPES["tiny"], LAYOUTS["single"])]
    assert "only mlp" in dense
    assert not {"only experts", "no overlap", "all-gather"} & set(dense)
    with pytest.raises(ValueError, match="no overlap are not. Use eager, segments"):
        chosen_settings(settings_of(SHAPES["tiny"], LAYOUTS["single"]), ["no overlap"])


def test_attention_has_the_same_bits_in_every_repeat() -> None:
    assert attention_repeats(SHAPES["tiny_llama"], torch.device("cpu"), 3) == (0, None)


def change_last_bits(step: int) -> AbstractContextManager[Any]:
    """Change single bits of one gradient in a step."""
    finish = GradientReducer.finish
    steps = []

    def finish_wrongly(reducer: GradientReducer, names: Any, *others: Any) -> None:
        finish(reducer, names, *others)
        steps.append(names)
        if len(steps) == step:
            gradient = reducer._main.slices[QUERY].gradient
            gradient.mul_(1 + 1e-6)

    return patch.object(GradientReducer, "finish", finish_wrongly)


def test_settings_in_one_process_equal_eager_steps_and_a_wrong_bit_is_found() -> None:
    line = ["--accelerator", "cpu", "--model", "tiny_mixtral", "--layout", "single", "--steps", "5"]
    lines: list[str] = []
    search = Search(parser().parse_args(line), lines.append)
    settings = {
        setting.name: setting for setting in settings_of(SHAPES["tiny_mixtral"], LAYOUTS["single"])
    }
    for name in (
        "eager",
        "segments",
        "deterministic",
        "synchronised",
        "serial",
        "math attention",
        "only experts",
    ):
        search.run(settings[name])
    assert lines[0].startswith("eager: losses 6.2")
    for text in lines[1:]:
        assert "in all bits of 5 steps" in text, text
        assert ", 0 graphs" not in text, text
    search.run(Setting("wrong", settings["segments"].graphs, around=lambda: change_last_bits(4)))
    assert f"first in step 4, gradients of rank 0: 1 of 29: {QUERY} (" in lines[-1], lines[-1]
    assert 5e-7 < float(lines[-1].split(QUERY)[1][2:9]) < 2e-6
    search.run(Setting("refused", {"mode": "segments", "scopes": ["preprocess"]}))
    assert lines[-1].startswith("refused: failed: ParallelPlanError: "), lines[-1]


def test_the_program_compares_the_trainings_of_two_ranks(tmp_path: Path) -> None:
    line = ["--accelerator", "cpu", "--model", "tiny_mixtral", "--steps", "5", "--seconds", "300"]
    line += ["--options", '{"bucket_size": 20000}', "--log", str(tmp_path / "log")]
    line += ["--settings", "no cuts", "serial"]
    lines, failure = lines_of(line)
    assert failure == ""
    assert lines[0] == "attention's backward pass: 0 of 40 repeats differ alone"
    by = "attention's backward pass by deterministic algorithms"
    assert lines[1] == f"{by}: 0 of 40 repeats differ alone"
    assert "experts by all_gather" in lines[2]
    assert "no cuts: equal to eager in all bits of 5 steps, 2 graphs" in lines[3]
    # Two graphs for each of three pieces, since two buckets end inside of the model.
    assert "serial: equal to eager in all bits of 5 steps, 6 graphs" in lines[4]
