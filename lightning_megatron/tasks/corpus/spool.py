"""Temporary files for documents until it is known which of them are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from lightning_megatron.tasks.corpus.examination import ExaminedChunk
from lightning_megatron.tasks.corpus.signatures import NUM_HASHES, Signatures

_PLACE = np.dtype([("file", np.int32), ("fixed", np.bool_), ("line", np.int64)])
_HIT = np.dtype([("document", np.int64), ("gram", np.int32)])
# Number of hits that are read at a time.
_BLOCK = 1 << 20


class Spool:
    """Context manager that writes documents to temporary files in order, and reads them again.

    Memory use does not grow with the number of documents: contents, line numbers, signatures and
    8-grams are stored in files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.paths: list[str] = []
        self.num_documents = 0

    def __enter__(self) -> Spool:
        self._lines = open(self._folder / "lines", "wb")  # noqa: SIM115 (closed in close)
        self._places = open(self._folder / "places", "wb")  # noqa: SIM115
        self._signatures = open(self._folder / "signatures", "wb")  # noqa: SIM115
        self._hits = open(self._folder / "hits", "wb")  # noqa: SIM115
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, after which they can be read."""
        for file in (self._lines, self._places, self._signatures, self._hits):
            file.close()

    def add(self, examined: ExaminedChunk) -> None:
        """Append the documents of a chunk."""
        if examined.path not in self.paths[-1:]:
            self.paths.append(examined.path)
        count = len(examined.lines)
        places = np.empty(count, dtype=_PLACE)
        places["file"] = len(self.paths) - 1
        places["fixed"] = examined.fixed
        places["line"] = examined.lines
        self._places.write(places.tobytes())
        self._signatures.write(examined.signatures.tobytes())
        self._lines.writelines(content + b"\n" for content in examined.contents)
        pairs = [
            (self.num_documents + number, gram)
            for number, grams in enumerate(examined.grams)
            for gram in grams
        ]
        self._hits.write(np.array(pairs, dtype=_HIT).tobytes())
        self.num_documents += count

    def signatures(self) -> Signatures:
        """Return the signatures, of shape (N, 128), as a memory-mapped file."""
        path = self._folder / "signatures"
        if not path.stat().st_size:
            return np.empty((0, NUM_HASHES), dtype=np.uint32)
        return np.memmap(path, dtype=np.uint32, mode="r").reshape(-1, NUM_HASHES)

    def place(self, number: int) -> str:
        """Return file and line of a document."""
        record = self._records()[number]
        return f"{self.paths[record['file']]}:{record['line']}"

    def num_fixed(self, kept: npt.NDArray[np.bool_]) -> int:
        """Return how many of the kept documents were repaired."""
        return int((self._records()["fixed"] & kept).sum())

    def grams_found(self, num_grams: int, kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return which 8-grams of the test sets occur in the kept documents.

        Shapes: kept (N,) -> (num_grams,).
        """
        is_found = np.zeros(num_grams, dtype=np.bool_)
        with open(self._folder / "hits", "rb") as file:
            while block := file.read(_BLOCK * _HIT.itemsize):
                hits = np.frombuffer(block, dtype=_HIT)
                is_found[hits["gram"][kept[hits["document"]]]] = True
        return is_found

    def lines(self, kept: npt.NDArray[np.bool_]) -> Iterator[bytes]:
        """Yield the lines of the kept documents, each with its line feed."""
        with open(self._folder / "lines", "rb") as file:
            for is_kept, line in zip(kept, file, strict=True):
                if is_kept:
                    yield line

    def _records(self) -> npt.NDArray[np.void]:
        if not self.num_documents:
            return np.empty(0, dtype=_PLACE)
        return np.memmap(self._folder / "places", dtype=_PLACE, mode="r")
