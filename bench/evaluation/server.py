"""Runs a server for ``bench/evaluate.py`` and keeps its whole log, each line with the seconds since it was started.

    python bench/evaluation/server.py LOG COMMAND ...

Passes the server's output on (stdout and stderr together), SIGTERM to the server, and the server's exit status back.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

SIGNALLED = 128
"""Plus its number: the exit status of a program that a signal ended, as shells have it."""
NOT_FOUND = 127
"""The exit status where there is no such program, likewise."""


def main(log: Path, command: list[str]) -> int:
    """Exit status of ``command``."""
    started = time.monotonic()
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        print(error, flush=True)
        log.write_text(f"{error}\n", encoding="utf-8")
        return NOT_FOUND
    signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    assert process.stdout is not None
    with log.open("w", encoding="utf-8", buffering=1) as kept:
        for line in process.stdout:
            kept.write(f"{time.monotonic() - started:8.2f} {line.decode('utf-8', 'replace')}")
            try:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            except BrokenPipeError:  # whoever started this is gone
                process.terminate()
    status = process.wait()
    return SIGNALLED - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
