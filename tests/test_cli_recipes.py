"""Tests of recipes by name: their list, and configurations that are read from any folder."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from lightning_megatron.cli.main import main
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.recipe_files import recipe_path, recipe_summaries, with_recipe_paths
from lightning_megatron.strategy.cli import MegatronCLI

RECIPES = Path(__file__).parents[1] / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))


def test_the_command_lists_every_recipe_with_its_first_comment_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["recipes"])
    printed = capsys.readouterr().out.splitlines()
    for name in NAMES:
        (line,) = [line for line in printed if line.startswith(f"{name} ")]
        first = (RECIPES / f"{name}.yaml").read_text().splitlines()[0]
        assert line.endswith(first.removeprefix("# "))


@pytest.mark.parametrize("name", NAMES)
def test_the_first_comment_line_of_a_recipe_is_one_sentence(name: str) -> None:
    summary = recipe_summaries()[name]
    assert summary.endswith(".")
    assert len(summary) <= 98


def test_recipes_command_needs_neither_torch_nor_lightning() -> None:
    program = (
        "import sys, lightning_megatron.cli.main as c; c.main(['recipes']); "
        "assert not {'torch', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("options", [["-c", "recipe:{}"], ["--config=recipe:{}.yaml"]])
def test_a_recipe_is_read_by_name_from_any_folder(
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    configs = []
    path = str(RECIPES / "gpt_speeches_cpu.yaml")
    for arguments in (
        [part.format("gpt_speeches_cpu") for part in options],
        ["-c", path],
    ):
        monkeypatch.setattr(
            sys, "argv", ["lightning-megatron", "fit", *arguments, "--print_config"]
        )
        with pytest.raises(SystemExit) as stopped:
            MegatronCLI()
        assert stopped.value.code == 0
        configs.append(yaml.safe_load(capsys.readouterr().out))
    assert configs[0] == configs[1]
    assert configs[0]["trainer"]["strategy"]["init_args"]["pp"] == 2


def test_error_of_an_unknown_recipe_names_the_known_recipes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-megatron", "fit", "-c", "recipe:gpt"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "recipe:gpt is not a recipe of this package. The recipes are: " in message
    assert all(name in message for name in NAMES)
    assert "Traceback" not in message
    with pytest.raises(UnsupportedError, match="is not a recipe"):
        recipe_path("../pyproject")


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
    "no end": (b"trainer: {max_steps: '${trainer'}", r"trainer\.max_steps: no viable alternative"),
    "resolver": (b"trainer: {max_steps: '${foo:3}'}", "Unsupported interpolation type foo"),
    "cycle": (
        b"trainer: {max_steps: '${trainer.max_epochs}', max_epochs: '${trainer.max_steps}'}",
        r"x\.yaml:1: .* holds itself",
    ),
    "alias of itself": (b"trainer: &a [*a]", r"x\.yaml:1: .* holds itself"),
    "aliases of aliases": (f"a: &a [1]\n{LAUGHS}".encode(), r"x\.yaml:\d: .* counting aliases"),
    "references to references": (
        f"a: 1\n{REFERENCES}".encode(),
        r"x\.yaml:\d: .* counting aliases and",
    ),
    "nested": (b"trainer: " + b"[" * 5000 + b"]" * 5000, "nested too deeply"),
    "binary": (b"trainer: !!binary aGVsbG8=", r"x\.yaml:1: .* has the type 'binary'"),
    "object": (b"trainer: !!python/object/apply:os.getpid []", "has the type 'python/object"),
    "digits": (b"trainer: {max_steps: " + b"9" * 5000 + b"}", "integer of too many digits"),
    "large": (b"a" * (1 << 19), "has more than 262144 bytes"),
    "syntax": (b"trainer: [1", "Problems parsing config"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_recipes_end_with_one_error_and_no_traceback(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content, message = DAMAGED[name]
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["lightning-megatron", "fit", f"--config={path}"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert re.search(f"error: .*{message}", capsys.readouterr().err)


def test_recipe_names_are_replaced_only_in_the_config_option() -> None:
    arguments = [
        "fit",
        "--model.text",
        "recipe:gpt_speeches_cpu",
        "--data.text=recipe:x",
        "-c",
        "a.yaml",
    ]
    assert with_recipe_paths(arguments) == arguments
