"""README: its commands and programs run as they stand, and its numbers, links and generated texts
are true.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import yaml

from lightning_megatron.version import __version__
from tests.docs import kept_table, performance_picture, schedule_picture
from tests.docs.api_page import API, api_page
from tests.docs.blocks import (
    DOCS,
    MAP,
    README,
    ROOT,
    SUB_ROOM_TABLE,
    pages,
    printed_text,
    read_blocks,
    room_map,
    run_block,
    sub_room_table,
)
from tests.docs.options_page import OPTIONS, options_page

BLOCKS = {block.name: block for block in read_blocks() if block.page == README.name}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an empty folder with the project's recipes, as a reader's clone."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    return tmp_path


@pytest.mark.parametrize("name", [block.name for block in BLOCKS.values() if block.runs])
def test_a_program_of_the_readme_runs(name: str, folder: Path) -> None:
    printed = run_block(BLOCKS[name], folder)
    assert printed == printed_text().get(name, printed)
    if name == "main":
        (log,) = folder.rglob("metrics.csv")
        rows = [row for row in csv.DictReader(log.read_text().splitlines()) if row["val_loss"]]
        losses = [float(row["val_loss"]) for row in rows]
        assert len(losses) >= 2
        assert losses[-1] < losses[0]


def test_only_the_command_of_the_tests_is_not_run() -> None:
    assert [block.name for block in BLOCKS.values() if not block.runs] == ["test"]


def test_readme_has_at_most_200_lines() -> None:
    assert len(README.read_text().splitlines()) <= 200


def test_code_of_the_front_pages_fits_on_a_phone() -> None:
    """A phone of 390 px shows 49 characters of a line, with the sizes in docs/code.css."""
    for page in (README, DOCS / "README.md"):
        code = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        assert len(code) == 2, page
        assert [line for line in "".join(code).splitlines() if len(line) > 49] == []


def test_citation_names_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == __version__
    assert cited["license"] == "Apache-2.0"
    # A release has a date in both files, and in neither before it.
    date = re.search(r"^## \[\S+\] - (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert date is not None
    assert str(cited.get("date-released", "unreleased")) == date.group(1)


def test_measured_times_are_in_the_results_and_speed_ups_are_their_quotients() -> None:
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    rows = performance_picture.measurements()
    assert rows
    for row in rows:
        assert f"{row.ours:.2f}" in results, row
        assert f"{row.peer:.2f}" in results, row
        assert row.speed_up.startswith(f"{row.peer / row.ours:.2f}"), row


def test_generated_texts_are_current() -> None:
    architecture = DOCS / "architecture.md"
    texts = [
        (architecture, MAP, room_map()),
        (architecture, SUB_ROOM_TABLE, sub_room_table()),
        (kept_table.PAGE, kept_table.TABLE, kept_table.table()),
        (
            schedule_picture.PAGE,
            schedule_picture.TRAINED,
            schedule_picture.trained_schedules(),
        ),
    ]
    old = [page.name for page, mark, text in texts if found(mark, page) != text]
    old += [OPTIONS.name] * (OPTIONS.read_text() != options_page())
    old += [API.name] * (API.read_text() != api_page())
    picture = performance_picture.PICTURE
    old += [picture.name] * (picture.read_text() != performance_picture.performance_picture())
    assert not old, f"{old} are old. Write them again: python -m tests.docs.generate"


def found(mark: re.Pattern[str], page: Path) -> str | None:
    match = mark.search(page.read_text())
    return None if match is None else match.group()


def test_links_and_recipes_of_all_pages_exist() -> None:
    missing = []
    for page in pages():
        text = page.read_text()
        linked = {page.parent / path for path in re.findall(r"\]\((?!http)([^)#]+)\)", text)}
        linked |= {ROOT / path for path in re.findall(r"recipes/\w+\.yaml", text)}
        named = re.findall(r"\brecipe:(\w+)", text)
        linked |= {ROOT / f"recipes/{name}.yaml" for name in named if name != "NAME"}
        linked.discard(ROOT / "recipes/NAME.yaml")
        missing += [f"{page.name}: {path}" for path in linked if not path.exists()]
    assert not missing, missing
    assert set(pages()) - {README} == set(DOCS.glob("*.md")), "a page is not in the navigation"
