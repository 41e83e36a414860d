"""Print the torch requirement of pyproject.toml, so that it is written down once."""

from __future__ import annotations

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
print(
    next(requirement for requirement in project["dependencies"] if requirement.startswith("torch>"))
)
