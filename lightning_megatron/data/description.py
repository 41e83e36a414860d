"""The description `PREFIX.json` beside a token file: which tokenizer wrote it and how much text it holds."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from lightning_megatron.errors import CorruptDataError

FORMAT = "lightning_megatron.corpus"
VERSION = 1
# no description is near this size, and a raw corpus that happens to carry the name is not worth parsing
MAX_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class CorpusDescription:
    """Say what a token file holds; `num_bytes` is the size of its text in UTF-8 (for bits per byte)."""

    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    eod: int | None
    num_documents: int
    num_tokens: int
    num_bytes: int
    format: str = FORMAT
    version: int = VERSION


def description_path(prefix: str | os.PathLike[str]) -> Path:
    """Give the path of the description of a corpus."""
    return Path(f"{os.fspath(prefix)}.json")


def read_description(prefix: str | os.PathLike[str]) -> CorpusDescription | None:
    """Read the description of a corpus; None if it has none, as corpora written by Megatron.

    Raises:
        CorruptDataError: The description is ours but cannot be understood.
    """
    path = description_path(prefix)
    content = _own_content(path)
    if content is None:
        return None
    if content.get("version") != VERSION:
        raise CorruptDataError(f"{path} has version {content.get('version')}; only version {VERSION} can be read.")
    try:
        return CorpusDescription(**content)
    except TypeError as error:
        raise CorruptDataError(f"{path} is no corpus description: {error}. Write the corpus again.") from error


def write_description(prefix: str | os.PathLike[str], description: CorpusDescription | None) -> None:
    """Write the description in one move, or remove an older one if there is nothing to say.

    Raises:
        CorruptDataError: A file of that name exists and is something else, which must not be lost.
    """
    path = description_path(prefix)
    if path.exists() and _own_content(path) is None:
        if description is None:
            return
        raise CorruptDataError(f"{path} exists and is no corpus description. Move it away or choose another output.")
    if description is None:
        path.unlink(missing_ok=True)
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(dataclasses.asdict(description), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _own_content(path: Path) -> dict | None:
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return content if isinstance(content, dict) and content.get("format") == FORMAT else None
