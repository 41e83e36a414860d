"""Tests of the names that `import lightning_megatron` gives and of the packages that it imports."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lightning_megatron

STRATEGY = (
    "print(type(L.Trainer(strategy='megatron', accelerator='cpu', logger=False).strategy).__name__)"
)


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("name", lightning_megatron.__all__)
def test_public_name_can_be_imported(name: str) -> None:
    assert getattr(lightning_megatron, name).__name__ == name


def test_type_checkers_see_all_public_names() -> None:
    tree = ast.parse(Path(lightning_megatron.__file__).read_text())
    (checked,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    assert (
        sorted(alias.asname for node in checked.body for alias in node.names)
        == lightning_megatron.__all__
    )


def test_error_of_an_unknown_name_lists_the_public_names() -> None:
    with pytest.raises(AttributeError, match="MegatronStrategy"):
        lightning_megatron.MegatronStrateg  # noqa: B018


def test_a_layout_needs_neither_torch_nor_lightning() -> None:
    program = (
        "import sys; from lightning_megatron import ParallelLayout; print('torch' in sys.modules)"
    )
    assert run(program) == "False"


def test_trainer_knows_the_strategy_by_name_if_lightning_is_imported_first() -> None:
    assert (
        run(f"import lightning as L, lightning_megatron; {STRATEGY}").splitlines()[-1]
        == "MegatronStrategy"
    )


def test_trainer_knows_the_strategy_by_name_if_it_is_imported_first() -> None:
    assert (
        run(f"import lightning_megatron.strategy, lightning as L; {STRATEGY}").splitlines()[-1]
        == "MegatronStrategy"
    )


def test_the_tested_versions_are_admitted() -> None:
    """constraints.txt, which README's commands install, lies in the ranges of pyproject.toml."""
    root = Path(lightning_megatron.__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    ranges = [Requirement(text) for group in groups for text in group]
    admitted = {canonicalize_name(entry.name): entry.specifier for entry in ranges}
    lines = (root / "constraints.txt").read_text().splitlines()
    tested = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for version in tested:
        (pin,) = version.specifier
        assert pin.operator == "=="
        assert pin.version in admitted.get(canonicalize_name(version.name), version.specifier), (
            version
        )
    assert {"torch", "lightning", "transformers", "peft"} <= {version.name for version in tested}
