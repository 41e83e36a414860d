"""The command line: help, errors, recipes by name, and interpolation after all overrides."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_megatron.cli.main import COMMANDS, HELP
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan import Action
from lightning_megatron.recipe_files import recipe_path, with_recipe_paths
from lightning_megatron.strategy.cli import MegatronCLI

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
STRATEGY = "--trainer.strategy=lightning_megatron.MegatronStrategy"
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
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def config_of(capsys: pytest.CaptureFixture[str], text: str, *more: str) -> Any:
    capsys.readouterr()
    with pytest.raises(SystemExit, match="^0$"):
        MegatronCLI(args=["fit", *text.split(), *more, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


PROGRAM = """
import contextlib, runpy, sys
for command in sys.argv[1:]:
    sys.argv = ["lightning-megatron", *command.split()]
    with contextlib.suppress(SystemExit):
        runpy.run_module("lightning_megatron", run_name="__main__")
    print("loaded:", *(name for name in ("torch", "lightning.pytorch", "jsonargparse") if name in sys.modules))
"""


def test_commands_load_neither_torch_nor_lightning_nor_a_parser_before_they_need_them(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "x.ckpt")
    commands = [
        "fit --help",
        "generate x --tokeniser gpt2",
        "--help",
        "recipes",
        f"checkpoint show {tmp_path / 'x.ckpt'}",
    ]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *commands], capture_output=True, text=True, check=True
    )
    helped, _, overview, listed, shown, _ = re.split("loaded:", run.stdout)
    assert "--trainer.max_steps MAX_STEPS" in helped
    assert all(f"lightning-megatron {name}" in overview for name in COMMANDS)
    summaries = {line.partition(" ")[0]: line for line in listed.splitlines() if line}
    for name in NAMES:
        first = (RECIPES / f"{name}.yaml").read_text().splitlines()[0].removeprefix("# ")
        assert summaries[name].endswith(first)
    assert "a file of another strategy" in shown
    loaded = ["", "", "", " jsonargparse", " torch jsonargparse"]
    assert re.findall("loaded:(.*)", run.stdout) == loaded
    assert "there is no option --tokeniser. Did you mean --tokenizer?" in run.stderr


def test_errors_are_one_message_without_traceback(refused, base):
    for command, message in {
        "preprocess /no/file.txt x": "lightning-megatron preprocess: error: ",
        "fit --model lightning_megatron.HuggingFaceCausalLM --model.path nowhere": "lightning-megatron fit: error: path must be a local folder with config.json, or a model's name on the Hub",
        f"fit -c {base} {STRATEGY} --trainer.strategy.tp 2": "fit: error: world_size (1) must be a multiple of tp",
        f"fit -c {base} --trainer.strategy megatrn": "fit: error: trainer: You selected an invalid strategy name",
        "fit -c recipe:gpt": "recipe:gpt is not a recipe of this package. Did you mean gpt",
    }.items():
        assert message in refused(command), command
    with pytest.raises(UnsupportedError, match="is not a recipe"):
        recipe_path("../pyproject")


def test_a_reader_that_has_seen_enough_ends_a_command_without_an_error():
    command = f"{sys.executable} -m lightning_megatron layout --world_size 4096 --tp 2 | head -1"
    run = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (141, "")
    assert run.stdout.startswith("world size 4096 = ")


def test_pages_recipes_and_help_write_options_with_underscores_as_parsers_list_them():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *RECIPES.glob("*.yaml"), HELP]
    dashed = re.compile(r"(?m)lightning-megatron [a-z](?:\\\n|[^\n`])*? --[a-z]+-[a-z].*")
    assert len(pages) > 40
    assert {page.name: found for page in pages if (found := dashed.findall(page.read_text()))} == {}


RECIPE = "fit -c recipe:gpt_speeches_cpu"
#: What is wrong on a command line or in a recipe, and the message: the symptom, and what is legal.
WRONG: dict[str, tuple[str, str]] = {
    "layot": ("'layot' is no command. Did you mean layout?", "commands: fit, recipes, validate, "),
    "checkpoint shw x": ("'shw' is no subcommand. Did you mean show?", "subcommands: show, verify"),
    "checkpoint": ("a subcommand is missing.", "subcommands: show, verify"),
    "layout --world-sze 8": ("no option --world_sze. Did you mean --world_size?", "legal: cp, ep,"),
    "layout --world 8": ("no option --world. Did you mean --world_size?", "legal: cp, ep,"),
    "schedule --name zbv": ("name: zbv is given. Did you mean zb-v?", "legal: 1f1b, "),
    "generate": ("a value is missing: model", "All options: lightning-megatron generate --help"),
    f"{RECIPE} --data tests.cli_modules.Counting": ("or give another one: --model.config.max_seq_length VALUE", ""),
    "fit gpt.yaml": ("'gpt.yaml' is not expected here. Did you mean -c gpt.yaml?", ""),
    f"{RECIPE} --trainer.max_step 3": ("no option --trainer.max_step. Did you mean --trainer.max_steps?", "legal after --trainer.: accelerator,"),
    f"{RECIPE} --trainer.max_steps abc": ("trainer.max_steps: expected int: abc is given.", ""),
    f"{RECIPE} --modle.width 3": ("no option --modle.width. Did you mean --model?", "legal: ckpt_path,"),
    f"{RECIPE} --trainer.strategy.tq 2": ("trainer.strategy (lightning_megatron.MegatronStrategy): there is no setting tq. Did you mean tp?", "legal: async_save,"),
    f"{RECIPE} --trainer.strategy.schedule zbv": ("schedule: zbv is given. Did you mean zb-v?", "legal: 1f1b,"),
    f"{RECIPE} --model.config.num_layer 3": ("no setting config.num_layer. Did you mean config.num_layers?", "legal after config.: activation,"),
    "fit --model CausalLLM": ("no class CausalLLM. Did you mean lightning_megatron.CausalLM?", "legal after lightning_megatron.: BERT"),
    "fit --data lightning.pytorch.LightningModul": ("lightning.pytorch has no LightningModul. Did you mean LightningModule?", ""),
    "fit -c trainer: {max_stepss: 3}": ("no option --trainer.max_stepss. Did you mean --trainer.max_steps?", "legal after --trainer."),
    "fit -c model: {class_path: lightning_megatron.CausalLM, init_args: {config: {num_layer: 3}}}": ("model (lightning_megatron.CausalLM): there is no setting config.num_layer. Did you mean config.num_layers?", "legal after config."),
    "fit -c trainer: {callbacks: [{class_path: lightning_megatron.RunReport, init_args: {nam: 3}}]}": ("trainer.callbacks (lightning_megatron.RunReport): there is no setting nam", "legal: filename,"),
}  # fmt: skip


@pytest.mark.parametrize("command", WRONG)
def test_what_is_wrong_is_answered_with_the_nearest_legal_name_and_without_usage(
    command, tmp_path, refused
):
    words, colon, recipe = command.partition("-c ")
    if " {" in recipe:
        (tmp_path / "x.yaml").write_text(recipe)
        command = f"{words}-c {tmp_path / 'x.yaml'}"
    printed = refused(command)
    for part in WRONG[command if command in WRONG else f"{words}{colon}{recipe}"]:
        assert part in printed
    assert "usage:" not in printed
    assert len(printed.splitlines()) < 15


def test_interpolation_takes_the_values_of_all_files_and_options(base, capsys):
    second = base.with_name("second.yaml")
    width = "{init_args: {width: '${model.init_args.width}'}}"
    second.write_text(f"trainer: {{devices: 2}}\ndata: {width}\n")
    for options, expected in {
        "": (8, 1, 4),
        "--trainer.devices 4 --model.init_args.context 16": (16, 4, 4),
        f"-c {second} --model.width 6": (8, 2, 6),
    }.items():
        data = config_of(capsys, f"-c {base} {options}")["data"]["init_args"]
        assert (data["context"], data["batch_size"], data["width"]) == expected, options


def test_a_fit_saves_its_resolved_configuration_and_runs_from_it_again(base):
    options = [f"--trainer.default_root_dir={base.parent}"]
    MegatronCLI(args=["fit", "-c", str(base), *options])
    saved = base.parent / "config.yaml"
    assert yaml.safe_load(saved.read_text())["data"]["init_args"]["context"] == 8
    assert MegatronCLI(args=["fit", "-c", str(saved), *options]).trainer.global_step == 3


def test_model_and_data_default_to_classes_of_the_package(base, capsys):
    config = config_of(capsys, "--model.config.num-layers 3 --data.seq-length 12")
    assert config["model"]["class_path"] == "lightning_megatron.CausalLM"
    assert config["model"]["init_args"]["config"]["num_layers"] == 3
    assert config["data"]["init_args"]["seq_length"] == 12


def in_halves(rank, pp, num_microbatches, vpp):
    """Forward, input half and weight half of each microbatch."""
    for number in range(num_microbatches):
        yield from (Action(kind, 0, number) for kind in ("F", "I", "W"))


def test_a_schedule_is_named_by_the_path_of_its_function(base, capsys):
    schedule = [STRATEGY, f"--trainer.strategy.schedule={__name__}.in_halves"]
    assert MegatronCLI(args=["fit", "-c", str(base), *schedule]).trainer.global_step == 3
    schedule[-1] = "--trainer.strategy.schedule=mine.no_such_rows"
    with pytest.raises(SystemExit):
        MegatronCLI(args=["fit", "-c", str(base), *schedule])
    assert "No module named 'mine'" in capsys.readouterr().err


#: Options, their values, the settings that they give, and why these do not fit here.
SETTINGS: list[tuple[str, str, dict[str, Any], str]] = [
    ("cuda_graphs.mode", "full", {"mode": "full"}, "cuda_graphs .full. needs GPUs"),
    (
        "experts.clones",
        "{places: 2, min_rows: 9}",
        {"clones": {"places": 2, "min_rows": 9}},
        r"\(2\) needs ep",
    ),
]


def test_options_of_the_strategy_take_a_mapping_or_its_parts(base, capsys):
    for option, value, expected, refusal in SETTINGS:
        options = [f"--trainer.strategy.{option}", value]
        config = config_of(capsys, f"-c {base} {STRATEGY}", *options)
        given = config["trainer"]["strategy"]["init_args"][option.partition(".")[0]]
        assert expected.items() <= given.items()
        with pytest.raises(ValueError, match=refusal):
            MegatronCLI(args=["fit", "-c", str(base), STRATEGY, *options])


def test_a_recipe_is_read_by_name_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    expected = config_of(capsys, f"-c {RECIPES / 'gpt_speeches_cpu.yaml'}")
    assert expected["trainer"]["strategy"]["init_args"]["pp"] == 2
    assert config_of(capsys, "-c recipe:gpt_speeches_cpu") == expected
    assert config_of(capsys, "--config=recipe:gpt_speeches_cpu.yaml") == expected
    others = ["fit", "--model.text", "recipe:gpt_speeches_cpu", "--data.text=recipe:x", "-c", "a"]
    assert with_recipe_paths(others) == others, "only the option for recipes takes their names"


LAUGHS = "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in pairwise("abcdefghi")
)
REFERENCES = "".join(
    f"{name}: '{('${' + before + '}') * 10}'\n" for before, name in pairwise("abcdefghi")
)
DAMAGED: dict[str, tuple[bytes, str]] = {
    "bytes": (b"# \xff", r"x\.yaml: byte 2 is not UTF-8"),
    "unknown key": (b"trainer: {max_steps: '${nope}'}", r"trainer\.max_steps: .*'fit\.nope'"),
    "cycle": (b"trainer: {max_steps: '${trainer.max_epochs}', max_epochs: '${trainer.max_steps}'}", r"x\.yaml:1: .* holds itself"),
    "aliases of aliases": (f"a: &a [1]\n{LAUGHS}".encode(), r"x\.yaml:\d: .* counting aliases"),
    "references": (f"a: 1\n{REFERENCES}".encode(), r"x\.yaml:\d: .* counting aliases and"),
    "alias of itself": (b"trainer: &a {callbacks: *a}", r"x\.yaml:1: .* holds itself"),
    "nested": (b"trainer: " + b"[" * 5000 + b"]" * 5000, "nested too deeply"),
    "object": (b"trainer: !!python/object/apply:os.getpid []", "has the type 'python/object"),
    "digits": (b"trainer: {max_steps: " + b"9" * 5000 + b"}", "integer of too many digits"),
    "large": (b"a" * (1 << 19), "has more than 262144 bytes"),
    "syntax": (b"trainer: [1", "Problems parsing config"),
}  # fmt: skip


def test_damaged_recipes_end_with_one_error(tmp_path, refused):
    for name, (content, message) in DAMAGED.items():
        (tmp_path / "x.yaml").write_bytes(content)
        refusal = refused(f"fit --config={tmp_path / 'x.yaml'}")
        assert re.search(f"error: .*{message}", refusal), name
