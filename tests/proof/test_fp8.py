"""Tests that every layout trains in 8 bits as one process with the same recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron import FP8, ParallelPlanError
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.strategy.checks import fp8_checks
from tests.proof import training
from tests.proof.training import Job, Report, train, train_all
from tests.strategy.graph_fits import SEGMENTS, fit
from tests.sweeps import chosen
from tests.world import run_world

pytestmark = pytest.mark.slow

STEPS = 3
_SIZES = {"vocab_size": 300, "max_seq_length": 16, "num_layers": 4, "num_heads": 4}
#: Sizes of all ranks are multiples of 16 with tp 2, or of 128 for blocks.
CONFIGS = {
    "fp8": GPTConfig.llama(**_SIZES, hidden_size=64, num_kv_heads=2, ffn_hidden_size=64),
    "fp8, gpt2": GPTConfig.gpt2(**_SIZES, hidden_size=64),
    "fp8, blocks": GPTConfig.llama(**_SIZES, hidden_size=256, num_kv_heads=4, ffn_hidden_size=256),
}
#: Every microbatch has one sample: scales belong to microbatches, and data ranks have different
#: samples.
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = chosen(
    {
        "tensorwise, tp2+sp dp2": ("fp8", "tensorwise", {"tp": 2}),
        "tensorwise, tp2 pp2": (
            "fp8, gpt2",
            "tensorwise",
            {"tp": 2, "pp": 2, "sequence_parallel": False},
        ),
        "tensorwise, tp2+sp zb-v": (
            "fp8",
            "tensorwise",
            {"tp": 2, "pp": 2, "vpp": 2, "schedule": "zb-v"},
        ),
        "tensorwise, cp2 tp2": ("fp8", "tensorwise", {"cp": 2, "tp": 2}),
        "tensorwise, dp4": ("fp8", "tensorwise", {}),
        "tensorwise, tp2+sp overlapped": (
            "fp8",
            "tensorwise",
            {"tp": 2, "overlap_tensor_parallel": True},
        ),
        "delayed, tp2+sp dp2": ("fp8", "delayed", {"tp": 2}),
        "delayed, tp2 pp2": (
            "fp8, gpt2",
            "delayed",
            {"tp": 2, "pp": 2, "sequence_parallel": False},
        ),
        "delayed, zb-h1 cp2": ("fp8", "delayed", {"cp": 2, "pp": 2, "schedule": "zb-h1"}),
        "delayed, dp4, recomputed": ("fp8", "delayed", {"recompute": "full"}),
        "rowwise, tp2+sp pp2": ("fp8", "rowwise", {"tp": 2, "pp": 2}),
        "rowwise, cp2, recomputed": ("fp8", "rowwise", {"cp": 2, "recompute": "full"}),
        "rowwise, tp2 dp2": ("fp8, gpt2", "rowwise", {"tp": 2, "sequence_parallel": False}),
        "blockwise, tp2+sp dp2": ("fp8, blocks", "blockwise", {"tp": 2}),
        "blockwise, zb-h1": ("fp8, blocks", "blockwise", {"tp": 2, "pp": 2, "schedule": "zb-h1"}),
    },
    "tensorwise, tp2+sp zb-v",
    "delayed, tp2 pp2",
    "delayed, dp4, recomputed",
    "rowwise, cp2, recomputed",
    "blockwise, zb-h1",
)


def fp8_settings(recipe: str) -> FP8:
    return FP8(recipe, emulate=True, last_bf16=1, keep=("layers.0.mlp.*",))  # type: ignore[arg-type]


def jobs() -> dict[str, Job]:
    """Return every job of four processes by name."""
    training.KINDS.update(CONFIGS)
    return {
        name: Job(
            kind,
            layout={**layout, "fp8": fp8_settings(recipe), "microbatch_size": 1},
            compares=False,
        )
        for name, (kind, recipe, layout) in LAYOUTS.items()
    }


def run_all(rank: int, size: int, folder: Path) -> tuple[dict[str, Report], list[str]]:
    """Train all jobs on four processes; also return the differences of graphs from eager steps."""
    differences = []
    for recipe in chosen(("rowwise", "delayed"), "delayed"):
        layout = {"pp": 2, "fp8": FP8(recipe, emulate=True)}
        by_graphs = fit(SEGMENTS, size, layout)
        assert all(by_graphs.num_graphs[4:]), by_graphs.num_graphs
        differences += by_graphs.differences_from(fit(None, size, layout))
    return train_all(rank, size, jobs(), str(folder), STEPS), differences


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Report], list[str]]]:
    """Run four processes once for all tests."""
    return run_world(run_all, 4, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def twins() -> dict[tuple[str, str], Report]:
    """Train every kind with every recipe in this process."""
    jobs()
    return {
        (kind, recipe): train(
            Job(kind, layout={"fp8": fp8_settings(recipe), "microbatch_size": 1}),
            1,
            "cpu",
            steps=STEPS,
        )
        for kind, recipe in {(kind, recipe) for kind, recipe, _ in LAYOUTS.values()}
    }


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_layout_trains_as_one_process(name, ranks, twins):
    kind, recipe, _ = LAYOUTS[name]
    twin = twins[kind, recipe]
    assert twin.losses[-1] < twin.losses[0]
    for reports, _ in ranks:
        assert reports[name].losses == pytest.approx(twin.losses, abs=1e-10, rel=0)
        assert reports[name].norms == pytest.approx(twin.norms, abs=1e-10, rel=0)


def test_rounding_changes_losses_by_less_than_half_a_percent(twins):
    exact = train(Job("fp8", layout={"microbatch_size": 1}), 1, "cpu", steps=STEPS)
    for recipe in ("tensorwise", "delayed", "rowwise"):
        losses = twins["fp8", recipe].losses
        assert losses != exact.losses
        assert losses == pytest.approx(exact.losses, rel=0.005)


def test_graphs_equal_eager_steps(ranks):
    for _, differences in ranks:
        assert differences == []


def test_a_device_without_products_in_8_bits_is_refused_before_processes_start():
    with pytest.raises(ParallelPlanError, match="needs a GPU with matrix products in 8 bits: cpu"):
        train(Job("llama-tied", layout={"fp8": "tensorwise"}), 1, "cpu", steps=1)


def test_a_pattern_that_matches_no_layer_is_refused():
    jobs()
    wrong = FP8(emulate=True, keep=("*.mlp.middle",))
    with pytest.raises(
        ParallelPlanError, match="'\\*.mlp.middle' matches none of layers.N.attention"
    ):
        train(Job("fp8", layout={"fp8": wrong}), 1, "cpu", steps=1)


def test_sizes_that_are_not_multiples_of_128_are_refused():
    with pytest.raises(ParallelPlanError, match="multiples of 128"):
        train(Job("llama-tied", layout={"fp8": FP8("blockwise", emulate=True)}), 1, "cpu", steps=1)


def test_precisions_other_than_bf16_are_refused(monkeypatch):
    monkeypatch.setattr(fp8_checks, "has_products", lambda device, is_blockwise: True)
    for precision, message in (
        ("16-mixed", "because its loss scale"),
        ("32-true", "needs precision bf16"),
    ):
        with pytest.raises(ParallelPlanError, match=message):
            fp8_checks.check_fp8(FP8(), torch.device("cuda"), precision)
    fp8_checks.check_fp8(FP8(), torch.device("cuda"), "bf16-mixed")
