"""Tests of the walk of `parallelize`: it stays short, and the documentation lists its files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.walk import Walk, walk

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"

ENTRY = """
from package.swap.decide import find
from package.layers.linear import cut

def parallelize(module: Module, mesh: ParallelMesh) -> None:
    if is_ready(module):
        return
    sites = find(module)
    names(mesh)
    cut(sites)
    for site in sites:
        replacement = site.chosen()
        replacement.build()
    install(sites)

def is_ready(module: Module) -> bool:
    return find(module)

def names(mesh: ParallelMesh) -> list[str]:
    return find(mesh)

def install(sites: list[Site]) -> None:
    find(sites[0].module)
"""
DECIDE = """
class Replacement(Protocol):
    def build(self) -> None:
        find(self)

class Site:
    module: Module
    replacement: Replacement

    def chosen(self) -> Replacement:
        return choose(self)

def find(module: Module) -> list[Site]:
    return [Site(part) for part in module.modules()]

from package.swap.choice import choose
"""
CHOICE = """
def choose(site: Site) -> Replacement:
    return site.replacement
"""


@pytest.fixture(scope="module")
def parallelize_walk() -> Walk:
    return walk("swap/apply.py", "parallelize", "module")


def test_the_walk_of_parallelize_has_at_most_12_files_and_10_returns(
    parallelize_walk: Walk,
) -> None:
    result = parallelize_walk
    assert len(result.files) <= 12, "\n".join(result.files)
    assert result.num_returns <= 10, "\n".join(file for file, _ in result.stays)


def test_the_page_on_the_architecture_lists_the_files_of_the_walk_in_its_order(
    parallelize_walk: Walk,
) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Path of a module")[2]
    listed = re.findall(r"^\| `(\S+\.py)` \|", section.partition("\n## ")[0], re.MULTILINE)
    assert [f"swap/{file}" for file in listed] == parallelize_walk.files


def test_a_walk_enters_functions_and_methods_that_get_a_part_of_the_value(tmp_path: Path) -> None:
    result = walk("swap/apply.py", "parallelize", "module", write_package(tmp_path))
    assert result.stays == [
        ("swap/apply.py", ["parallelize"]),
        ("swap/decide.py", ["find", "chosen"]),
        ("swap/choice.py", ["choose"]),
        ("swap/apply.py", ["install"]),
        ("swap/decide.py", ["find"]),
    ]
    assert result.num_returns == 2


def test_a_walk_ends_at_functions_that_take_only_process_groups(tmp_path: Path) -> None:
    result = walk("swap/apply.py", "parallelize", "mesh", write_package(tmp_path))
    assert result.files == ["swap/apply.py"]
    assert result.num_returns == 0


def write_package(folder: Path) -> Path:
    """Write a package of two rooms and return its folder."""
    package = folder / "package"
    files = {
        "swap/apply.py": ENTRY,
        "swap/decide.py": DECIDE,
        "swap/choice.py": CHOICE,
        "layers/linear.py": "def cut(sites: list[Site]) -> None:\n    cut(sites)\n",
    }
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return package
