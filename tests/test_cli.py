"""Tests of the command line: help, errors, and interpolation in configurations with overrides."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_megatron.cli.main import COMMANDS, main
from lightning_megatron.strategy.cli import MegatronCLI

BASE = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 3
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
model:
  class_path: tests.cli_modules.Line
  init_args:
    context: 8
data:
  class_path: tests.cli_modules.Points
  init_args:
    context: ${model.init_args.context}
    batch_size: ${trainer.devices}
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a recipe whose data follow the model and the trainer."""
    monkeypatch.setattr(sys, "argv", ["lightning-megatron"])
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def printed_config(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    with pytest.raises(SystemExit) as stopped:
        MegatronCLI(args=["fit", *args, "--print_config"])
    assert stopped.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def data_arguments(config: dict) -> dict:
    return config["data"]["init_args"]


def test_help_lists_every_command_without_loading_lightning() -> None:
    program = (
        "import sys, lightning_megatron.cli.main as c\ntry: c.main(['--help'])\nfinally: "
        "print(list(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert all(f"  {name} " in run.stdout for name in COMMANDS)
    assert "'torch'" not in run.stdout
    assert "'lightning'" not in run.stdout


def test_python_m_lightning_megatron_runs_the_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "lightning_megatron", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith("lightning-megatron ")


def test_error_of_an_unknown_command_names_the_known_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train"])
    assert stopped.value.code == 2
    assert "'fit'" in capsys.readouterr().err


def test_errors_of_the_package_print_one_message_without_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["preprocess", "--input", "/no/such/file.txt", "--output", "x"])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("lightning-megatron preprocess: error: ")
    assert "Traceback" not in message


def test_a_setting_that_a_module_refuses_prints_one_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(
            ["fit", "--model", "lightning_megatron.HuggingFaceCausalLM", "--model.path", "nowhere"]
        )
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        "lightning-megatron fit: error: path must be a local folder with config.json, because "
    )


def test_preprocess_writes_a_token_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("To be or not to be")
    main(
        [
            "preprocess",
            "--input",
            str(tmp_path / "a.txt"),
            "--output",
            str(tmp_path / "a"),
            "--no-progress",
        ]
    )
    assert (tmp_path / "a.idx").exists()
    assert "18 tokens" in capsys.readouterr().out


