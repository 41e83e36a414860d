"""Tests that code blocks of the README and `docs/` run, and that generated texts are current."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_megatron.swap.families.known import FAMILIES
from tests import clone_picture, kept_table, performance_picture, schedule_picture
from tests.forked_script import run_python, run_script
from tests.options_page import OPTIONS, options_page
from tests.readme_blocks import (
    DOCS,
    MAP,
    README,
    ROOT,
    SUB_ROOM_TABLE,
    Block,
    pages,
    printed_text,
    read_blocks,
    room_map,
    sub_room_table,
)
from tests.room_picture import PICTURE, room_picture

pytestmark = pytest.mark.slow

BLOCKS = read_blocks()
PRINTED = printed_text()
#: Blocks that are not run, and why.
NOT_RUN = {
    "test": "it is the command that runs this file",
    "install cpu torch": "it installs torch from the network",
    "build kernels": "it needs nvcc and CUTLASS",
    "recipe of transformer engine": "it needs a GPU; gpu/test_gpu_te.py trains with such recipes",
    "harness": "it downloads its tasks; evaluation/test_harness.py runs tasks of its own",
    "harness in a hook": "it is part of a module, and downloads its task",
    "fine-tune a BERT": "recipes/test_finetuning_recipes.py fine-tunes a small folder by a recipe",
    "seeds of a BERT": "recipes/test_finetuning_recipes.py runs the command on a small folder",
    "train on conversations": "recipes/test_instruction_recipe.py trains a small folder by it",
    "train on preferences": "recipes/test_instruction_recipe.py trains a small folder by it",
    "lora recipe": "recipes/test_instruction_recipe.py trains a small folder by it",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder in which the blocks run one after the other, as a reader's clone."""
    path = tmp_path_factory.mktemp("readme")
    (path / "recipes").symlink_to(ROOT / "recipes")
    return path


def command_of(block: Block) -> list[str] | None:
    """Return the arguments of a block that is one command of this package and needs no shell.

    Blocks of the README return None, because they run as they stand.
    """
    text = block.program.replace("\\\n", " ").strip()
    words = shlex.split(text) if block.language == "bash" else []
    is_alone = words[:1] == ["lightning-megatron"] and not re.search(r"[\n|&;<>$*#~]", text)
    return words[1:] if is_alone and block.page != README.name else None


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.runs], ids=lambda block: block.name
)
def test_code_block_runs_and_prints_its_documented_output(block: Block, folder: Path) -> None:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), environment.get("PATH", "")]
    )
    command = command_of(block)
    if command is not None:
        run = run_python(["-m", "lightning_megatron", *command], folder, environment, timeout=280)
    elif block.language == "python":
        script = folder / f"{block.name.replace(' ', '_')}.py"
        script.write_text(block.program)
        run = run_script(script, folder, environment, timeout=280)
    else:
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.program],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert run.returncode == 0, f"{block.program}\n{run.stdout[-4000:]}\n{run.stderr[-8000:]}"
    if block.name in PRINTED:
        assert run.stdout == PRINTED[block.name]


def test_only_listed_blocks_are_not_run() -> None:
    assert {block.name for block in BLOCKS if not block.runs} == set(NOT_RUN)


def test_printed_texts_are_those_of_blocks_that_run() -> None:
    assert {block.name for block in BLOCKS if block.runs} >= PRINTED.keys()


def test_every_page_is_in_the_navigation() -> None:
    assert set(pages()) - {README} == set(DOCS.glob("*.md"))


