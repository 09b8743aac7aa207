"""Detect acknowledged changes that Redis has lost, to tell a lost session from an erased or expired one.

A Redis that fails over to a lagging replica, or restarts on older files, has lost its last changes, and a
lost session is simply missing. Therefore the scripts number each change that a server makes, on a mark of the
server's own. Redis loses the last changes first. So a mark that is behind the acknowledged number proves the
loss, and the lost changes are those with larger numbers. No other server writes this mark, and a script that
finds it behind does not advance it. In a Cluster a session and a mark lie on different servers: changes are
not numbered, and a lost session is NOT_FOUND.
"""

from __future__ import annotations

import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from pensieve.store._redis import scripts
from pensieve.store._redis.link import RedisLink
from pensieve.store._redis.rows import Fields, parse_time, session_keys
from pensieve.store._redis.scripts import MARK_MS
from pensieve.store.contract import Key
from pensieve.store.records import SessionRow

log = logging.getLogger(__name__)

MAX_HEADS: Final = 16_384
"""Sessions whose head is remembered as written to Redis' file."""
MAX_SESSIONS: Final = 200_000
"""Some 60 MB. The least recently changed are forgotten first; a lost one is then NOT_FOUND."""


class AcknowledgedChanges:
    """The acknowledged changes of one store, on one event loop."""

    def __init__(
        self, link: RedisLink, on_regression: Callable[[], None], max_sessions: int = MAX_SESSIONS
    ) -> None:
        """``on_regression`` is called once for each loss."""
        self._link = link
        self._on_regression = on_regression
        self._max_sessions = max_sessions
        self._mark = f"pv1:mark:{uuid.uuid4().hex}"
        self._numbers: OrderedDict[Key, tuple[int, int]] = OrderedDict()
        """Session → number of its newest change made here, and its expiry (ms; 0: never)."""
        self._lost: OrderedDict[Key, int] = OrderedDict()
        """Session → expiry."""
        self._kept = 0
        """Largest acknowledged number that Redis is not known to have lost."""
        self._kept_ms = 0
        """Time of that change, by Redis' clock."""
        self._times_back = 0

    async def change(self, script: str, key: Key, args: list[Any]) -> list[Any]:
        marks = [self._mark] if self._link.is_one_log else []
        return await self._link.call_durably(script, [*session_keys(key), *marks], [*args, self._kept])

    def record_change(self, row: SessionRow, now: bytes, number: bytes) -> None:
        """Record a change before it is acknowledged. ``now`` and ``number``: from the script's reply."""
        key = Key(row.tenant, row.session_id)
        self._lost.pop(key, None)
        self._numbers.pop(key, None)
        if not number:
            return
        self._numbers[key] = int(number), row.expire_ms
        if len(self._numbers) > self._max_sessions:
            self._numbers.popitem(last=False)
        self._advance(now, number)

    def record_erasure(self, key: Key, now: bytes = b"", number: bytes = b"") -> None:
        """Record an erasure before it is acknowledged. No number: another server erased the session."""
        self._numbers.pop(key, None)
        self._lost.pop(key, None)
        if number:
            self._advance(now, number)

    def _advance(self, now: bytes, number: bytes) -> None:
        self._kept = max(self._kept, int(number))
        self._kept_ms = max(self._kept_ms, int(now))

    async def is_lost(self, key: Key, now: bytes) -> bool:
        """Whether a session that is missing at ``now`` (Redis' clock) was acknowledged and lost."""
        if key in self._numbers:
            await self.check_for_regression()
        expire_ms = self._lost.get(key)
        return expire_ms is not None and not 0 < expire_ms <= int(now)

    async def check_for_regression(self, *, count_errors: bool = True) -> None:
        """Find out whether Redis has lost changes since the last check."""
        kept, times_back = self._kept, self._times_back
        if not kept:
            return
        primary = self._link.primary
        found = await self._number(count_errors)
        if found < kept and await self._link.has_moved(primary):
            found = await self._number(count_errors)
        if found >= kept:
            return
        has_expired = not found and await self._has_expired(count_errors)
        if times_back != self._times_back:
            return  # a concurrent check has found the same loss
        if has_expired:
            self._kept = 0
            self._numbers.clear()
            return
        self._times_back += 1
        if self._kept == kept:  # else the next check reports what was acknowledged during this one
            self._kept = found
        gone = [key for key, (number, _) in self._numbers.items() if found < number <= kept]
        for key in gone:
            self._lost[key] = self._numbers.pop(key)[1]
        while len(self._lost) > self._max_sessions:
            self._lost.popitem(last=False)
        extra = {"acknowledged": kept, "found": found, "sessions": len(gone)}
        log.error(
            "%s went back in time: %d changes of %d sessions that this server had acknowledged are lost",
            *(self._link.address, kept - found, len(gone)),
            extra=extra,
        )
        self._on_regression()

    async def _number(self, count_errors: bool) -> int:
        return int(await self._link.command("HGET", self._mark, "number", count_errors=count_errors) or 0)

    async def _has_expired(self, count_errors: bool) -> bool:
        """Whether the mark may have expired: no change for long, or Redis' clock was set."""
        now = parse_time(await self._link.command("TIME", count_errors=count_errors))
        return now - self._kept_ms > MARK_MS // 2


