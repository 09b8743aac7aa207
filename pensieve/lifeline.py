"""A child process that does not outlive its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent: int) -> bool:
    """Have the kernel kill this process, however stuck it is, when the thread that started it ends.

    ``parent``: the process id of that thread's process; returns False when it is gone already. Linux only; elsewhere
    nothing happens, and the answer is True.
    """
    if sys.platform != "linux":
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent
