"""A process that holds a new namespace open for the duration of a block."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def namespace(*unshare: str, script: str, arguments: tuple[str, ...]) -> Iterator[subprocess.Popen]:
    """Run a script in a new namespace, which stays open until the block or this process ends.

    Args:
        unshare: Arguments of ``unshare``, which name the new namespaces.
        script: Commands for ``sh`` that set the namespace up.
        arguments: Arguments of the script, from ``$0`` on.

    Raises:
        RuntimeError: If the commands fail, with their message.
    """
    # The holder waits for the end of its input, which also comes if this process is killed.
    command = ["unshare", *unshare, "sh", "-c", f"{script} && echo ready && exec cat", *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None, "there is a pipe"
    assert process.stderr is not None, "there is a pipe"
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{' '.join(command)}: {process.stderr.read().strip()}")
        yield process
    finally:
        process.kill()
        process.communicate()
