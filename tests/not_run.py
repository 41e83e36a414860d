"""One line for each reason why tests did not run, with what would let them run."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

#: Extra of each package that tests may lack.
EXTRAS = {"transformers": "hf", "safetensors": "hf", "peft": "lora", "tokenizers": "text"}
EXTRAS |= {"matplotlib": "plot", "pyarrow": "parquet", "datasets": "datasets"}
EXTRAS |= {"lm_eval": "harness", "transformer_engine": "te"}


def remedy_of(reason: str) -> str:
    """Return what would let tests run that were skipped for a reason."""
    missing = re.search(r"could not import '([\w]+)", reason)
    if missing is None:
        return reason
    package = missing.group(1)
    name = f'-e ".[{EXTRAS[package]}]"' if package in EXTRAS else package.replace("_", "-")
    return f"{package} is not installed: pip install {name}"


class NotRun:
    """Plugin that ends a run with these lines."""

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
    ) -> None:
        """Print a line for each reason, and one if the selection matched no test."""
        reasons: Counter[str] = Counter()
        for report in terminalreporter.stats.get("skipped", ()):
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else "skipped"
            reasons[remedy_of(text.removeprefix("Skipped: "))] += 1
        for reason, number in sorted(reasons.items()):
            terminalreporter.write_line(f"{number} not run: {reason}")
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and not reasons:
            chosen = {"-k": config.option.keyword, "-m": config.option.markexpr}
            options = "".join(f" {name} {value!r}" for name, value in chosen.items() if value)
            paths = " ".join(config.args)
            absent = [path for path in config.args if not Path(path.partition("::")[0]).exists()]
            remedy = f"pytest --collect-only -q {paths} lists what there is."
            if absent:
                remedy = f"There is no {' and no '.join(absent)}."
            terminalreporter.write_line(
                f"No test is selected by {paths}{options}. {remedy}", red=True
            )
