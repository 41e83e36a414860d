"""Print what runs the tests once the package is installed: the command after `&&` in the README's
block that ends with `pytest`.
"""

from __future__ import annotations

import re
from pathlib import Path

blocks = re.findall(
    r"^```bash\n(.*?)^```$", Path("README.md").read_text(), re.DOTALL | re.MULTILINE
)
commands = [block.partition("&&")[2].strip() for block in blocks if block.startswith("pip install")]
tests = [command for command in commands if command.split()[:1] == ["pytest"]]
if len(tests) != 1:
    raise SystemExit(
        f"README.md has {len(tests)} bash blocks of the form `pip install ... && pytest`, not one. "
        ".ci/run takes its test command from there."
    )
print(tests[0])
