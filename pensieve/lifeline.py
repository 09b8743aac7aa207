"""A child process that does not outlive its parent.

Two ways. ``die_with_parent``: the kernel kills the child when the *thread* that started it ends, whatever state the
child is in. ``terminate_on_eof``: the child reads a pipe whose other end only its parent holds, so that any thread may start
it, and ends as it does at SIGTERM.

Beside them: what can be told of a process from outside (``describe_exit``, ``is_stopped``).

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
_SENT_TO_ALL: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_PATIENCE_S: Final = 1.0
"""How long a process without its parent may take to end: less than another one takes to start, which would find the
store in use. Nobody reads the answers that it still makes."""
LOOK_S: Final = 1.0
STOPPED_LOOKS: Final = 5
"""A process that was found stopped so many times in a row is as good as killed. Looks are counted and not seconds: who
looks may have been stopped as well."""


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Have the kernel send this process a signal when the thread that started it ends: SIGKILL, however stuck it is.

    ``parent``: the process id of that thread's process; returns False when it is gone already. Linux only; elsewhere
    nothing happens, and the answer is True.
    """
    if sys.platform != "linux":
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent


def leave_signals_to_parent() -> None:
    """Ignore what a terminal and a service manager send to a whole group of processes: the parent acts on it."""
    for number in _SENT_TO_ALL:
        signal.signal(number, signal.SIG_IGN)


def describe_exit(status: int) -> str:
    """An exit status as people read it; negative ones are signals."""
    if status == -signal.SIGKILL:
        return "signal 9 (killed by somebody, or by the kernel for want of memory)"
    return f"signal {-status}" if status < 0 else f"status {status}"


def process_fields(pid: int) -> list[str]:
    """What /proc says of a process, from its state on: ``man 5 proc_pid_stat``, the third field and those behind it.

    Empty when the process is gone, or where there is no /proc.
    """
    try:
        # The name in parentheses may hold anything; the state follows it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped the process, as SIGSTOP and debuggers do."""
    return process_fields(pid)[:1] in (["T"], ["t"])


def terminate_on_eof(fd: int, patience_s: float = END_PATIENCE_S) -> None:
    """End this process when ``fd`` does: SIGTERM, and SIGKILL after ``patience_s``. What comes from ``fd`` is ignored.

    A thread waits for that, so that a main thread that is stuck does not keep the process.
    """

    def wait() -> None:
        while os.read(fd, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def become(parent: int, command: Sequence[str]) -> str:
    """Become a program that gets SIGTERM when ``parent`` ends; returns only if that fails, with the reason."""
    if not die_with_parent(parent, signal.SIGTERM):
        return f"process {parent} is gone"
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and a program inherits that
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        return f"{command[0]}: {error.strerror}"


if __name__ == "__main__":
    sys.exit(become(int(sys.argv[1]), sys.argv[2:]))
