"""``pensieve gateway`` as a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pensieve.debug import child_environment


@contextmanager
def gateway(target: str, *options: str) -> Iterator[str]:
    """A door to ``target``; yields its URL."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "pensieve",
        "gateway",
        "--target",
        target,
        "--listen",
        "127.0.0.1:0",
    ]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, text=True, env=child_environment(failpoints=False)
    )
    assert process.stdout is not None
    try:
        with process.stdout:
            said = process.stdout.readline().strip()
            assert said.startswith("ready http="), said
            yield f"http://{said.removeprefix('ready http=')}"
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