class DurableHeads:
    """Waits until heads are durable. Raises Unavailable if that takes too long."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._known: OrderedDict[Key, tuple[int, str]] = OrderedDict()
        """Revision and chain hash known to be in Redis' file."""

    async def confirm_change(self, row: SessionRow) -> None:
        """Wait until a change made here may be acknowledged; it has already reached the required replicas.

        Replicas do not replace the file: a primary that ends, and is back before one takes its place, goes on with
        what its file holds, and they follow it.
        """
        await self._wait_for_file(Key(row.tenant, row.session_id), row.revision, row.head_hash)

    async def confirm_read(self, row: SessionRow, fields: Fields) -> None:
        """Wait until a read may be answered: its reader takes the change as acknowledged."""
        key = Key(row.tenant, row.session_id)
        if self._link.replicas:
            await self._wait_for_replicas(key, row.revision, fields.get(b"sure", b""))
        else:
            await self._wait_for_file(key, row.revision, row.head_hash, reading=True)

    async def confirm_deletion(self, key: Key) -> None:
        """Wait until a deletion may be told: who is told does not delete the session again."""
        if self._link.replicas:
            await self._link.call_durably(scripts.AGAIN, session_keys(key), [])
        await self._link.confirm(session_keys(key), 0, "")

    async def confirm_request(self, key: Key, revision: int, sure: bytes, head: tuple[int, str]) -> None:
        """Wait until a request that was committed at ``revision`` may be acknowledged again.

        ``sure``: as in the session's row; ``head``: its newest revision and that one's chain hash.
        """
        if self._link.replicas:
            await self._wait_for_replicas(key, revision, sure)
        else:
            await self._wait_for_file(key, *head)

    async def _wait_for_replicas(self, key: Key, revision: int, sure: bytes) -> None:
        """Wait until the required replicas and the file have ``revision``, unless it is known to be ``sure``."""
        if int(sure or b"0") >= revision:
            return
        outcome, *values = await self._link.call_durably(scripts.AGAIN, session_keys(key), [])
        if outcome == b"OK":
            # Not a head that this server knows to be in the file: that may have been an earlier primary's.
            await self._link.confirm(session_keys(key), int(values[0]), values[1].decode())

    async def _wait_for_file(self, key: Key, revision: int, head_hash: str, *, reading: bool = False) -> None:
        """Wait until the revision has left Redis' memory. ``reading``: not for a disk that takes no writes."""
        head = revision, head_hash
        if self._known.get(key) != head:
            keys = session_keys(key)
            if not await self._link.confirm(keys, revision, head_hash, reading=reading):
                return
        self._known[key] = head
        self._known.move_to_end(key)
        if len(self._known) > MAX_HEADS:
            self._known.popitem(last=False)
