"""Starts, watches and stops the processes of the ranks other than rank 0.

A model without one of its parts cannot serve. If any rank exits, the engine process exits at once in the same
way, and the front end starts a new engine. In the other direction the kernel helps: it kills every rank when
the engine's process is gone, for whatever reason.
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
from collections.abc import Callable
from typing import Final, NoReturn

import msgspec

from pensieve.config import EngineOptions
from pensieve.debug import child_environment
from pensieve.engine.process.host import FAILURE_PREFIX
from pensieve.lifeline import LOOK_S, STOPPED_LOOKS, describe_exit, is_stopped
from pensieve.logs import writes_json

EXIT_TIMEOUT_S: Final = 3.0
"""For ranks that were told to stop; the front end waits a little longer for the engine."""
FAILURE_GRACE_S: Final = 2.0
"""How long a failure in this process waits for the exit of another rank that may have caused it."""


class RankSupervisor:
    """The processes of ranks 1 to N - 1 (``leader.FollowerRanks``); rank 0 is this process."""

    def __init__(self, options: EngineOptions, device: str, *, ring: int, meeting: int) -> None:
        """Start the processes. ``device``: ``cpu`` or ``cuda``; ``ring``, ``meeting``: file descriptors."""
        self.leave_group: Callable[[], None] | None = None
        """Ends this rank's collective operations, before the other ranks' exit."""
        self._exit_expected, self._stopping = threading.Event(), threading.Event()
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
        self._watcher = threading.Thread(target=self._watch_ranks, name="ranks", daemon=True)
        self._watcher.start()
        for process in self._processes.values():
            assert process.stdin is not None
            try:
                process.stdin.write(msgspec.msgpack.encode(options))
                process.stdin.close()
            except BrokenPipeError:
                self.on_failure()
                raise

    def on_failure(self) -> None:
        """See ``leader.FollowerRanks``. A rank's death may first show as a collective operation that fails."""
        time.sleep(FAILURE_GRACE_S)  # meanwhile ``_watch_ranks`` ends the process

    def before_stop(self) -> None:
        """See ``leader.FollowerRanks``. Called before this GPU's memory is released, which takes longer than
        their exit."""
        self._exit_expected.set()

    def wait_stopped(self) -> None:
        """See ``leader.FollowerRanks``; a rank that does not exit in time is killed."""
        if self.leave_group is not None:
            self.leave_group()
        self._stopping.set()
        limit = time.monotonic() + EXIT_TIMEOUT_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        self._stopping.set()
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def _watch_ranks(self) -> None:
        """Watch for the exit of any rank. Returns when all ranks stop, or exits this process."""
        handles = {os.pidfd_open(process.pid): rank for rank, process in self._processes.items()}
        poller = select.poll()
        for handle in handles:
            poller.register(handle, select.POLLIN)
        stopped = dict.fromkeys(self._processes, 0)
        while not self._stopping.is_set():
            events = poller.poll(LOOK_S * 1000)
            if self._stopping.is_set():
                break
            for handle, _ in events:
                rank = handles[handle]
                status = self._processes[rank].wait()
                if status or not self._exit_expected.is_set():
                    self._exit_as(rank, status)
                poller.unregister(handle)
            for rank, process in self._processes.items():
                stopped[rank] = stopped[rank] + 1 if is_stopped(process.pid) else 0
                if stopped[rank] >= STOPPED_LOOKS:
                    self._exit_as(rank, -signal.SIGKILL, "was stopped (SIGSTOP, a debugger)")
        for handle in handles:
            os.close(handle)

    def _exit_as(self, rank: int, status: int, how: str = "") -> NoReturn:
        """Exit this process with the status of that rank. ``how``: description, where the status does not show it.
        The kernel would kill the other ranks too, except one that was stopped before it could ask for that."""
        for process in self._processes.values():
            process.kill()
        if status > 0:
            os._exit(status)  # The rank printed the cause as the last line on stderr.
        how = how or f"ended with {describe_exit(status) if status else 'status 0, unexpectedly'}"
        print(f"{FAILURE_PREFIX}rank {rank} {how}", file=sys.stderr, flush=True)
        if status == -signal.SIGKILL:
            # The rank was killed from outside, so no request is to blame; the exit status tells that to the
            # front end.
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
