"""A BERT or RoBERTa that is fine-tuned in any layout has the losses, gradient norms, weights and
results of transformers' model in a plain loop.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_megatron.swap.weights.load import full_tensors
from tests.finetuning.fits import STEPS, module_and_data, train_all, train_reference
from tests.finetuning.folders import write_tasks
from tests.world import run_world

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:Rows of ")
KINDS = ("classes", "options", "spans")
#: Parameters that add the same number to all scores of a row, so that their gradient is zero but
#: for rounding errors, which Adam enlarges.
WITHOUT_GRADIENT = {
    "options": ("head.output.bias",),
    "spans": ("head.output.bias", "layers.1.mlp_norm.bias"),
}


@pytest.fixture(scope="module", params=["Bert", "Roberta"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finetuning")
    write_tasks(root, request.param)
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_trains_like_transformers(folder: Path, kind: str) -> None:
    expected, scores = train_reference(kind, str(folder))
    module, data = module_and_data(kind, str(folder))
    family = module.source.family
    weights = dict(full_tensors(expected.weights, family, module.config, torch.float64))
    data.setup("validate")
    metric = data.scores("val")
    results = metric.results(scores, torch.ones(len(scores), dtype=torch.bool))
    expected_results = {f"val_{name}": value for name, value in results.items()} | expected.results
    assert len(expected.losses) == STEPS
    for reports in run_world(train_all, 2, str(folder), kind):
        for name, report in reports.items():
            close = {"rel": 0, "abs": 1e-10}
            assert report.losses == pytest.approx(expected.losses, **close), name
            assert report.norms == pytest.approx(expected.norms, **close), name
            assert report.results == pytest.approx(expected_results, rel=0, abs=1e-6), name
            assert report.weights.keys() == weights.keys(), name
            for key, value in weights.items():
                if key in WITHOUT_GRADIENT.get(kind, ()):
                    continue
                torch.testing.assert_close(
                    report.weights[key], value, rtol=0, atol=1e-10, msg=f"{name}: {key}"
                )
