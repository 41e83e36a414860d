"""Tests that recipes parse, have consistent values, and train in layouts as on one process."""

from __future__ import annotations

import csv
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml

from lightning_megatron.cli.main import main
from lightning_megatron.data.speeches import load_speeches, write_documents
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.errors import MissingExtraError
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.strategy.cli import MegatronCLI
from tests.forked_script import run_python
from tests.sweeps import all_run, chosen

RECIPES = Path(__file__).parents[2] / "recipes"
OVERLAYS = {"gpt_speeches_1process.yaml": ["gpt_speeches_cpu.yaml"]}
#: Recipes tested in test_finetuning_recipes.py: the tasks set the sizes of their epochs.
TASKS = {f"bert_{task}.yaml" for task in ("mnli", "qqp", "race", "squad")}
COMPLETE = [
    [*OVERLAYS.get(path.name, []), path.name]
    for path in sorted(RECIPES.glob("*.yaml"))
    if path.name not in TASKS
]
FINETUNE = "finetune_hf.yaml"
#: Classes of models that a folder describes.
FOLDERS = (".HuggingFaceCausalLM", ".DPO")


@pytest.fixture(params=COMPLETE, ids=lambda names: names[-1])
def config(
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> dict:
    """Return a recipe's resolved configuration."""
    monkeypatch.setattr(sys, "argv", ["lightning-megatron"])
    files = [option for name in request.param for option in ("-c", str(RECIPES / name))]
    with pytest.raises(SystemExit) as stopped:
        MegatronCLI(args=["fit", *files, "--print_config"])
    assert stopped.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_model_of_a_recipe_has_the_sequence_length_of_its_data(config: dict) -> None:
    if config["model"]["class_path"].endswith(FOLDERS):
        pytest.skip("its folder describes the model")
    is_bert = config["model"]["class_path"].endswith(".BERTPretraining")
    kind = EncoderConfig if is_bert else GPTConfig
    shape = kind(**config["model"]["init_args"]["config"])
    assert shape.max_seq_length == config["data"]["init_args"]["seq_length"]


def test_model_of_a_recipe_has_the_vocabulary_of_its_tokenizer(config: dict) -> None:
    if config["model"]["class_path"].endswith(FOLDERS):
        assert config["data"]["init_args"]["tokenizer"] == config["model"]["init_args"]["path"]
        return
    try:
        tokenizer = load_tokenizer(config["data"]["init_args"]["tokenizer"])
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert config["model"]["init_args"]["config"]["vocab_size"] == tokenizer.vocab_size


def test_learning_rate_schedule_has_the_steps_of_the_training(config: dict) -> None:
    assert config["model"]["init_args"]["max_steps"] == config["trainer"]["max_steps"]


def test_batch_size_is_a_multiple_of_the_microbatch_size(config: dict) -> None:
    microbatch = config["trainer"]["strategy"]["init_args"]["microbatch_size"]
    data = config["data"]["init_args"]
    assert (data["batch_size"] or data["global_batch_size"]) % microbatch == 0


def test_callbacks_show_progress_and_draw_the_loss_curve(config: dict) -> None:
    classes = [
        callback["class_path"].rpartition(".")[2] for callback in config["trainer"]["callbacks"]
    ]
    assert classes[:2] == ["TokensProgressBar", "LossCurve"]


@pytest.fixture
def _speeches() -> None:
    try:
        load_speeches("heldout")
    except MissingExtraError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.usefixtures("_speeches")
def test_four_processes_train_as_one(tmp_path: Path) -> None:
    four_processes = run_recipe(tmp_path, "gpt_speeches_cpu.yaml")
    one_process = run_recipe(
        tmp_path, "gpt_speeches_cpu.yaml", "gpt_speeches_1process.yaml", starts=False
    )
    assert len(four_processes["train_loss"]) == 3
    assert len(four_processes["val_loss"]) == len(four_processes["val_bits_per_byte"]) == 1
    for name, values in one_process.items():
        assert four_processes[name] == pytest.approx(values, abs=2e-4), name


@pytest.mark.slow
@pytest.mark.usefixtures("_speeches")
@pytest.mark.parametrize("devices", chosen([4, 2], 2))
def test_experts_train_on_several_processes_as_on_one(devices: int, tmp_path: Path) -> None:
    data = f"--data.data_dir={tmp_path / 'data'}"
    options = [data, f"--trainer.devices={devices}", f"--data.batch_size={32 // devices}"]
    several_processes = run_recipe(tmp_path / "several", "moe_speeches_cpu.yaml", options=options)
    options = [f"--trainer.strategy.{name}=1" for name in ("tp", "ep")]
    options += [data, "--trainer.devices=1", "--data.batch_size=16"]
    one_process = run_recipe(
        tmp_path / "one", "moe_speeches_cpu.yaml", options=options, starts=False
    )
    assert len(several_processes["train_loss"]) == 3
    for name, values in one_process.items():
        assert several_processes[name] == pytest.approx(values, abs=2e-4), name
    assert (tmp_path / "several/moe_speeches_cpu/version_0/expert_load.png").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("_speeches")
@pytest.mark.parametrize("tp", chosen([2, 1], 1))
def test_bert_trains_on_several_processes_as_on_one(tp: int, tmp_path: Path) -> None:
    data = f"--data.data_dir={tmp_path / 'data'}"
    options = [data, f"--trainer.strategy.tp={tp}", f"--trainer.devices={2 * tp}"]
    several_processes = run_recipe(tmp_path / "several", "bert_speeches_cpu.yaml", options=options)
    layout = ["--trainer.strategy.tp=1", "--trainer.strategy.pp=1", "--trainer.devices=1"]
    one_process = run_recipe(
        tmp_path / "one", "bert_speeches_cpu.yaml", options=[data, *layout], starts=False
    )
    assert (len(several_processes["train_loss"]), len(several_processes["val_loss"])) == (3, 1)
    for name in ("train_loss", "val_loss"):
        assert several_processes[name] == pytest.approx(one_process[name], abs=2e-4), name


def options_of(model: Path, folder: Path) -> list[str]:
    """Write a few texts in the tokens of a Hugging Face folder, and return the options that train
    the folder on them.
    """
    texts = [f"In {year} our fathers brought forth a new nation." for year in range(1960, 2000)]
    write_documents(str(folder / "text"), texts, load_tokenizer(model))
    data = {"corpus": "null", "train": folder / "text", "split": "8,1,1", "seq_length": 32}
    options = [f"--data.{name}={value}" for name, value in data.items()]
    return [
        *options,
        "--trainer.accelerator=cpu",
        "--trainer.precision=32-true",
        f"--model.path={model}",
    ]


@pytest.mark.slow
@pytest.mark.skipif(not all_run(), reason="a sweep: pytest --sweeps")
def test_a_hugging_face_folder_trains_on_four_processes_as_on_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    from tests.tiny_llama import save_tiny_llama

    model = tmp_path / "tiny_llama"
    save_tiny_llama(model)
    options = options_of(model, tmp_path)
    layout = ["--trainer.devices=4", "--trainer.strategy.tp=2", "--trainer.strategy.pp=2"]
    four_processes = run_recipe(tmp_path / "four", FINETUNE, options=[*options, *layout])
    options += ["--trainer.devices=1"]
    one_process = run_recipe(tmp_path / "one", FINETUNE, options=options, starts=False)
    assert len(four_processes["train_loss"]) == 3
    assert len(four_processes["val_loss"]) == len(four_processes["val_bits_per_byte"]) == 1
    for name, values in one_process.items():
        assert all(math.isfinite(value) for value in values), name
        assert four_processes[name] == pytest.approx(values, abs=2e-4), name
    (checkpoint,) = (tmp_path / "four").glob("finetune_hf/version_0/checkpoints/step3-*.ckpt")
    assert checkpoint.is_dir()


@pytest.mark.slow
def test_a_folder_with_experts_trains_on_expert_ranks_and_is_exported(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    from tests.tiny_llama import save_tiny_mixtral

    model = tmp_path / "tiny_mixtral"
    save_tiny_mixtral(model)
    options = options_of(model, tmp_path)
    options += ['--model.expert_settings={"aux_loss": 0.02, "aux_loss_scope": "global"}']
    layout = ["--trainer.devices=2", "--trainer.strategy.ep=2", "--data.batch_size=2"]
    two_processes = run_recipe(tmp_path / "two", FINETUNE, options=[*options, *layout])
    options += ["--trainer.devices=1"]
    one_process = run_recipe(tmp_path / "one", FINETUNE, options=options, starts=False)
    assert len(two_processes["train_loss"]) == 3
    assert len(two_processes["val_loss"]) == len(two_processes["val_bits_per_byte"]) == 1
    for name, values in one_process.items():
        assert all(math.isfinite(value) for value in values), name
        assert two_processes[name] == pytest.approx(values, abs=2e-4), name
    (checkpoint,) = (tmp_path / "two").glob("finetune_hf/version_0/checkpoints/step3-*.ckpt")
    main(["convert", str(checkpoint), str(tmp_path / "exported"), "--verify"])
    exported, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", output_loading_info=True
    )
    assert not any(report.values()), report
    initial = transformers.AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert not any(
        torch.equal(tensor, initial[name])
        for name, tensor in exported.state_dict().items()
        if "mlp" in name
    )


def run_recipe(
    folder: Path, *recipes: str, options: Sequence[str] = (), starts: bool = True
) -> dict[str, list[float]]:
    """Run a few steps and return the losses in the metrics file, by name.

    Args:
        folder: Root folder of the run.
        recipes: File names of recipes.
        options: Further options of the command.
        starts: Whether the command starts its own processes. Otherwise it runs in this process, and
            must be the last command of a test: a Trainer leaves variables that the next command
            would read.
    """
    folder.mkdir(exist_ok=True)
    files = [option for name in recipes for option in ("-c", str(RECIPES / name))]
    steps = {
        "max_steps": 3,
        "val_check_interval": 3,
        "limit_val_batches": 2,
        "log_every_n_steps": 1,
    }
    limits = [f"--trainer.{name}={value}" for name, value in steps.items()]
    command = ["fit", *files, *limits, *options, f"--trainer.default_root_dir={folder}"]
    if starts:
        program = ["-m", "lightning_megatron", *command]
        run = run_python(program, folder, dict(os.environ, OMP_NUM_THREADS="1"), timeout=280)
        assert run.returncode == 0, f"{run.stdout[-4000:]}\n{run.stderr[-8000:]}"
    else:
        assert not main(command)
    (metrics,) = folder.glob(f"{recipes[-1].removesuffix('.yaml')}/version_0/metrics.csv")
    columns: dict[str, list[float]] = {"train_loss": [], "val_loss": [], "val_bits_per_byte": []}
    with metrics.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, values in columns.items():
                if row.get(name):
                    values.append(float(row[name]))
    return columns
