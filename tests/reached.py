"""Run the tests that a change can reach: ``python -m tests.reached [--since COMMIT] [pytest options]``.

A test file is reached if it changed, or if it imports a changed file of the package or of the tests,
directly or through other files. Without ``--since`` the change is what is not committed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.import_graph import PACKAGE, ROOT, SourceFile, files_of, imported_files

#: What any test may start from.
EVERYWHERE = {"tests/conftest.py", "pyproject.toml", "constraints.txt"}


def reached(changed: set[Path]) -> list[SourceFile]:
    """Return the test files that changed files can reach.

    Args:
        changed: Absolute paths.
    """
    files = [*files_of(PACKAGE), *files_of(ROOT / "tests")]
    modules = {file.module: file for file in files}
    importers: dict[SourceFile, set[SourceFile]] = {file: set() for file in files}
    for file in files:
        for imported in imported_files(file, modules):
            importers[imported].add(file)
    pending = [file for file in files if file.path in changed]
    found = set(pending)
    while pending:
        new = importers[pending.pop()] - found
        found |= new
        pending += new
    tests = [file for file in found if file.path.name.startswith("test_")]
    return sorted(tests, key=lambda file: file.path)


def changed_files(since: str) -> set[Path]:
    """Return the files that differ from a commit, new ones included."""
    listings = (
        ["git", "diff", "--name-only", since],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    names = [
        name
        for command in listings
        for name in subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    ]
    return {ROOT / name for name in names}


def main(arguments: list[str]) -> int:
    """Run pytest on what a change can reach, and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--since", default="HEAD", help="commit before the change (HEAD)")
    options, rest = parser.parse_known_args(arguments)
    changed = changed_files(options.since)
    if any(path.relative_to(ROOT).as_posix() in EVERYWHERE for path in changed):
        paths = ["tests"]
    else:
        nightly = tuple(str(ROOT / "tests" / name) for name in ("gpu", "docs", "faults"))
        names = [str(file.path) for file in reached(changed)]
        paths = [name for name in names if not name.startswith(nightly)]
    if not paths:
        print(f"No test imports what changed since {options.since}.")
        return 0
    print(f"pytest {len(paths)} paths", flush=True)
    return subprocess.run([sys.executable, "-m", "pytest", *paths, *rest], cwd=ROOT).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
