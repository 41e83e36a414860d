"""Tests that training with losses in chunks matches training with stored logits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.errors import UnsupportedError
from tests.proof import test_hugging_face as hugging_face
from tests.proof.training import Job, Report, train, train_all
from tests.strategy.graph_fits import FULL, SEGMENTS, fit
from tests.strategy.tiny import TinyLM
from tests.sweeps import chosen
from tests.world import run_world

pytestmark = pytest.mark.slow

STEPS = 3
#: A chunk of 7 divides neither the sequences nor the microbatches.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp4": ("gpt2-tied", {"tp": 4, "sequence_parallel": False}),
    "tp2+sp pp2": ("llama-untied", {"tp": 2, "pp": 2}),
    "pp2 vpp2 dp2": ("llama-tied", {"pp": 2, "vpp": 2}),
    "zb-v, tied": ("llama-tied", {"pp": 2, "vpp": 2, "schedule": "zb-v", "tp": 2}),
    "cp2 tp2+sp": ("llama-untied", {"cp": 2, "tp": 2}),
    "cp2 pp2, recomputed": ("gpt2-tied", {"cp": 2, "pp": 2, "recompute": "full"}),
    "dp4, whole state": ("gpt2-tied", {"zero": 0}),
}
#: Layouts whose forward pass computes the gradients of summed losses.
EARLY: dict[str, tuple[str, dict[str, Any]]] = {
    "early tp4": ("llama-untied", {"tp": 4, "sequence_parallel": False}),
    "early tp2+sp, zb-v, tied": ("llama-tied", {"pp": 2, "vpp": 2, "schedule": "zb-v", "tp": 2}),
    "early cp2, gpipe": ("gpt2-tied", {"cp": 2, "pp": 2, "schedule": "gpipe"}),
}
GRAPHS = chosen(
    {
        "segments": (SEGMENTS, {"tp": 2, "pp": 2, "loss_chunk": 7}),
        "full": (FULL, {"cp": 2, "loss_chunk": 7}),
        "early segments": (SEGMENTS, {"tp": 2, "pp": 2, "loss_chunk": "forward"}),
        "early full": (FULL, {"cp": 2, "loss_chunk": "forward"}),
    },
    "early full",
)


class SummedLM(TinyLM):
    """Model whose loss is a sum, divided by the number of tokens."""

    def forward(self, batch: Any) -> Any:
        """Return the mean loss."""
        return self.net(batch["tokens"], batch["labels"], sums=True) / batch["labels"].numel()


def jobs() -> dict[str, Job]:
    """Return jobs of four processes by name; the last one ignores labels and counts tokens."""
    runs = {
        name: Job(kind, layout=layout | {"loss_chunk": 7}, compares=False)
        for name, (kind, layout) in LAYOUTS.items()
    }
    for name, (kind, layout) in EARLY.items():
        early = layout | {"loss_chunk": "forward"}
        runs[name] = Job(kind, layout=early, counts=True, compares=False)
    counted = {"tp": 2, "loss_chunk": 7}
    runs["counted"] = Job("gpt2-tied", layout=counted, counts=True, compares=False)
    return chosen(
        runs,
        "tp4",
        "tp2+sp pp2",
        "cp2 pp2, recomputed",
        "dp4, whole state",
        "early tp2+sp, zb-v, tied",
        "early cp2, gpipe",
        "counted",
    )


@dataclass(frozen=True)
class RankReport:
    """Report of one rank of four."""

    reports: dict[str, Report]
    differences: dict[str, list[str]]
    fine_tuned: hugging_face.Report


def run_all(rank: int, size: int, folder: Path, model: str) -> RankReport:
    """Run all jobs, graphs and fine-tuning on four processes."""
    differences = {}
    for name, (graphs, layout) in GRAPHS.items():
        by_graphs = fit(graphs, size, layout, module=SummedLM())
        assert all(by_graphs.num_graphs[4:]), by_graphs.num_graphs
        differences[name] = by_graphs.differences_from(fit(None, size, layout, module=SummedLM()))
    tuned = hugging_face.train(model, "tokens", {"tp": 2, "pp": 2, "loss_chunk": 7}, size)
    return RankReport(train_all(rank, size, jobs(), str(folder), STEPS), differences, tuned)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a small Llama as Hugging Face does."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    name, settings = hugging_face.CONFIGS["llama"]
    config = getattr(transformers, name)(**settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, model: str) -> list[RankReport]:
    """Run four processes once for all tests."""
    return run_world(run_all, 4, tmp_path_factory.mktemp("four"), model)


@pytest.fixture(scope="module")
def twins() -> dict[tuple[str, bool], Report]:
    """Train every kind in this process, with stored logits."""
    return {
        (kind, counts): train(
            Job(kind, layout={"microbatch_size": 8}, counts=counts), 1, "cpu", steps=STEPS
        )
        for kind, counts in {(job.kind, job.counts) for job in jobs().values()}
    }


@pytest.mark.parametrize("name", list(jobs()))
def test_every_layout_trains_as_one_process_that_stores_logits(name, ranks, twins):
    job = jobs()[name]
    twin = twins[job.kind, job.counts]
    assert twin.losses[-1] < twin.losses[0]
    for rank in ranks:
        report = rank.reports[name]
        assert report.losses == pytest.approx(twin.losses, abs=1e-12, rel=0)
        assert report.norms == pytest.approx(twin.norms, abs=1e-12, rel=0)
    weights = ranks[0].reports[name].weights
    assert set(weights) == set(twin.weights)
    for key, weight in weights.items():
        # The vocabulary's padding belongs to no full tensor.
        expected = twin.weights[key].narrow(0, 0, weight.shape[0])
        torch.testing.assert_close(weight, expected, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("mode", list(GRAPHS))
def test_graphs_equal_eager_steps(mode, ranks):
    for rank in ranks:
        assert rank.differences[mode] == []


def test_a_hugging_face_model_trains_as_with_stored_logits(model, ranks):
    stored = hugging_face.train(model, "tokens", {}, 1)
    chunked = hugging_face.train(model, "tokens", {"loss_chunk": 7}, 1)
    early = hugging_face.train(model, "tokens", {"loss_chunk": "forward"}, 1)
    assert chunked.is_swapped
    for report in (chunked, early, *(rank.fine_tuned for rank in ranks)):
        assert report.losses == pytest.approx(stored.losses, abs=1e-5)


def test_logits_of_a_call_with_labels_are_computed_again_without_gradients(model):
    results: dict[str, Any] = {}

    class ReadsLogits(hugging_face.FineTune):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with pytest.raises(UnsupportedError, match="loss_chunk .7. stores no logits"):
                _ = self._output(batch).logits
            output = self._output(batch)
            with torch.no_grad():
                results["logits"] = output.logits
                results["expected"] = self.model(input_ids=batch["input_ids"]).logits
            self.log("loss", output.loss)
            return output.loss

        def _output(self, batch: Any) -> Any:
            return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"])

    # The trial of the first batch has no gradients.
    layout = {"loss_chunk": 7, "check_microbatches": False}
    trainer = hugging_face.trainer_of(layout, 1, 2, max_steps=1)
    trainer.fit(ReadsLogits(model, "tokens"), hugging_face.InOrder("tokens"))
    assert torch.equal(results["logits"], results["expected"])