def test_interpolation_takes_values_of_the_recipe(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data_arguments(printed_config(capsys, "-c", str(base))) == {
        "context": 8,
        "batch_size": 1,
        "width": 4,
    }


def test_interpolation_takes_overridden_values(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = printed_config(
        capsys, "-c", str(base), "--trainer.devices", "4", "--model.init_args.context", "16"
    )
    assert data_arguments(config) == {"context": 16, "batch_size": 4, "width": 4}


def test_interpolation_takes_values_of_several_files(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = base.with_name("second.yaml")
    second.write_text(
        "trainer: {devices: 2}\ndata: {init_args: {width: '${model.init_args.width}'}}\n"
    )
    config = printed_config(capsys, "-c", str(base), "-c", str(second), "--model.width", "6")
    assert data_arguments(config) == {"context": 8, "batch_size": 2, "width": 6}


def test_a_misspelled_option_is_refused_by_name(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        MegatronCLI(args=["fit", "-c", str(base), "--model.init_args.contex", "16"])
    assert stopped.value.code == 2
    assert "contex" in capsys.readouterr().err


def test_fit_saves_the_resolved_configuration(base: Path) -> None:
    MegatronCLI(
        args=[
            "fit",
            "-c",
            str(base),
            f"--trainer.default_root_dir={base.parent}",
            "--trainer.logger=true",
        ]
    )
    (saved,) = base.parent.glob("lightning_logs/version_0/config.yaml")
    assert data_arguments(yaml.safe_load(saved.read_text()))["context"] == 8


def test_fit_runs_again_from_its_saved_configuration(base: Path) -> None:
    saved = base.parent / "config.yaml"
    options = [f"--trainer.default_root_dir={base.parent}"]
    MegatronCLI(args=["fit", "-c", str(base), *options])
    assert saved.exists()
    MegatronCLI(args=["fit", "-c", str(saved), *options])


def test_model_and_data_default_to_classes_of_the_package(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = printed_config(capsys, "--model.config.num_layers", "3", "--data.seq_length", "12")
    assert config["model"]["class_path"] == "lightning_megatron.CausalLM"
    assert config["model"]["init_args"]["config"]["num_layers"] == 3
    assert config["data"]["init_args"]["seq_length"] == 12


def test_layout_command_prints_the_axes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["layout", "--world-size", "4", "--tp", "2"])
    assert "tp" in capsys.readouterr().out


def test_an_invalid_layout_prints_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["layout", "--world-size", "4", "--tp", "3"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("lightning-megatron layout: error: ")


def test_schedule_option_takes_a_file_and_refuses_the_name_of_a_function(base: Path) -> None:
    (base.parent / "mine.csv").write_text("0F0,0I0,0W0\n")
    strategy = ["--trainer.strategy=lightning_megatron.MegatronStrategy"]
    file = f"--trainer.strategy.schedule={base.parent / 'mine.csv'}"
    command = MegatronCLI(args=["fit", "-c", str(base), *strategy, file])
    assert command.trainer.global_step == 3
    # The text is a name or a path, never a function to import.
    with pytest.raises(ValueError, match=r"it is 'json\.dumps'\. A YAML file cannot name"):
        MegatronCLI(
            args=["fit", "-c", str(base), *strategy, "--trainer.strategy.schedule=json.dumps"]
        )


def test_devices_that_do_not_fit_the_layout_print_one_message(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = ["--trainer.strategy", "lightning_megatron.MegatronStrategy"]
    devices = ["--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "-c", str(base), *strategy, "--trainer.strategy.tp", "2", *devices])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "lightning-megatron fit: error: world_size (1) must be a multiple of tp" in message
    assert "or a multiple of 2 ranks (devices x num_nodes of the Trainer)." in message
    assert "Traceback" not in message


def test_help_lists_the_options_of_the_strategy(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        MegatronCLI(args=["fit", "--trainer.strategy.help", "lightning_megatron.MegatronStrategy"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(
        f"--trainer.strategy.{name} " in text
        for name in ("tp", "pp", "vpp", "schedule", "microbatch_size")
    )


@pytest.mark.parametrize(
    "options",
    [
        ["--trainer.strategy.cuda_graphs.mode", "full"],
        ["--trainer.strategy.init_args.cuda_graphs", "{mode: full, warmup_steps: 4}"],
    ],
)
def test_cuda_graphs_option_takes_a_mode_or_a_mapping(
    base: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    strategy = ["--trainer.strategy", "lightning_megatron.MegatronStrategy", *options]
    config = printed_config(capsys, "-c", str(base), *strategy)
    assert config["trainer"]["strategy"]["init_args"]["cuda_graphs"]["mode"] == "full"
    with pytest.raises(ValueError, match="trainer: cuda_graphs .full. needs GPUs: .* is 'cpu'"):
        MegatronCLI(args=["fit", "-c", str(base), *strategy])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--trainer.strategy.expert_clones", "2"], 2),
        (
            ["--trainer.strategy.expert_clones", "{places: 2, min_rows: 9}"],
            {"places": 2, "min_rows": 9},
        ),
        (["--trainer.strategy.expert_clones.places", "3"], {"places": 3, "min_rows": None}),
    ],
)
def test_expert_clones_option_takes_a_number_or_a_mapping(
    base: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: object
) -> None:
    strategy = ["--trainer.strategy", "lightning_megatron.MegatronStrategy", *options]
    config = printed_config(capsys, "-c", str(base), *strategy)
    assert config["trainer"]["strategy"]["init_args"]["expert_clones"] == expected
    with pytest.raises(ValueError, match=r"expert_clones \(\d\) needs ep above 1"):
        MegatronCLI(args=["fit", "-c", str(base), *strategy])


def test_a_misspelled_option_of_the_strategy_is_refused_by_name(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = [
        "--trainer.strategy",
        "lightning_megatron.MegatronStrategy",
        "--trainer.strategy.tq",
        "2",
    ]
    with pytest.raises(SystemExit) as stopped:
        MegatronCLI(args=["fit", "-c", str(base), *strategy])
    assert stopped.value.code == 2
    assert "tq" in capsys.readouterr().err
