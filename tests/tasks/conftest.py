"""Fixtures of the tests of tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tasks.chat.chat_folder import PLAIN, save_chat_llama


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a model whose tokenizer has a chat template."""
    pytest.importorskip("transformers")
    return save_chat_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def plain(tmp_path: Path) -> str:
    """Write a template that does not mark answers."""
    (tmp_path / "plain.jinja").write_text(PLAIN)
    return str(tmp_path / "plain.jinja")
