"""Folders of Hugging Face models and data sets: local ones, and names on the Hub with its cache."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.once import one_at_a_time

#: Key of the files of a tokenizer in a checkpoint.
TOKENIZER = "tokenizer_files"
#: Names of the files of a tokenizer and of generation.
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "spiece.model",
)
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHTS = "*.safetensors"
#: OWNER/NAME, with a revision and, for data sets, a split or a pattern of files.
_NAME = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<split>[\w./*?-]+))?", re.ASCII
)
#: Ends of the names of local files, which no name on the Hub has.
_IS_FILE = re.compile(
    r"\.(ckpt|jsonl?|ndjson|parquet|txt|text|md|gz|zst|bin|idx|jinja|yaml|model)$"
)
_SPLIT = re.compile(r"train|test|valid|val|dev|eval")


class _Repository(NamedTuple):
    """Repository of the Hub, in one revision."""

    name: str
    revision: str | None
    split: str | None
    kind: Literal["model", "dataset"]

    def download(self, patterns: Sequence[str], ignored: Sequence[str] = ()) -> Path:
        """Return the folder of the files in the cache; those that it lacks are downloaded.

        The first process of a node downloads, and others wait for it.

        Raises:
            UnsupportedError: If the repository cannot be read; the last line is the remedy.
        """
        lock = f"{self.kind}--{self.name.replace('/', '--')}"
        locks = Path(_cache(), ".locks", "lightning_megatron")
        try:
            with ExitStack() as stack:
                # Nothing can be written into a read-only cache, so nobody has to wait.
                with suppress(OSError):
                    stack.enter_context(one_at_a_time(locks / lock))
                return Path(self._snapshot(patterns, ignore_patterns=list(ignored)))
        # Those of httpx, which the library may pass on, are no OSErrors.
        except Exception as error:
            raise self.refusal(f"{type(error).__name__}: {' '.join(str(error).split())}") from error

    def names(self, patterns: Sequence[str]) -> list[str]:
        """Return the names of the files on the Hub; empty if it cannot be reached."""
        with suppress(OSError):
            return [file.filename for file in self._snapshot(patterns, dry_run=True)]
        return []

    def _snapshot(self, patterns: Sequence[str], **options: Any) -> Any:
        hub: Any = import_extra("huggingface_hub", "hf")
        return hub.snapshot_download(
            self.name,
            repo_type=self.kind,
            revision=self.revision,
            allow_patterns=list(patterns),
            **options,
        )

    def refusal(self, reason: str) -> UnsupportedError:
        """Return the error for a repository of which something is missing."""
        options = "" if self.kind == "model" else " --repo-type dataset"
        options += "" if self.revision is None else f" --revision {self.revision}"
        return UnsupportedError(
            f"{self.name} is no local path, and as the name of a {self.kind} on the Hub it cannot "
            f"be read: {reason[:600].rstrip('.')}. The cache is {_cache()}.\n"
            "Check the name, or download it where there is a connection, with the same HF_HOME and "
            f"the rights to it (`hf auth login`): hf download {self.name}{options}"
        )


def _cache() -> str:
    folder: str = import_extra("huggingface_hub.constants", "hf").HF_HUB_CACHE
    return folder


def hub_name(path: str | os.PathLike[str], kind: Literal["model", "dataset"]) -> _Repository | None:
    """Return the repository of the Hub that a path names; None for a local path.

    A path is local if it exists, if its first folder does, or if it ends like a file.
    """
    text = os.fspath(path)
    found = _NAME.fullmatch(text)
    is_local = os.path.exists(text) or os.path.isdir(text.split("/")[0]) or _IS_FILE.search(text)
    if found is None or is_local or (kind == "model" and found["split"] is not None):
        return None
    return _Repository(found["repo"], found["revision"], found["split"], kind)


def local_folder(path: str, *, has_weights: bool = True) -> str:
    """Return the folder of a model: the path itself, or that of its name in the Hub's cache.

    Args:
        path: Local path, or a name on the Hub such as ``Qwen/Qwen3-0.6B``, also with a revision:
            ``OWNER/NAME@REVISION``.
        has_weights: Whether to download the weights, beside the configuration and the tokenizer.

    Raises:
        UnsupportedError: If files are missing in the cache and cannot be downloaded.
    """
    repository = hub_name(path, "model")
    if repository is None:
        return path
    patterns = (*_SMALL_FILES, _WEIGHTS) if has_weights else _SMALL_FILES
    folder = repository.download(patterns, ["*/*"])
    missing = _missing_weights(folder) if has_weights else []
    if missing:
        raise repository.refusal(f"{folder} lacks {', '.join(missing[:3])}")
    return str(folder)


def _missing_weights(folder: Path) -> list[str]:
    names = {"config.json"}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names |= set(json.loads(index.read_bytes())["weight_map"].values())
    elif not list(folder.glob(_WEIGHTS)):
        names.add("model.safetensors")
    return sorted(name for name in names if not (folder / name).is_file())


def hub_files(path: str | os.PathLike[str], suffixes: Sequence[str]) -> list[Path] | None:
    """Return the files of a data set on the Hub, sorted by name; None for a local path.

    Args:
        path: Local path, or a name on the Hub such as ``HuggingFaceH4/ultrachat_200k:train_sft``:
            its split, or a pattern of files in the repository, follows the colon.
        suffixes: Suffixes of the files.

    Raises:
        UnsupportedError: If the data set cannot be read or has no such file, or has several splits
            and none is named.
    """
    repository = hub_name(path, "dataset")
    if repository is None:
        return None
    split = repository.split
    ends = tuple(f"{suffix}{packed}" for suffix in suffixes for packed in ("", ".gz", ".zst"))
    patterns = [f"*{end}" for end in ends]
    if split is None:
        # A large data set is not downloaded in vain.
        _check_one_split(repository, repository.names(patterns))
    else:
        is_pattern = re.search(r"[*?./]", split) is not None
        forms = [f"{split}-*", f"{split}.*", f"{split}/*"]
        patterns = [split] if is_pattern else forms + [f"*/{form}" for form in forms]
    folder = repository.download(patterns)
    chosen = [file for pattern in patterns for file in folder.glob(_anywhere(pattern))]
    files = sorted({file for file in chosen if file.is_file() and file.name.endswith(ends)})
    if not files:
        raise repository.refusal(f"{folder} has no file like {' or '.join(patterns[:3])}")
    if split is None:
        _check_one_split(repository, [file.name for file in files])
    return files


def _check_one_split(repository: _Repository, names: Sequence[str]) -> None:
    stems = {name.split("/")[-1].split("-0")[0].split(".")[0] for name in names}
    splits = sorted(filter(_SPLIT.match, stems))
    if len(splits) > 1:
        revision = "" if repository.revision is None else f"@{repository.revision}"
        raise UnsupportedError(
            f"the data set {repository.name} has several splits, which would be mixed: "
            f"{', '.join(splits)}.\nName one of them: {repository.name}{revision}:{splits[-1]}"
        )


def _anywhere(pattern: str) -> str:
    return pattern if "/" in pattern.removeprefix("*/") else f"**/{pattern.removeprefix('*/')}"


def tokenizer_files(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the files of a folder that belong to the tokenizer or to generation, by name."""
    found = (file for pattern in _TOKENIZER_FILES for file in Path(folder).glob(pattern))
    return {file.name: file.read_bytes() for file in sorted(found) if file.is_file()}
