"""The site that mkdocs builds: every page is near its front page, and its search finds what users look for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import DOCS, ROOT

#: Words that somebody looks up, and the page that answers.
LOOKED_UP = {
    "fsdp": "coming_from/",
    "deepspeed": "coming_from/",
    "nemo": "coming_from/",
    "torchtitan": "coming_from/",
    "trl": "coming_from/",
    "wandb": "loggers_and_callbacks/",
    "tensorboard": "loggers_and_callbacks/",
    "earlystopping": "loggers_and_callbacks/",
    "out of memory": "out_of_memory/",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; a warning, such as a link without a target, is an error."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    return folder


def links_of(page: Path) -> set[Path]:
    """Return the pages that the text of a page links to, without those of the navigation."""
    found = re.findall(r"\]\((?!http)([^)#]+\.md)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / path).resolve() for path in found}


@pytest.mark.parametrize("word", LOOKED_UP)
def test_search_finds_what_users_look_for(word: str, site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = {
        entry["location"].partition("#")[0]
        for entry in index
        if word in f"{entry['title']} {entry['text']}".lower()
    }
    assert LOOKED_UP[word] in found


def test_every_page_is_two_clicks_from_the_front_page() -> None:
    front = DOCS / "README.md"
    first = links_of(front)
    second = set().union(*map(links_of, first))
    assert set(DOCS.glob("*.md")) <= {front} | first | second


def test_every_page_but_the_last_leads_to_the_next_one(site: Path) -> None:
    pages = [path for path in site.rglob("index.html") if "assets" not in path.parts]
    ends = [path for path in pages if "md-footer__link--next" not in path.read_text()]
    assert len(pages) == len(list(DOCS.glob("*.md")))
    assert [path.parent.name for path in ends] == ["benchmarks"]
