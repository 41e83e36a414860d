"""The README says what is so: each of its code blocks is run, its paths exist, its map of the rooms is theirs.

Not run is the block `test`, which is the command that runs this file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_megatron.swap.families.known import FAMILIES
from tests.readme_blocks import MAP, README, ROOT, Block, printed_text, read_blocks, room_map

pytestmark = pytest.mark.slow

BLOCKS = read_blocks()
PRINTED = printed_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder in which the blocks run one after the other, as a reader's clone."""
    path = tmp_path_factory.mktemp("readme")
    (path / "recipes").symlink_to(ROOT / "recipes")
    return path


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.runs], ids=lambda block: block.name)
def test_block_runs(block: Block, folder: Path) -> None:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    if block.language == "python":
        script = folder / f"{block.name.replace(' ', '_')}.py"
        script.write_text(block.program)
        command = [sys.executable, str(script)]
    else:
        command = ["bash", "-euo", "pipefail", "-c", block.program]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, f"{block.program}\n{run.stdout[-4000:]}\n{run.stderr[-8000:]}"
    if block.name in PRINTED:
        assert run.stdout == PRINTED[block.name]


def test_only_the_test_command_is_not_run() -> None:
    assert [block.name for block in BLOCKS if not block.runs] == ["test"]


def test_map_of_the_rooms_is_what_the_rooms_say() -> None:
    found = MAP.search(README.read_text())
    assert found is not None
    assert found.group() == room_map(), "the map is old. Write it again: python -m tests.readme_blocks"


def test_family_in_the_readme_is_the_one_that_is_tested() -> None:
    (block,) = [block for block in BLOCKS if block.name == "family"]
    assert block.code in (ROOT / "tests" / "swap" / "starcoder2.py").read_text()


def test_the_readme_lists_all_decoders() -> None:
    rows = re.search(r"^\| family \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", README.read_text(), re.MULTILINE)
    assert rows is not None
    listed = set(re.findall(r"`(\w+)`", rows.group(1)))
    decoders = {f.model_type for f in FAMILIES if f.architecture.endswith(("ForCausalLM", "LMHeadModel"))}
    assert decoders <= listed <= {family.model_type for family in FAMILIES}


def test_links_and_recipes_in_the_readme_exist() -> None:
    text = README.read_text()
    paths = set(re.findall(r"\]\((?!http)([^)#]+)\)", text)) | set(re.findall(r"recipes/\w+\.yaml", text))
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, missing
