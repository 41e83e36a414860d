"""The command `plan` reads recipes and models, and writes recipes that train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron.cli import plan as planned
from lightning_megatron.cli.command import _own_options
from lightning_megatron.cli.main import main
from lightning_megatron.cli.plan import Job
from lightning_megatron.cli.tune import settings_of
from lightning_megatron.models.causal_lm import CausalLM
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.global_batch import GlobalBatch

SIZES = {"num_layers": 2, "hidden_size": 256, "num_heads": 4, "vocab_size": 512}
CONFIG = GPTConfig.llama(**SIZES, num_kv_heads=4, ffn_hidden_size=512, max_seq_length=128)


def job_of(**changes: Any) -> Job:
    values: dict[str, Any] = {"batch": GlobalBatch(8), "seq_length": 128, "num_gpus": 2} | changes
    return Job(CausalLM(CONFIG), {}, "bf16-mixed", **values)


def test_own_options_may_stand_behind_the_recipe() -> None:
    given = "-c recipe:x --gpus 4 --model.path folder --fp8 --gpu=h100 --trainer.devices 2".split()
    own, rest = _own_options(planned.plan, given)
    assert own == ["--gpus", "4", "--fp8", "--gpu=h100"]
    assert rest == ["-c", "recipe:x", "--model.path", "folder", "--trainer.devices", "2"]


def test_a_plan_is_shown_and_written_for_a_recipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Job, "of_recipe", lambda options: job_of(is_of_ranks=True))
    file = tmp_path / "planned.yaml"
    recipe = "-c recipe:gpt_speeches_cpu --global_batch 16 --most 3".split()
    main(["plan", *recipe, "--write", str(file), "--png", str(tmp_path / "map.svg")])
    shown = capsys.readouterr().out
    assert "legal choices on 2 x h200, 16 samples of 128 tokens" in shown
    assert "why not the first" in shown
    assert f"fit -c {file}" in shown
    content = yaml.safe_load(file.read_text())
    options = content["trainer"]["strategy"]["init_args"]
    dp = 2 // (options["tp"] * options["pp"] * options["cp"])
    assert content["recipe"] == "gpt_speeches_cpu"
    assert content["data"]["init_args"]["batch_size"] == 16 // dp
    assert (tmp_path / "map.svg").stat().st_size > 1000


def test_a_written_plan_is_a_recipe_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "planned.yaml"
    main(["plan", *"-c recipe:gpt_speeches_cpu --gpus 2 --most 1 --write".split(), str(file)])
    written = yaml.safe_load(file.read_text())["trainer"]["strategy"]["init_args"]
    settings = settings_of(["-c", str(file)], "plan")
    chosen = settings["trainer"]["strategy"]["init_args"]
    assert {name: chosen[name] for name in written} == written
    assert settings["trainer"]["devices"] == 2
    assert Job.of_recipe(["-c", str(file)]).batch == GlobalBatch(16)


def test_a_hugging_face_folder_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    transformers.LlamaConfig(**sizes, num_attention_heads=4, vocab_size=512).save_pretrained(
        tmp_path
    )
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes_of_step = ["--gpus", "2", "--seq_length", "128", "--global_batch", "8", "--most", "2"]
    main(["plan", "--model", str(tmp_path), *sizes_of_step])
    shown = capsys.readouterr().out
    assert "legal choices on 2 x h200, 8 samples of 128 tokens" in shown
    assert "MegatronStrategy" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "plan needs a recipe or a model"),
        (["-c", "recipe:x", "--seq_length", "0"], "seq_length"),
        (["-c", "recipe:x", "--gpu", "b300"], "speeds of the GPU 'b300' are not known"),
        (["-c", "recipe:x", "--memory", "0.001"], "no layout of 2 devices fits"),
        (["-c", "recipe:x", "--gpus", "12"], "must be a multiple of gpus_per_node"),
        (
            ["-c", "recipe:x", "--global_batch", "3", "--gpus", "5"],
            "no layout of 5 devices can train",
        ),
    ],
)
def test_bad_input_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(Job, "of_recipe", lambda options: job_of())
    with pytest.raises(SystemExit):
        main(["plan", *options])
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_missing_sizes_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Job, "of_recipe", lambda options: job_of(batch=None, seq_length=None))
    with pytest.raises(SystemExit):
        main(["plan", "-c", "recipe:x"])
    assert "does not know --global_batch, --seq_length" in capsys.readouterr().err