def test_readme_has_at_most_200_lines() -> None:
    assert len(README.read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", [README, DOCS / "architecture.md"], ids=lambda page: page.name)
def test_map_of_the_rooms_is_current(page: Path) -> None:
    match = MAP.search(page.read_text())
    assert match is not None
    assert match.group() == room_map(), (
        "the map is old. Write it again: python -m tests.readme_blocks"
    )


def test_table_of_the_sub_rooms_is_current() -> None:
    match = SUB_ROOM_TABLE.search((DOCS / "architecture.md").read_text())
    assert match is not None
    assert match.group() == sub_room_table(), (
        "the table is old. Write it again: python -m tests.readme_blocks"
    )


def test_picture_of_the_rooms_is_current() -> None:
    current = PICTURE.read_text() == room_picture()
    assert current, "docs/rooms.svg is old. Draw it again: python -m tests.readme_blocks"


def test_page_of_options_is_current() -> None:
    current = OPTIONS.read_text() == options_page()
    assert current, "docs/options.md is old. Write it again: python -m tests.readme_blocks"


def test_family_in_the_docs_is_the_tested_family() -> None:
    (block,) = [block for block in BLOCKS if block.name == "family"]
    assert block.code in (ROOT / "tests" / "swap" / "stablelm.py").read_text()


def test_the_docs_list_all_decoders() -> None:
    text = (DOCS / "hugging_face.md").read_text()
    rows = re.search(r"^\| family \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert rows is not None
    listed = set(re.findall(r"`(\w+)`", rows.group(1)))
    decoders = {
        f.model_type for f in FAMILIES if f.architecture.endswith(("ForCausalLM", "LMHeadModel"))
    }
    assert decoders <= listed <= {family.model_type for family in FAMILIES}


def test_measured_times_of_the_readme_are_in_the_results() -> None:
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    table = performance_picture.MEASURED.search(README.read_text())
    assert table is not None
    times = re.findall(r"(\d+\.\d+) ms", table.group(1))
    assert len(times) == 2 * len(performance_picture.measurements())
    assert not [time for time in times if time not in results]


def test_speed_ups_are_quotients_of_the_times() -> None:
    for row in performance_picture.measurements():
        assert row.speed_up.startswith(f"{row.peer / row.ours:.2f}"), row


def test_picture_of_measured_times_is_current() -> None:
    current = performance_picture.PICTURE.read_text() == performance_picture.performance_picture()
    assert current, "docs/performance.svg is old. Draw it again: python -m tests.readme_blocks"


def test_picture_and_table_of_planned_clones_are_current() -> None:
    table = clone_picture.TABLE.search(clone_picture.PAGE.read_text())
    assert table is not None
    # Generators of random numbers may differ between processors.
    for file, old, new, tolerance in (
        ("docs/experts.md", table.group(), clone_picture.table(), 0.05),
        ("docs/clones.svg", clone_picture.PICTURE.read_text(), clone_picture.picture(), 3),
    ):
        actual = clone_picture.numbers_of(old)
        expected = clone_picture.numbers_of(new)
        is_current = actual == pytest.approx(expected, abs=tolerance, rel=0.03)
        assert is_current, f"{file} is old. Write it again: python -m tests.readme_blocks"


def test_table_of_kept_bytes_is_current() -> None:
    match = kept_table.TABLE.search(kept_table.PAGE.read_text())
    assert match is not None
    assert match.group() == kept_table.table(), (
        "the table is old. Write it again: python -m tests.readme_blocks"
    )


def test_picture_of_the_schedules_matches_the_printed_table() -> None:
    pytest.importorskip("PIL")
    printed = f"{schedule_picture.picture_text()}\n\ntimelines: schedules.png\n"
    current = printed == PRINTED["compare schedules"]
    assert current, "docs/schedules.png is old. Draw it again: python -m tests.readme_blocks"
    assert schedule_picture.PICTURE.stat().st_size < 150_000


def test_page_of_schedules_lists_the_trained_schedules() -> None:
    match = schedule_picture.TRAINED.search(schedule_picture.PAGE.read_text())
    assert match is not None
    assert match.group() == schedule_picture.trained_schedules(), (
        "the list is old. Write it again: python -m tests.readme_blocks"
    )


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_and_recipes_exist(page: Path) -> None:
    text = page.read_text()
    linked = {page.parent / path for path in re.findall(r"\]\((?!http)([^)#]+)\)", text)}
    recipes = {ROOT / path for path in re.findall(r"recipes/\w+\.yaml", text)}
    recipes |= {ROOT / f"recipes/{name}.yaml" for name in re.findall(r"\brecipe:(\w+)", text)}
    recipes -= {ROOT / "recipes/NAME.yaml"}
    missing = [path for path in linked | recipes if not path.exists()]
    assert not missing, missing
