"""Ctrl-C at the prompt, whenever it comes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Final

NUDGE_S: Final = 0.05


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """While the main thread reads a line with ``input``, no Ctrl-C is lost.

    The interpreter's editor looks for signals only where one ends its waiting for keys (``readline.c`` of CPython). One
    that comes a moment earlier, between the drawing of the prompt or of a key and the waiting, would be seen at the
    next key. So a thread that hears of it ends the waiting by another signal, until the interrupt has left ``input``.
    """
    here, over = threading.get_ident(), threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def nudge() -> None:
        while number := os.read(reading, 1)[0]:
            while number == signal.SIGINT and not over.wait(NUDGE_S):
                signal.pthread_kill(here, signal.SIGURG)

    thread = threading.Thread(target=nudge, name="ctrl-c", daemon=True)
    handler = signal.signal(signal.SIGURG, lambda *_: None)  # ignored, it would end no waiting
    told = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(told)
        os.write(writing, b"\0")
        thread.join()
        signal.signal(signal.SIGURG, handler)
        os.close(reading)
        os.close(writing)
