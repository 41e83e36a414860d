"""What `import lightning_megatron` gives, and what it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_megatron

STRATEGY = (
    "print(type(L.Trainer(strategy='megatron', accelerator='cpu', logger=False).strategy).__name__)"
)


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("name", lightning_megatron.__all__)
def test_public_name_is_there(name: str) -> None:
    assert getattr(lightning_megatron, name).__name__ == name


def test_type_checkers_see_the_same_names() -> None:
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


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="MegatronStrategy"):
        lightning_megatron.MegatronStrateg  # noqa: B018


def test_a_layout_needs_neither_torch_nor_lightning() -> None:
    program = (
        "import sys; from lightning_megatron import ParallelLayout; print('torch' in sys.modules)"
    )
    assert run(program) == "False"


def test_strategy_is_known_by_name_after_lightning() -> None:
    assert (
        run(f"import lightning as L, lightning_megatron; {STRATEGY}").splitlines()[-1]
        == "MegatronStrategy"
    )


def test_strategy_is_known_by_name_after_its_import() -> None:
    assert (
        run(f"import lightning_megatron.strategy, lightning as L; {STRATEGY}").splitlines()[-1]
        == "MegatronStrategy"
    )
