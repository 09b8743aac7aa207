"""When a session's head may be told: as soon as Redis can lose it no more than what was acknowledged."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from pensieve.store._redis import scripts
from pensieve.store._redis.link import RedisLink
from pensieve.store._redis.rows import Fields, session_keys
from pensieve.store.contract import Key
from pensieve.store.records import SessionRow

HEADS: Final = 16_384
"""Sessions of which is remembered what Redis has written to its file."""


class SafeHeads:
    """One per store. Each method returns when it is so, and raises Unavailable when it is not in time."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._again = link.script(scripts.AGAIN)
        self._sure = link.script(scripts.SURE)
        self._known: OrderedDict[Key, tuple[int, str]] = OrderedDict()
        """Revision and chain hash that are known to be in Redis' file."""

    async def made(self, row: SessionRow) -> None:
        """A change that was made here, and has reached replicas where it has to, may be acknowledged."""
        key = Key(row.tenant, row.session_id)
        if self._link.replicas:
            await self._link.call(self._sure, session_keys(key), [row.revision])
        else:
            await self.in_file(key, row.revision, row.head_hash)

    async def shown(self, row: SessionRow, fields: Fields) -> None:
        """What was read may be told: whoever hears of a change takes it as acknowledged, and who made it may still wait
        for that."""
        key = Key(row.tenant, row.session_id)
        await self.on_replicas(key, row.revision, fields.get(b"sure", b""))
        if not self._link.replicas:
            await self.in_file(key, row.revision, row.head_hash, reading=True)

    async def on_replicas(self, key: Key, revision: int, sure: bytes) -> None:
        """Enough replicas have ``revision``, if any have to. ``sure``: the newest that is known to be there."""
        if self._link.replicas and int(sure or b"0") < revision:
            outcome, *values = await self._link.call_durably(self._again, session_keys(key), [])
            if outcome == b"OK":
                await self._link.call(self._sure, session_keys(key), [int(values[0])])

    async def in_file(self, key: Key, revision: int, head_hash: str, *, reading: bool = False) -> None:
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
