"""The thread that grpc.aio runs for a whole process, and its end."""

from __future__ import annotations

import gc
import threading

POLLER = "_poll_wrapper"
"""Part of the thread's name: grpc.aio names it after the function that it runs."""
END_LIMIT_S = 5.0


def end_grpc_thread() -> None:
    """End grpc.aio's thread, once no event loop of this process runs any more.

    A thread that still runs while the process ends may crash it: rarely, SIGSEGV after an orderly drain. The thread is
    told to end when the last object that needs it is collected, and frozen cycles never are. The collection does not
    always wait until the thread has ended: it is joined here.
    """
    gc.unfreeze()
    gc.collect()
    for thread in threading.enumerate():
        if POLLER in thread.name:
            thread.join(END_LIMIT_S)
