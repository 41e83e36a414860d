"""The command line in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from lightning_megatron.cli.main import main


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the arguments of pytest."""
    monkeypatch.setattr(sys, "argv", ["lightning-megatron"])


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command, a text and further arguments, and returns its output."""

    def run(text: str, *more: object) -> str:
        capsys.readouterr()
        main([*text.split(), *map(str, more)])
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command, which must end with an exit code and one message, and
    returns the message.
    """

    def run(text: str, *more: object, code: int | None = None) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*text.split(), *map(str, more)])
        assert ended.value.code == code or (code is None and ended.value.code in (1, 2))
        message = capsys.readouterr().err
        assert "Traceback" not in message
        return message

    return run
