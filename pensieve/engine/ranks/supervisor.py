"""The processes of the ranks that follow: started, watched, and ended together with the engine.

A model without one of its parts is no model: whichever rank ends, the engine process ends at once, in the same way, and
the front end starts another. The other way round the kernel sees to it: every rank is killed when the engine's process
is gone, however that came.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Final, NoReturn

import msgspec

from pensieve.config import EngineOptions
from pensieve.debug import child_environment
from pensieve.engine.process.host import FAILURE_PREFIX
from pensieve.lifeline import LOOK_S, STOPPED_LOOKS, describe_exit, is_stopped
from pensieve.logs import writes_json

LEAVE_PATIENCE_S: Final = 3.0
"""For ranks that were told to leave; the front end waits a little longer for the engine."""
FAILURE_GRACE_S: Final = 2.0
"""How long a failure here waits for the end of another rank that may have caused it."""


class RankSupervisor:
    """The processes of ranks 1 to N - 1; rank 0 is this process."""

    def __init__(self, options: EngineOptions, device: str, *, ring: int, meeting: int) -> None:
        """Start them. ``device``: ``cpu`` or ``cuda``; ``ring``, ``meeting``: file descriptors, see ``host``."""
        self._told, self._leaving = threading.Event(), threading.Event()
        command = [sys.executable, "-P", "-m", "pensieve.engine.ranks.host", "--parent", str(os.getpid())]
        command += ["--device", device, "--ring", str(ring), "--meeting", str(meeting)]
        command += ["--log-level", logging.getLevelName(logging.getLogger().getEffectiveLevel())]
        command += ["--log-json"] if writes_json() else []
        self._processes = {
            rank: subprocess.Popen(
                [*command, "--rank", str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(ring, meeting),
                env=child_environment(failpoints=False),
            )
            for rank in range(1, options.tensor_parallel)
        }
        self._watch = threading.Thread(target=self._look_after, name="ranks", daemon=True)
        self._watch.start()
        for process in self._processes.values():
            assert process.stdin is not None
            try:
                process.stdin.write(msgspec.msgpack.encode(options))
                process.stdin.close()
            except BrokenPipeError:
                self.on_failure()
                raise

    def on_failure(self) -> None:
        """See ``leader.FollowerRanks``: a rank's death may show first as a sum that does not come about."""
        time.sleep(FAILURE_GRACE_S)  # meanwhile ``_look_after`` ends the process

    def before_stop(self) -> None:
        """See ``leader.FollowerRanks``. (A GPU's memory takes longer to release here than the other ranks take to end.)"""
        self._told.set()

    def wait_stopped(self) -> None:
        """See ``leader.FollowerRanks``; a rank that does not leave in time is killed."""
        self._leaving.set()
        limit = time.monotonic() + LEAVE_PATIENCE_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        """See ``leader.FollowerRanks``."""
        self._leaving.set()
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def _look_after(self) -> None:
        """Wait for the end of any rank: the thread ends with it, or ends the process."""
        handles = {os.pidfd_open(process.pid): rank for rank, process in self._processes.items()}
        looker = select.poll()
        for handle in handles:
            looker.register(handle, select.POLLIN)
        stopped = dict.fromkeys(self._processes, 0)
        while not self._leaving.is_set():
            ended = looker.poll(LOOK_S * 1000)
            if self._leaving.is_set():
                break
            for handle, _ in ended:
                rank = handles[handle]
                status = self._processes[rank].wait()
                if status or not self._told.is_set():
                    self._end(rank, status)
                looker.unregister(handle)
            for rank, process in self._processes.items():
                stopped[rank] = stopped[rank] + 1 if is_stopped(process.pid) else 0
                if stopped[rank] >= STOPPED_LOOKS:
                    self._end(rank, -signal.SIGKILL, "was stopped (SIGSTOP, a debugger)")
        for handle in handles:
            os.close(handle)

    def _end(self, rank: int, status: int, how: str = "") -> NoReturn:
        """End this process as that rank has ended; ``how``: in words, where the status does not say it.

        The kernel would kill the others too, but for one that was stopped before it could ask for that.
        """
        for process in self._processes.values():
            process.kill()
        if status > 0:
            os._exit(status)  # It has said why, in the last line on stderr.
        how = how or f"has ended with {describe_exit(status) if status else 'status 0, unasked'}"
        print(f"{FAILURE_PREFIX}rank {rank} {how}", file=sys.stderr, flush=True)
        if status == -signal.SIGKILL:
            # Somebody killed it: nothing that the engine was asked to do is to blame, and so it is told.
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
