"""README: what an installation gives: public names, versions, extras, and the command line."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lightning_megatron
from lightning_megatron import building_blocks
from lightning_megatron.cli.main import COMMANDS, HELP
from lightning_megatron.errors import MissingExtraError
from lightning_megatron.extras import import_extra
from tests.docs.help_texts import head, help_texts

ROOT = Path(lightning_megatron.__file__).parents[1]


def run(*arguments: str) -> str:
    """Return what Python prints in a new process."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout


@pytest.mark.parametrize("module", [lightning_megatron, building_blocks], ids=lambda m: m.__name__)
def test_every_public_name_can_be_imported_and_stands_in_one_list(module: ModuleType) -> None:
    stub = Path(module.__file__ or "").with_suffix(".pyi")
    statements = [
        one for one in ast.parse(stub.read_text()).body if isinstance(one, ast.ImportFrom)
    ]
    aliases = [alias for one in statements for alias in one.names]
    names = [alias.asname for alias in aliases if alias.asname != "__version__"]
    assert sorted(names) == module.__all__
    assert len(set(names)) == len(names)
    assert len(aliases) == len(statements)
    for alias in aliases:
        # Type checkers take only such a name as public.
        assert alias.asname == alias.name
        value = getattr(module, alias.name)
        if isinstance(value, type | FunctionType):
            assert value.__name__ == alias.name


def test_an_unknown_name_is_refused_with_all_names() -> None:
    with pytest.raises(AttributeError, match="MegatronStrategy"):
        lightning_megatron.MegatronStrateg  # noqa: B018


def test_a_layout_needs_neither_torch_nor_lightning() -> None:
    program = "import sys; from lightning_megatron import ParallelLayout; print(*sys.modules)"
    loaded = set(run("-c", program).split())
    assert "lightning_megatron.plan.layout" in loaded
    assert not loaded & {"torch", "lightning", "transformers"}


def test_the_trainer_knows_the_strategy_by_name_whichever_is_imported_first() -> None:
    trainer = "L.Trainer(strategy='megatron', accelerator='cpu', logger=False)"
    for imports in (
        "import lightning as L, lightning_megatron",
        "import lightning_megatron.strategy, lightning as L",
    ):
        printed = run("-c", f"{imports}; print(type({trainer}.strategy).__name__)")
        assert printed.splitlines()[-1] == "MegatronStrategy"


def test_a_missing_package_is_refused_with_its_extra() -> None:
    message = r'extra `plot`: pip install "lightning-megatron\[plot\]"'
    with pytest.raises(MissingExtraError, match=message):
        import_extra("a_package_that_nobody_has.figure", "plot")
    assert import_extra("json.decoder", "plot").__name__ == "json.decoder"


def test_the_tested_versions_are_admitted() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    ranges = [Requirement(text) for group in groups for text in group]
    admitted = {canonicalize_name(entry.name): entry.specifier for entry in ranges}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for version in tested:
        (pin,) = version.specifier
        assert pin.operator == "=="
        legal = admitted.get(canonicalize_name(version.name), version.specifier)
        assert pin.version in legal, version
    assert {"torch", "lightning", "transformers", "peft"} <= {version.name for version in tested}


def test_the_help_of_commands_is_as_their_parsers_print_it() -> None:
    kept = HELP.read_text()
    if head() not in kept:
        pytest.skip(f"the help is kept for other versions: {kept.splitlines()[0]}")
    assert help_texts() == kept, "write it again: python -m tests.docs.generate"


def test_the_program_lists_its_commands_and_says_which_kernels_there_are() -> None:
    helped = run("-m", "lightning_megatron", "--help")
    for command in COMMANDS:
        assert command in helped
    assert "gpt_speeches_cpu" in run("-m", "lightning_megatron", "recipes")
    assert "forward_cooperative" in run("-m", "lightning_megatron", "kernels", "show")
