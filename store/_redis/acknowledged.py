"""What this server has acknowledged, and whether Redis still has it: so a lost session is told from an erased one.

A Redis that fails over to a copy that lagged, or is started on older files, no longer has the last changes. A session
that was among them is simply not there, like one that another server has erased or whose time is over. So the changes
that a server makes are numbered, by the scripts that make them, on a mark of the server's own. Redis keeps changes in
one order, and a store that goes back loses the last of them. A mark that is behind what was acknowledged proves that it
did, and says which are lost: those with larger numbers.

Nobody else writes this mark, and a script that finds it behind leaves it so. In a Cluster a session and a mark lie on
different servers: nothing is numbered there, and a lost session is NOT_FOUND.
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

HEADS: Final = 16_384
"""Sessions of which is remembered what Redis has written to its file."""
MAX_SESSIONS: Final = 200_000
"""Some 60 MB. The least recently changed are forgotten first: one of them that is lost is NOT_FOUND."""


class AcknowledgedChanges:
    """One per store. Used on one event loop."""

    def __init__(
        self, link: RedisLink, on_regression: Callable[[], None], max_sessions: int = MAX_SESSIONS
    ) -> None:
        """``on_went_back`` hears, once each time, that Redis has lost changes that were acknowledged here."""
        self._link = link
        self._on_went_back = on_regression
        self._max_sessions = max_sessions
        self._mark = f"pv1:mark:{uuid.uuid4().hex}"
        self._numbers: OrderedDict[Key, tuple[int, int]] = OrderedDict()
        """Of a session's newest change that was made here: its number, and when the session expires (ms; 0: never)."""
        self._lost: OrderedDict[Key, int] = OrderedDict()
        """When each would have expired."""
        self._kept = 0
        """The largest number that was acknowledged, and that Redis has not been seen to have lost since."""
        self._kept_ms = 0
        """When that was, by Redis' clock."""
        self._times_back = 0

    async def change(self, script: str, key: Key, args: list[Any]) -> list[Any]:
        """``RedisLink.call_durably`` for a script that numbers what it does."""
        marks = [self._mark] if self._link.is_one_log else []
        return await self._link.call_durably(script, [*session_keys(key), *marks], [*args, self._kept])

    def record_change(self, row: SessionRow, now: bytes, number: bytes) -> None:
        """``row`` is about to be acknowledged. ``now`` and ``number``: from the script's reply."""
        key = Key(row.tenant, row.session_id)
        self._lost.pop(key, None)
        self._numbers.pop(key, None)
        if not number:
            return
        self._numbers[key] = int(number), row.expire_ms
        if len(self._numbers) > self._max_sessions:
            self._numbers.popitem(last=False)
        self._is_kept(now, number)

    def record_erasure(self, key: Key, now: bytes = b"", number: bytes = b"") -> None:
        """The session's erasure is about to be acknowledged. Without a number it was not made here."""
        self._numbers.pop(key, None)
        self._lost.pop(key, None)
        if number:
            self._is_kept(now, number)

    def _is_kept(self, now: bytes, number: bytes) -> None:
        self._kept = max(self._kept, int(number))
        self._kept_ms = max(self._kept_ms, int(now))

    async def is_lost(self, key: Key, now: bytes) -> bool:
        """Whether a session that is not there at ``now``, by Redis' clock, was lost with what was acknowledged."""
        if key in self._numbers:
            await self.check_for_regression()
        expire_ms = self._lost.get(key)
        return expire_ms is not None and not 0 < expire_ms <= int(now)

    async def check_for_regression(self, *, counts: bool = True) -> None:
        """Find out whether Redis has gone back since the last look. ``counts``: see ``RedisLink.command``."""
        kept, times_back = self._kept, self._times_back
        if not kept:
            return
        found = await self._number(counts)
        if found < kept and await self._link.drop_idle_connections():
            found = await self._number(counts)
        if found >= kept:
            return
        has_expired = not found and await self._has_expired(counts)
        if times_back != self._times_back:
            return  # another look, at the same time, has found the same
        if has_expired:
            self._kept = 0
            self._numbers.clear()
            return
        self._times_back += 1
        if self._kept == kept:  # else the next look tells of what was acknowledged during this one
            self._kept = found
        gone = [key for key, (number, _) in self._numbers.items() if found < number <= kept]
        for key in gone:
            self._lost[key] = self._numbers.pop(key)[1]
        while len(self._lost) > self._max_sessions:
            self._lost.popitem(last=False)
        extra = {"acknowledged": kept, "found": found, "sessions": len(gone)}
        log.error(
            "%s went back in time: %d changes that this server had acknowledged are gone, of %d sessions",
            *(self._link.address, kept - found, len(gone)),
            extra=extra,
        )
        self._on_went_back()

    async def _number(self, counts: bool) -> int:
        return int(await self._link.command("HGET", self._mark, "number", counts=counts) or 0)

    async def _has_expired(self, counts: bool) -> bool:
        """Whether the mark may be gone because nothing was changed for long, or because Redis' clock was set."""
        now = parse_time(await self._link.command("TIME", counts=counts))
        return now - self._kept_ms > MARK_MS // 2


class DurableHeads:
    """One per store. Each method returns when it is so, and raises Unavailable when it is not in time."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._known: OrderedDict[Key, tuple[int, str]] = OrderedDict()
        """Revision and chain hash that are known to be in Redis' file."""

    async def confirm_change(self, row: SessionRow) -> None:
        """A change that was made here, and has reached replicas where it has to, may be acknowledged."""
        key = Key(row.tenant, row.session_id)
        if self._link.replicas:
            await self._link.call(scripts.SURE, session_keys(key), [row.revision])
        else:
            await self.wait_for_file(key, row.revision, row.head_hash)

    async def confirm_read(self, row: SessionRow, fields: Fields) -> None:
        """What was read may be told: whoever hears of a change takes it as acknowledged, and who made it may still wait
        for that."""
        key = Key(row.tenant, row.session_id)
        await self.wait_for_replicas(key, row.revision, fields.get(b"sure", b""))
        if not self._link.replicas:
            await self.wait_for_file(key, row.revision, row.head_hash, reading=True)

    async def wait_for_replicas(self, key: Key, revision: int, sure: bytes) -> None:
        """Enough replicas have ``revision``, if any have to. ``sure``: the newest that is known to be there."""
        if self._link.replicas and int(sure or b"0") < revision:
            outcome, *values = await self._link.call_durably(scripts.AGAIN, session_keys(key), [])
            if outcome == b"OK":
                await self._link.call(scripts.SURE, session_keys(key), [int(values[0])])

    async def wait_for_file(self, key: Key, revision: int, head_hash: str, *, reading: bool = False) -> None:
        """That revision has left Redis' memory. What is known of that is not asked again.

        ``reading``: from a disk that takes no writes it is told all the same.
        """
        head = revision, head_hash
        if self._known.get(key) != head:
            keys = session_keys(key)
            if not await self._link.confirm(keys, revision, head_hash, reading=reading):
                return
        self._known[key] = head
        self._known.move_to_end(key)
        if len(self._known) > HEADS:
            self._known.popitem(last=False)
