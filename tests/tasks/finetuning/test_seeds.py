"""``seeds`` has the median of several fits and the ensemble of their models."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch

from lightning_megatron.cli.main import main
from lightning_megatron.cli.seeds import SeedRun
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.tasks.finetuning.saved_scores import SavedScores, best_scores
from tests.tasks.finetuning.folders import save_encoder, write_qqp


def test_a_folder_with_another_fit_is_refused(tmp_path):
    run = SeedRun(1, tmp_path / "seed1")
    run.folder.mkdir()
    with pytest.raises(UnsupportedError, match="must be new, or have a fit with the same options"):
        run.fit(["--model.learning_rate=1"])
    (run.folder / "options.json").write_text(json.dumps(run.options(["a"]), indent=2))
    (run.folder / "done").touch()
    run.fit(["a"])  # A finished fit is not repeated.
    with pytest.raises(UnsupportedError, match="must be new"):
        run.fit(["b"])


def test_a_fit_that_fails_is_reported_with_its_exit_code(tmp_path):
    run = SeedRun(1, tmp_path)
    run._run("layout", ["--world-size", "4"])
    with pytest.raises(UnsupportedError, match="layout of seed 1 must succeed: .* exit code 2"):
        run._run("layout", ["--world-size", "4", "--tp", "3"])


def test_best_scores_of_a_fit_belong_to_its_best_result(tmp_path):
    is_seen = torch.ones(3, dtype=torch.bool)
    for step, accuracy in ((5, 0.5), (10, 0.75), (15, 0.25)):
        scores = torch.full((3, 2), float(step))
        SavedScores(scores, is_seen, {"accuracy": accuracy}).write(tmp_path, "val", step)
    scores_of_best = best_scores(tmp_path, "val", "accuracy")
    assert scores_of_best.results == {"accuracy": 0.75}
    assert torch.equal(scores_of_best.scores, torch.full((3, 2), 10.0))
    with pytest.raises(CheckpointMismatchError, match="must have scores of the part 'test'"):
        best_scores(tmp_path, "test", "accuracy")
    with pytest.raises(CheckpointMismatchError, match="must be one of accuracy: it is 'f1'"):
        best_scores(tmp_path, "val", "f1")


def test_several_seeds_have_a_median_and_an_ensemble(tmp_path, capfd, monkeypatch):
    pytest.importorskip("transformers")

    def run(self: SeedRun, name: str, options: Sequence[str]) -> None:
        with redirect_stdout(sys.stderr):
            main([name, *options])

    monkeypatch.setattr(SeedRun, "_run", run)
    model = save_encoder(tmp_path / "bert", dropout=0.1)
    files = write_qqp(tmp_path / "qqp", num_train=24, num_val=15)
    (tmp_path / "test.tsv").write_text((files / "dev.tsv").read_text())
    command = [
        "seeds", "--seeds", "2", "--test", "--output", str(tmp_path / "runs"),
        "-c", "recipe:bert_qqp", f"--model.path={model}",
        f"--data.folder={files}", f"--data.test=[{tmp_path / 'test.tsv'}]",
        "--data.seq_length=32", "--data.global_batch_size=8", "--model.learning_rate=0.01",
        "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.precision=32-true",
        "--trainer.max_epochs=2",
    ]  # fmt: skip
    main(command)
    report: dict[str, Any] = json.loads(capfd.readouterr().out)
    seeds = report["seeds"]
    assert list(seeds) == ["seed1", "seed2"]
    for name in ("accuracy", "f1"):
        values = [scores[name] for scores in seeds.values()]
        assert report["median"][name] == pytest.approx(sum(values) / 2)
    worst = min(seeds, key=lambda name: seeds[name]["accuracy"])
    assert report["median_run"] == worst
    # The test set has the rows of the validation set here, and the model is the best checkpoint.
    assert report["test"]["of_the_median_run"] == pytest.approx(seeds[worst])
    assert report["test"]["ensemble"] == pytest.approx(report["ensemble"])
    tables = []
    for seed in seeds:
        folder = tmp_path / "runs" / seed / "scores"
        saved = [SavedScores.read(path) for path in sorted(folder.glob("val-*.npz"))]
        tables.append(max(saved, key=lambda scores: scores.results["accuracy"]).scores.softmax(1))
    predicted = (tables[0] + tables[1]).argmax(1).tolist()
    lines = (files / "dev.tsv").read_text().splitlines()[1:]
    labels = [int(line.split("\t")[-1]) for line in lines]
    is_right = [label == guess for label, guess in zip(labels, predicted, strict=True)]
    assert report["ensemble"]["accuracy"] == pytest.approx(sum(is_right) / 15)
