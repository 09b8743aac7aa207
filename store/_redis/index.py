"""The listing of ``redis_store``: one sorted set per tenant, session id by update time.

It lies in another hash slot than its sessions, so it cannot change in the same script. It is written around every
change and repaired while it is read: an entry of a session that is gone is removed, a wrong time corrected. A session
is entered before it is created, so that a crash in between leaves a superfluous entry, never a hidden session.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote

from pensieve.store._listing import Position, decode_cursor, encode_cursor, has_labels, position
from pensieve.store._redis.link import RedisLink
from pensieve.store._redis.rows import as_fields, index_key, parse_row, parse_time, session_keys
from pensieve.store.contract import Key, Page
from pensieve.store.records import SessionRow

BATCH = 64
GRACE_MS = 60_000
"""An entry this young may belong to a session that is just being created."""


class ListedSession(NamedTuple):
    """A session of the listing and its place in the index, which may be behind the row."""

    place: Position
    row: SessionRow


class RedisIndex:
    """Listing of sessions, eventually consistent."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def enter(self, key: Key, update_ms: int) -> None:
        """GT: of two writers that finish out of order, the later time stays."""
        await self._link.command("ZADD", index_key(key.tenant), "GT", update_ms, key.session_id)

    async def remove(self, key: Key) -> None:
        await self._link.command("ZREM", index_key(key.tenant), key.session_id)

    async def page(self, tenant: str, *, limit: int, cursor: str, labels: dict[str, str] | None) -> Page:
        """As ``HistoryStore.list_sessions``."""
        place = decode_cursor(cursor)
        found: list[ListedSession] = []
        while len(found) <= limit:
            batch = await self._after(tenant, place)
            if not batch:
                break
            entries = await self._live(tenant, batch)
            found += [entry for entry in entries if has_labels(entry.row, labels)]
            place = batch[-1]
        page = found[:limit]
        rows = sorted((entry.row for entry in page), key=position, reverse=True)
        return Page(tuple(rows), encode_cursor(page[-1].place) if len(found) > limit else "")

    async def purge(self) -> int:
        """Drop entries of sessions that are gone, for all tenants; returns how many."""
        dropped = 0
        scan: Any = b"0"
        while True:
            scan, names = await self._link.command(
                "SCAN", scan, "MATCH", "pv1:i:*", "COUNT", 1000, "TYPE", "zset"
            )
            for name in names:
                dropped += await self._purge_one(name)
            if int(scan) == 0:
                return dropped

    async def _purge_one(self, name: bytes) -> int:
        tenant = unquote(name.decode().removeprefix("pv1:i:{").removesuffix("}"))
        before = await self._link.command("ZCARD", name)
        place = decode_cursor("")
        while batch := await self._after(tenant, place):
            await self._live(tenant, batch)
            place = batch[-1]
        return int(before) - int(await self._link.command("ZCARD", name))

    async def _after(self, tenant: str, place: Position) -> list[Position]:
        """Up to BATCH entries after ``place``; none at the end."""
        offset = 0
        while True:
            reply = await self._link.command(
                *("ZRANGE", index_key(tenant), place.update_ms, "-inf", "BYSCORE", "REV"),
                *("LIMIT", offset, BATCH, "WITHSCORES"),
            )
            entries = [Position(int(float(score)), member.decode()) for member, score in reply]
            batch = [entry for entry in entries if entry < place]
            if batch or len(entries) < BATCH:
                return batch
            offset += len(entries)

    async def _live(self, tenant: str, batch: list[Position]) -> list[ListedSession]:
        """The sessions behind ``batch``; repairs the index where it is wrong."""
        keys = [Key(tenant, entry.session_id) for entry in batch]
        reads = [("HGETALL", session_keys(key)[0]) for key in keys]
        clock, *hashes = await self._link.commands([("TIME",), *reads])
        now = parse_time(clock)
        live: list[ListedSession] = []
        repairs: list[tuple[Any, ...]] = []
        for key, entry, reply in zip(keys, batch, hashes, strict=True):
            fields = as_fields(reply)
            if fields.get(b"state", b"deleted") == b"deleted":
                if fields or now - entry.update_ms > GRACE_MS:
                    repairs.append(("ZREM", index_key(tenant), key.session_id))
                continue
            row = parse_row(key, fields, now)
            live.append(ListedSession(entry, row))
            if row.update_ms > entry.update_ms:
                repairs.append(("ZADD", index_key(tenant), "GT", row.update_ms, key.session_id))
        if repairs:
            await self._link.commands(repairs)
        return live
