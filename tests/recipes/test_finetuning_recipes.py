"""Tests of fine-tuning recipes: settings of the paper, and ensembles of several seeds."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_megatron.cli.main import main
from lightning_megatron.cli.seeds import SeedRun
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.finetuning.saved_scores import SavedScores, best_scores
from lightning_megatron.strategy.cli import MegatronCLI
from tests.finetuning.folders import save_encoder, write_qqp
from tests.sweeps import all_run

#: Batch size, learning rate and epochs of table 6 for 336 million parameters.
TABLE_6 = {
    "mnli": (128, 1e-5, 10),
    "qqp": (128, 5e-5, 12),
    "race": (32, 2e-5, 3),
    "squad": (64, 3e-5, 2),
}
MONITORED = {"squad": "val_f1"}


@pytest.mark.parametrize("task", TABLE_6)
def test_recipe_has_the_settings_of_the_paper(
    task: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-megatron"])
    with pytest.raises(SystemExit) as stopped:
        MegatronCLI(args=["fit", "-c", f"recipe:bert_{task}", "--print_config"])
    assert stopped.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)
    data, model, trainer = (config[name] for name in ("data", "model", "trainer"))
    settings = (
        data["init_args"]["global_batch_size"],
        model["init_args"]["learning_rate"],
        trainer["max_epochs"],
    )
    assert settings == TABLE_6[task]
    assert data["init_args"]["tokenizer"] == model["init_args"]["path"]
    # Batches of eight GPUs are multiples of the microbatch.
    assert settings[0] // 8 % trainer["strategy"]["init_args"]["microbatch_size"] == 0
    [monitored] = [
        callback["init_args"]["monitor"]
        for callback in trainer["callbacks"]
        if callback["class_path"].endswith("ModelCheckpoint")
    ]
    assert monitored == MONITORED.get(task, "val_accuracy")


def test_version_of_squad_is_chosen_by_an_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-megatron"])
    options = ["--data.version", "2.0", "--data.global_batch_size", "48", "--print_config"]
    with pytest.raises(SystemExit):
        MegatronCLI(args=["fit", "-c", "recipe:bert_squad", *options])
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["data"]["init_args"]["version"] == "2.0"


def test_a_folder_with_another_fit_is_refused(tmp_path: Path) -> None:
    run = SeedRun(1, tmp_path / "seed1")
    run.folder.mkdir()
    with pytest.raises(UnsupportedError, match="must be new, or have a fit with the same options"):
        run.fit(["--model.learning_rate=1"])
    (run.folder / "options.json").write_text(json.dumps(run.options(["a"]), indent=2))
    (run.folder / "done").touch()
    run.fit(["a"])  # A finished fit is not repeated.
    with pytest.raises(UnsupportedError, match="must be new"):
        run.fit(["b"])


def test_best_scores_of_a_fit_belong_to_its_best_result(tmp_path: Path) -> None:
    is_seen = torch.ones(3, dtype=torch.bool)
    for step, accuracy in ((5, 0.5), (10, 0.75), (15, 0.25)):
        scores = torch.full((3, 2), float(step))
        SavedScores(scores, is_seen, {"accuracy": accuracy}).write(tmp_path, "val", step)
    scores_of_best = best_scores(tmp_path, "val", "accuracy")
    assert scores_of_best.results == {"accuracy": 0.75}
    assert torch.equal(scores_of_best.scores, torch.full((3, 2), 10.0))
    with pytest.raises(CheckpointMismatchError, match="must be one of accuracy: it is 'f1'"):
        best_scores(tmp_path, "val", "f1")
    with pytest.raises(CheckpointMismatchError, match="must have scores of the part 'test'"):
        best_scores(tmp_path, "test", "accuracy")


@pytest.mark.slow
def test_several_seeds_have_a_median_and_an_ensemble(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    start = SeedRun._run

    def run(self: SeedRun, name: str, options: Sequence[str]) -> None:
        if all_run() or (self.seed, name) == (1, "fit"):
            start(self, name, options)
            return
        # One process tests as much as four.
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
        assert sorted(path.name for path in folder.iterdir())[-2:] == [
            "val-step3.npz",
            "val-step6.npz",
        ]
        saved = [SavedScores.read(path) for path in sorted(folder.glob("val-*.npz"))]
        tables.append(max(saved, key=lambda scores: scores.results["accuracy"]).scores.softmax(1))
    predicted = (tables[0] + tables[1]).argmax(1).tolist()
    lines = (files / "dev.tsv").read_text().splitlines()[1:]
    is_right = [
        int(line.split("\t")[-1]) == label for line, label in zip(lines, predicted, strict=True)
    ]
    assert report["ensemble"]["accuracy"] == pytest.approx(sum(is_right) / 15)
