"""Tests that the code blocks of `docs/` run and print what the pages say: a command of their own,
because they take minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import clone_picture
from tests.docs.blocks import README, ROOT, printed_text, read_blocks, run_block

BLOCKS = read_blocks()
PRINTED = printed_text()
#: Blocks that are not run, and why.
NOT_RUN = {
    "test": "it is the command that runs the promises",
    "install cpu torch": "it installs torch from the network",
    "build kernels": "it needs nvcc and CUTLASS",
    "recipe of transformer engine": "it needs a GPU; gpu/test_gpu_te.py trains with such recipes",
    "harness": "it downloads its tasks; tests of evaluation run tasks of their own",
    "harness in a hook": "it is part of a module, and downloads its task",
    "fine-tune a BERT": "tests of recipes fine-tune a small folder by a recipe",
    "seeds of a BERT": "tests of recipes run the command on a small folder",
    "train on conversations": "test_journey.py runs it with a small folder",
    "a small model learns": "it needs SmolLM2 and minutes of a GPU",
    "own text": "test_journey.py runs it with a small model",
    "train on preferences": "tests of recipes train a small folder by it",
    "GPT-2 of the paper": "it needs GPUs and a corpus",
    "names on the Hub": "it downloads a model and a data set; test_hub.py trains by names from a cache",
    "cuDNN of torch": "it needs the CUDA build of torch",
    "lora recipe": "tests of recipes train a small folder by it",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder in which the blocks run one after the other, as a reader's clone."""
    path = tmp_path_factory.mktemp("readme")
    for name in ("recipes", "docs"):
        (path / name).symlink_to(ROOT / name)
    return path


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.runs], ids=lambda block: block.name
)
def test_a_block_runs_and_prints_its_documented_output(block, folder):
    # Those of the README make files that the others read.
    printed = run_block(block, folder)
    assert printed == PRINTED.get(block.name, printed)


def test_only_listed_blocks_are_not_run():
    assert {block.name for block in BLOCKS if not block.runs} == set(NOT_RUN)
    assert {block.name for block in BLOCKS if block.runs} >= PRINTED.keys()
    assert any(block.page == README.name for block in BLOCKS)


def test_family_in_the_docs_is_the_tested_family():
    (block,) = [block for block in BLOCKS if block.name == "family"]
    assert any(block.code in path.read_text() for path in (ROOT / "tests").rglob("*.py"))


def test_table_of_planned_clones_is_current():
    table = clone_picture.TABLE.search(clone_picture.PAGE.read_text())
    assert table is not None
    # Generators of random numbers may differ between processors.
    actual, expected = map(clone_picture.numbers_of, (table.group(), clone_picture.table()))
    assert actual == pytest.approx(expected, abs=0.05, rel=0.03), (
        "docs/experts.md is old. Write it again: python -m tests.docs.generate"
    )
