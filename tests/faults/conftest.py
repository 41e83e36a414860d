"""Options of the tests that kill processes, for calls of pytest that name this folder or a file in
it.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the number of kills, which is small by default and may be large by hand."""
    parser.addoption(
        "--kills", type=int, default=2, help="ranks that are killed in one training (tests/faults)"
    )
    parser.addoption("--kill-seed", type=int, default=0, help="decides which and when")
