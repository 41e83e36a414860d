"""A fake compiler that compiles nothing, and the folders that a build reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.kernels.cuda import Toolchain, read_sources
from lightning_megatron.kernels.cuda.sources import NEVER_RUN, Sources

VERSION_LINE = "Cuda compilation tools, release 13.0, V13.0.88"
# The script creates the file that follows -o, fails unless all object files of a link exist, and
# appends one line per call to the journal.
SCRIPT = """#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; exit 0; fi
for word; do case $last in -o) out=$word;; esac; last=$word; done
case "$*" in *{failing}*) echo "{failing}: error: no such thing"; exit 3;; esac
for word; do case $word in *.o) [ $word = $out ] || [ -f $word ] || exit 4;; esac; done
sleep {delay}; echo made > $out; echo $out >> {journal}
"""


@dataclass(frozen=True)
class FakeKit:
    """A fake compiler with its journal, CUTLASS and sources, in one folder."""

    folder: Path

    @property
    def journal(self) -> list[str]:
        """Names of the files that the compiler created, in order."""
        path = self.folder / "journal"
        return [Path(line).name for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def home(self) -> Path:
        """The folder of the toolkit."""
        return self.folder / "cuda"

    def write_compiler(
        self, version: str = VERSION_LINE, failing: str = "nothing-fails", delay: float = 0
    ) -> Path:
        """Write the script of the fake compiler."""
        path = self.home / "bin" / "nvcc"
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = {
            "version": version,
            "failing": failing,
            "delay": delay,
            "journal": self.folder / "journal",
        }
        path.write_text(SCRIPT.format(**fields))
        path.chmod(0o755)
        return path

    def write_cutlass(self, version: str = "4.2.0") -> Path:
        """Write the header of CUTLASS that a build reads."""
        path = self.folder / "cutlass" / "include" / "cutlass" / "version.h"
        path.parent.mkdir(parents=True, exist_ok=True)
        names = ("MAJOR", "MINOR", "PATCH")
        lines = [
            f"#define CUTLASS_{name} {n}" for name, n in zip(names, version.split("."), strict=True)
        ]
        path.write_text("\n".join(lines))
        return self.folder / "cutlass"

    def write_sources(self, text: str = "// a kernel") -> Sources:
        """Write two source files and the list of variants."""
        path = self.folder / "csrc"
        path.mkdir(exist_ok=True)
        (path / "variants.h").write_text(
            "#define LIST(V) \\\n  V(forward_one, Type<1, 2>) \\\n  V(forward_two, Type<3>)\n"
        )
        (path / "forward.cu").write_text(text)
        (path / "operator.cpp").write_text("// the operator")
        return read_sources(path)

    def write_sources_never_run(self) -> Sources:
        """Write sources for the architecture whose kernels were never run, in a subfolder."""
        path = self.folder / "csrc" / NEVER_RUN
        path.mkdir(exist_ok=True)
        (path / "variants.h").write_text("#define LIST(V) \\\n  V(forward_other, Type<1>)\n")
        (path / "forward.cu").write_text("// a kernel that was never run")
        return read_sources(path.parent, NEVER_RUN)

    def toolchain(self, nvcc_version: str = "13.0.88") -> Toolchain:
        """Return the fake compilers."""
        return Toolchain(
            self.home / "bin" / "nvcc",
            nvcc_version,
            self.folder / "cutlass" / "include",
            "4.2.0",
            self.folder / "torch",
        )
