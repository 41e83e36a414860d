"""Options of the tests that kill processes; they are known where this folder, or a file of it, is
named.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the number of kills: a few in every run of the tests, many by hand."""
    parser.addoption(
        "--kills", type=int, default=2, help="ranks that are killed in one training (tests/faults)"
    )
    parser.addoption("--kill-seed", type=int, default=0, help="decides which and when")
