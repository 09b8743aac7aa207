"""Threads for rendering and tokenising, shared fairly: one tenant's large work does not delay another's small
work.

Large and small work run in separate lanes. Each lane schedules tenants by start-time fair queueing (Goyal,
Vin and Cheng 1996), with work counted in characters: next is the tenant with the earliest start on a clock
that counts work. A returning tenant starts at the present clock, with neither credit nor debt.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from pensieve.errors import ResourceExhausted

Result = TypeVar("Result")

MAX_SHORT_CHARS: Final = 16_384
"""Work up to this size is small: some milliseconds."""
MESSAGE_WORK: Final = 256
"""A message counts as this many characters of text: measured in ``bench/results/rendering.md``."""
MAX_WAITING_CHARS: Final = 16_000_000
"""Waiting work of one tenant, per lane; more is refused."""
_SHORT_THREADS: Final = 2
_LONG_THREADS: Final = 1


Check = Callable[[], None]
"""Long work calls it regularly. It raises ``CallerLeft`` once the caller has left."""


class CallerLeft(Exception):
    """The caller has left. Raised in the working thread only."""


class TextLanes:
    """Runs work on texts in threads. Used on one event loop."""

    def __init__(self) -> None:
        self._short = _Lane("short texts", _SHORT_THREADS)
        self._long = _Lane("long texts", _LONG_THREADS)

    async def run(self, tenant: str, chars: int, work: Callable[[Check], Result]) -> Result:
        """Run ``work(check)`` in a thread, when it is the tenant's turn; aborted when its caller disconnects.
        ``chars``: its size. Raises ResourceExhausted when the tenant has too much work waiting."""
        return await (self._short if chars <= MAX_SHORT_CHARS else self._long).run(tenant, chars, work)

    def close(self) -> None:
        self._short.close()
        self._long.close()


class _TenantQueue:
    def __init__(self, clock: float) -> None:
        self.waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.chars = 0
        self.start = clock
        """Clock at which its next text begins."""

    def append(self, chars: int, turn: asyncio.Future[None]) -> None:
        self.waiting.append((chars, turn))
        self.chars += chars

    def popleft(self) -> tuple[int, asyncio.Future[None]]:
        chars, turn = self.waiting.popleft()
        self.chars -= chars
        return chars, turn


class _Lane:
    def __init__(self, name: str, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = threads
        self._tenants: dict[str, _TenantQueue] = {}
        """Tenants with waiting or running work."""
        self._running: dict[str, int] = {}
        self._clock = 0.0

    async def run(self, tenant: str, chars: int, work: Callable[[Check], Result]) -> Result:
        await self._acquire_thread(tenant, chars)
        caller_left = threading.Event()

        def check() -> None:
            if caller_left.is_set():
                raise CallerLeft

        loop = asyncio.get_running_loop()
        try:
            done = loop.run_in_executor(self._threads, work, check)
        except RuntimeError as error:
            # The system starts no more threads. A later call may find the work in the queue.
            caller_left.set()
            self._release_thread(tenant)
            self._dispatch()
            raise ResourceExhausted(f"texts cannot be processed now: {error}", retry_after_s=1.0) from error
        # The thread is free when the work has ended, even if its caller has left.
        done.add_done_callback(functools.partial(self._on_done, tenant))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            caller_left.set()
            raise

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    async def _acquire_thread(self, tenant: str, chars: int) -> None:
        """Returns with a thread taken."""
        queue = self._tenants.get(tenant)
        if queue is None:
            queue = self._tenants[tenant] = _TenantQueue(self._clock)
        elif queue.chars + chars > MAX_WAITING_CHARS:
            raise ResourceExhausted("too much text of this tenant waits to be processed", retry_after_s=1.0)
        turn = asyncio.get_running_loop().create_future()
        queue.append(max(1, chars), turn)
        self._dispatch()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn had come already
                self._release_thread(tenant)
            self._dispatch()
            raise

    def _dispatch(self) -> None:
        """Give free threads to the tenants that are next."""
        while self._free:
            for name in [name for name, queue in self._tenants.items() if self._is_idle(name, queue)]:
                del self._tenants[name]
            waiting = [name for name, queue in self._tenants.items() if queue.waiting]
            if not waiting:
                if not self._running:
                    self._tenants.clear()
                return
            name = min(waiting, key=lambda one: self._tenants[one].start)
            queue = self._tenants[name]
            chars, turn = queue.popleft()
            self._clock = queue.start
            queue.start += chars
            self._free -= 1
            self._running[name] = self._running.get(name, 0) + 1
            turn.set_result(None)

    def _is_idle(self, name: str, queue: _TenantQueue) -> bool:
        while queue.waiting and queue.waiting[0][1].cancelled():
            queue.popleft()
        # Idle: no work left, and its share of the clock has passed.
        return not queue.waiting and name not in self._running and queue.start <= self._clock

    def _on_done(self, tenant: str, done: asyncio.Future[object]) -> None:
        if not done.cancelled():
            done.exception()  # mark as retrieved, for work whose caller has left
        self._release_thread(tenant)
        self._dispatch()

    def _release_thread(self, tenant: str) -> None:
        self._free += 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
