"""Fixtures of the tests of data modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chat_folder import save_chat_llama
from tests.data.recorder import write_corpus


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "corpus", 400)


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a model whose tokenizer has a chat template."""
    pytest.importorskip("transformers")
    return save_chat_llama(tmp_path_factory.mktemp("model"))
