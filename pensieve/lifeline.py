"""Child processes that do not outlive their parent.

Two ways. ``die_with_parent``: the kernel kills the child when the *thread* that started it ends, even if the child
hangs. ``terminate_on_eof``: the child reads a pipe whose write end only its parent holds, so any thread may start it;
at end of file it terminates as at SIGTERM. ``describe_exit`` and ``is_stopped`` inspect a process from outside.

Run as a script, this file becomes another program, which gets SIGTERM when its parent ends::

    python -I -S lifeline.py PARENT PROGRAM ARGUMENT...
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_GROUP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_PATIENCE_S: Final = 1.0
"""Time for an orphaned process to end. It is shorter than a restart, which would find the store in use. Answers that
the process still makes have no reader."""
LOOK_S: Final = 1.0
STOPPED_LOOKS: Final = 5
"""After this many polls in a row a stopped process counts as killed. Polls and not seconds, because the polling
process may itself have been stopped."""


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Have the kernel send this process a signal when the thread that started it ends.

    ``parent``: the process id of that thread's process. Returns False if it is already gone. Linux only; elsewhere
    does nothing and returns True.
    """
    if sys.platform != "linux":
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent


def leave_signals_to_parent() -> None:
    """Ignore the signals that terminals and service managers send to a process group; the parent acts on them."""
    for number in _GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def describe_exit(status: int) -> str:
    """Describe an exit status; negative numbers are signals."""
    if status == -signal.SIGKILL:
        return "signal 9 (killed from outside, or by the kernel for lack of memory)"
    return f"signal {-status}" if status < 0 else f"status {status}"


def process_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third (state) on, see ``man 5 proc_pid_stat``. Empty if the
    process is gone or there is no /proc."""
    try:
        # The command name in parentheses may hold any character; the state follows it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped, by SIGSTOP or a debugger."""
    return process_fields(pid)[:1] in (["T"], ["t"])


def terminate_on_eof(fd: int, patience_s: float = END_PATIENCE_S) -> None:
    """Terminate this process at end of file on ``fd``: SIGTERM, then SIGKILL after ``patience_s``. Data is ignored.
    Waits in a thread, so that a hung main thread does not keep the process alive."""

    def wait() -> None:
        while os.read(fd, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def become(parent: int, command: Sequence[str]) -> str:
    """Exec a program that gets SIGTERM when ``parent`` ends. Returns the reason if that fails."""
    if not die_with_parent(parent, signal.SIGTERM):
        return f"process {parent} is gone"
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and an exec'd program inherits that
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        return f"{command[0]}: {error.strerror}"


if __name__ == "__main__":
    sys.exit(become(int(sys.argv[1]), sys.argv[2:]))
