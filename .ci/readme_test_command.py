"""Print the command after `&&` in the README's block `test`: what runs the tests once the package
is installed.
"""

from __future__ import annotations

import re
from pathlib import Path

block = re.search(
    r"<!-- block: test\b.*?-->\s*```bash\n(.*?)```", Path("README.md").read_text(), re.DOTALL
)
if block is None:
    raise SystemExit(
        "README.md has no bash block named test: <!-- block: test ... -->. .ci/run takes its test "
        "command from there."
    )
print(block.group(1).strip().split("&&", 1)[1].strip())
