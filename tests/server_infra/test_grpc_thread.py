"""The end of the thread that grpc.aio runs."""

from __future__ import annotations

import gc
import threading
import time

from pensieve.grpc_thread import POLLER, end_grpc_thread


def test_a_thread_that_is_about_to_end_is_waited_for() -> None:
    told = threading.Event()

    def run() -> None:
        told.wait()
        time.sleep(0.1)

    thread = threading.Thread(target=run, name=f"Thread-9 ({POLLER})", daemon=True)
    thread.start()
    collected = []

    class Needs:
        """Tells the thread to end when it is collected, and is part of a cycle that was frozen."""

        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            collected.append(True)
            told.set()

    Needs()
    gc.freeze()
    try:
        end_grpc_thread()
    finally:
        told.set()
    assert collected and not thread.is_alive()
