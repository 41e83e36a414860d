"""HuggingFaceCausalLM has the losses of one process in every layout, also with experts and with a plan for a
family without a table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.errors import UnsupportedError
from tests.models.test_hugging_face_lm import BALANCED, B, build_module, save_model, train
from tests.world import run_world

EACH: dict[str, Any] = {"microbatch_size": 1, "check_microbatches": False}
FC1, FC2 = "model.model.decoder.layers.*.fc1", "model.model.decoder.layers.*.fc2"
#: Name: kind of the model, options of the module, layout of four ranks, and that of one process.
JOBS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "stages": ("llama", {}, {"tp": 2, "pp": 2}, {"microbatch_size": B}),
    "microbatches": ("llama", {}, {"tp": 2, "microbatch_size": 2}, {"microbatch_size": B}),
    "from scratch": ("llama", {"from_scratch": True}, {"pp": 2}, {"microbatch_size": B}),
    # Sequences have equal weight, whatever their numbers of labels.
    "experts": ("mixtral", BALANCED, {"ep": 4, **EACH}, EACH),
    "plan": ("opt", {}, {"tp": 2, "tensor_parallel_plan": {FC1: "column", FC2: "row"}}, None),
}


def run_jobs(rank: int, size: int, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (kind, options, layout, _) in JOBS.items():
        module = build_module(str(folder / kind), **options)
        results[name] = train(module, layout, size)
        if name == "experts":
            results["balance"] = float(module.trainer.strategy.expert_statistics[0].balance_loss)
    for layout, reason in (
        ({"pp": 4}, "needs exactly one model that can"),
        ({"tp": 4}, "fc1': 'column'"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            train(build_module(str(folder / "opt")), layout, size)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for kind in ("llama", "mixtral", "opt"):
        save_model(path / kind, kind)
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_world(run_jobs, 4, folder)


@pytest.mark.parametrize("name", JOBS)
def test_every_layout_has_the_losses_of_one_process(
    name: str, folder: Path, ranks: list[dict[str, Any]]
) -> None:
    kind, options, _, layout = JOBS[name]
    module = build_module(str(folder / kind), **options)
    expected = train(module, layout)
    for results in ranks:
        assert results[name] == pytest.approx(expected, abs=1e-4)
        if name == "experts":
            balance = float(module.trainer.strategy.expert_statistics[0].balance_loss)
            assert results["balance"] == pytest.approx(balance, abs=1e-4)
    if name == "experts":
        unbalanced = train(build_module(str(folder / kind), token_weighted=False), layout)
        assert unbalanced != expected
