"""The connection under ``redis_store``: how Redis is called, how long it may take, whether it is still our store.

Redis' errors become the store's own here (``translated``), and its settings tell how durable a change is
(``weakest_of``).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

from redis import exceptions

from pensieve.errors import DataLoss, FailedPrecondition, PensieveError, Unavailable
from pensieve.store import _refusals
from pensieve.store._redis import scripts
from pensieve.store._redis.clients import Command, gather_all, make_client, parse_address

log = logging.getLogger(__name__)

SCHEMA = 1
MARKER = "pv1:store"
"""HASH store_id, schema: written once, never expires; its absence later means that the data were lost."""

SOCKET_TIMEOUT_S = 1.5
"""Without one byte of a reply."""
CALL_LIMIT_S = 3.0
"""For any call, with all that is tried again."""
SUSPECT_LIMIT_S = 1.0
"""The same while the last call got no answer: a turn waits for a Redis that hangs once, not at each of its calls."""
RETRIES = 3
"""Commands are sent again after a lost reply, which every script is made for."""
CALLS_AT_ONCE = 32
WAIT_MS = 1000
"""How long replicas may take to have a change."""
BUFFER_LIMIT_S = 5.0
"""How long Redis may hold a change back from its append-only file: it means to for 2 s at most."""
BUFFER_LOOK_S = 0.01
"""Between two looks at whether it still does."""

_LEVELS = {"always": "fsync", "everysec": "local"}
_REFUSES_WRITES = ("MISCONF", "OOM")
_FORBIDDEN = ("unknown command", "ACL failure in script", "can't run this command")
_PASSING = (
    *("BUSY", "NOREPLICAS", "LOADING", "MASTERDOWN", "READONLY", "TRYAGAIN", "CLUSTERDOWN", "ASK"),
    "WAIT cannot be used with replica",
)
_PASSING_TYPES = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.ClusterError,
    exceptions.RedisClusterException,
    exceptions.AskError,
    exceptions.TryAgainError,
)


class StoreReplacedError(exceptions.ResponseError):
    """A connection was made to a Redis that does not hold our store."""


def is_wrong_type(error: Exception) -> bool:
    """Whether a key holds something else than is always written to it."""
    return str(error).startswith("WRONGTYPE")


@contextmanager
def translate_errors(place: str) -> Iterator[None]:
    """Raises the store's errors for those of Redis; what can only be a bug of ours passes as it is."""
    try:
        yield
    except (exceptions.RedisError, exceptions.RedisClusterException) as error:
        meaning = _meaning(error, place)
        if meaning is None:
            raise
        raise meaning from error


def meant(error: Exception, place: str) -> PensieveError:
    """The store's error for one that stood in the place of a reply. Raises what can only be a bug of ours."""
    meaning = _meaning(error, place)
    if meaning is None:
        raise error
    return meaning


def _meaning(error: Exception, place: str) -> PensieveError | None:
    text = str(error)
    problem = f"Redis at {place}: {text}"
    if isinstance(error, StoreReplacedError):
        return _refusals.replaced(f"the Redis at {place} was emptied or replaced")
    if isinstance(error, exceptions.OutOfMemoryError) or text.startswith(_REFUSES_WRITES):
        return _refusals.full(problem)
    if isinstance(error, exceptions.NoPermissionError) or any(words in text for words in _FORBIDDEN):
        return FailedPrecondition(f"history store: {problem}", reason="STORE_FORBIDDEN")
    if is_wrong_type(error):
        return DataLoss(f"a key of a session holds something else: {problem}", reason="HISTORY_CORRUPT")
    if isinstance(error, exceptions.MovedError):
        return FailedPrecondition(
            f"the Redis at {place} is part of a Cluster: use redis+cluster://", reason="STORE_UNSAFE"
        )
    if isinstance(error, _PASSING_TYPES) or text.startswith(_PASSING):
        return _refusals.unavailable(problem)
    return None


def weakest_of(replies: Iterable[Any], place: str) -> str:
    """What a change survives at least: ``none``, ``local`` or ``fsync``.

    ``replies``: of every server at ``place`` to CONFIG GET. Raises FailedPrecondition (STORE_UNSAFE) if one may evict.
    """
    found = [{_text(name): _text(value) for name, value in _pairs(reply)} for reply in replies]
    for settings in found:
        policy = settings.get("maxmemory-policy", "noeviction")
        if policy != "noeviction":
            raise FailedPrecondition(
                f"the Redis at {place} has maxmemory-policy {policy} and may evict conversations: "
                "set maxmemory-policy noeviction",
                reason="STORE_UNSAFE",
            )
    levels = {_level(settings, place) for settings in found}
    return next(level for level in ("none", "local", "fsync") if level in levels)


def _level(settings: dict[str, str], place: str) -> str:
    """What a write survives on one server; said in the log where that is not the server's end."""
    if settings.get("appendonly") == "yes":
        return _LEVELS.get(settings.get("appendfsync", ""), "none")
    kept = "only snapshots: it forgets what came after the last one" if settings.get("save") else "nothing"
    log.warning(
        "Redis at %s has no append-only file and keeps %s when it ends. Conversations WILL be lost: "
        "set appendonly yes",
        *(place, kept),
    )
    return "none"


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _pairs(reply: Any) -> Iterable[tuple[Any, Any]]:
    """A map reply, in the form that this connection's protocol gives it."""
    if isinstance(reply, dict):
        items: Iterable[tuple[Any, Any]] = reply.items()
        return items
    return zip(reply[::2], reply[1::2], strict=True)


class _Script(NamedTuple):
    """Called by its hash; sent whole to a server that does not know it."""

    source: str
    sha: str


class RedisLink:
    """One client with its connections. Every call raises the store's own errors."""

    def __init__(
        self,
        url: str,
        *,
        retries: int = RETRIES,
        socket_timeout_s: float = SOCKET_TIMEOUT_S,
        on_error: Callable[[], None] = lambda: None,
    ) -> None:
        """Connects to nothing yet. Raises ValueError on a bad URL. ``on_error``: see ``open_store``."""
        self._on_error = on_error
        self._place = parse_address(url)
        self.address = str(self._place)
        self.replicas = self._place.replicas
        """How many replicas must have a change before it is acknowledged."""
        self.is_one_log = self._place.kind != "cluster"
        """Whether all keys lie on one server, which keeps their changes in one order."""
        self.store_id = ""
        self.durability = "unknown"
        self._calls = asyncio.Semaphore(CALLS_AT_ONCE)
        self._hangs = False
        self._settings: list[Any] | None = None
        """What the servers' settings were when they were last found to be safe."""
        self._settings_are_secret = False
        self._scripts: dict[str, _Script] = {}
        self._client = make_client(
            self._place, timeout_s=socket_timeout_s, retries=retries, on_connect=self._on_connect
        )

    def _known(self, script: str) -> _Script:
        found = self._scripts.get(script)
        if found is None:
            whole = f"local replicas = {self.replicas}\n{script}"
            sha = hashlib.sha1(whole.encode(), usedforsecurity=False).hexdigest()
            found = self._scripts[script] = _Script(whole, sha)
        return found

    async def call(self, script: str, keys: list[str], args: list[Any]) -> list[Any]:
        """The script's reply: an outcome name (bytes), then its values."""
        async with self._bounded():
            return await self._run(script, keys, args)

    async def calls(
        self, script: str, many: Sequence[tuple[list[str], list[Any]]]
    ) -> list[list[Any] | PensieveError]:
        """``call`` for each of these keys and arguments, all on one server, in one round trip.

        Replies, or errors in their places. Raises Unavailable when the server answers none.
        """
        known = self._known(script)
        commands = [(keys[0], ("EVALSHA", known.sha, len(keys), *keys, *args)) for keys, args in many]
        async with self._bounded():
            replies = await self._client.batch_on_one_server(commands)
            if any(isinstance(reply, exceptions.NoScriptError) for reply in replies):
                # What ran already runs again, which is what every script is made for.
                await self._client.run_on_all("SCRIPT LOAD", known.source)
                replies = await self._client.batch_on_one_server(commands)
        return [meant(reply, self.address) if isinstance(reply, Exception) else reply for reply in replies]

    async def servers_of(self, keys: Sequence[str]) -> list[str]:
        """A name for the server that holds each key."""
        async with self._bounded():
            return await self._client.servers_of(keys)

    async def call_durably(self, script: str, keys: list[str], args: list[Any]) -> list[Any]:
        """As ``call``, for a change that is acknowledged: returns when enough replicas have it.

        Raises Unavailable when they do not in time. The change may be made then; sent again, it is found and waited
        for. WAIT goes by its connection's last write, so both are one pipeline, and a script that finds its change
        made already writes something all the same.
        """
        async with self._bounded():
            return await self._run(script, keys, args, durably=True)

    async def confirm(self, keys: list[str], revision: int, head_hash: str, *, reading: bool = False) -> bool:
        """Returns when that revision of a session (0: its deletion), written before, would outlive Redis' process.

        With a ``head_hash``, 0 is the removal of the session that had that head.

        ``reading``: it was read, not made. False then, at once, for a disk that takes no writes: nothing is proven, but
        reads go on there.

        Raises Unavailable when it may not. STORE_FULL: a write that meets a full disk is answered as if it were kept,
        and only the next, even of nothing, is refused. STORE_UNAVAILABLE: Redis does not write its file, or was
        started again without the change. With ``appendfsync everysec`` it answers without writing to the file while
        an earlier flush runs, for up to 2 s (``flushAppendOnlyFile`` in its aof.c); ended then, it has lost what it
        answered. Without an append-only file there is nothing to wait for.
        """
        args = [revision, head_hash, int(reading)]
        return await self._written(scripts.BUFFERED, [*keys, f"{keys[0]}:none"], args, reading=reading)

    async def _written(self, script: str, keys: list[str], args: list[Any], *, reading: bool = False) -> bool:
        """As ``confirm``, for what a script looks for."""
        limit = asyncio.get_running_loop().time() + BUFFER_LIMIT_S
        handed_over = False
        while True:
            reply = await self.call(script, keys, args)
            there, size, flushes, failing = map(int, reply)
            if not there:
                raise _refusals.unavailable(
                    f"Redis at {self.address} has forgotten a change: its outcome is open"
                )
            if reading and failing:
                return False
            if handed_over or not size:
                return True
            # It may be others', of this moment: unless a flush is under way, Redis writes it all before it answers.
            # Whether that went well, the next look finds out.
            handed_over = not flushes
            if not handed_over:
                if asyncio.get_running_loop().time() > limit:
                    raise _refusals.unavailable(
                        f"Redis at {self.address} does not write its append-only file: a change's outcome is open"
                    )
                await asyncio.sleep(BUFFER_LOOK_S)

    async def command(self, *words: Any, counts: bool = True) -> Any:
        """The reply to one command. ``counts``: whether a failure does."""
        async with self._bounded(counts=counts):
            return await self._client.run(*words)

    async def commands(self, batch: Iterable[Command]) -> list[Any]:
        """Several commands in one round trip, in order; others' commands may run between them.

        The reply to one that met a key of another type is that error: it says nothing of the others.
        """
        async with self._bounded():
            replies = await self._client.batch(batch)
            for reply in replies:
                if isinstance(reply, Exception) and not is_wrong_type(reply):
                    raise reply
            return replies

    async def names(self, pattern: str, kind: str) -> list[bytes]:
        """All keys of one type that match. Takes as long as it takes: for housekeeping."""
        with translate_errors(self.address):
            return [name async for name in self._client.names(pattern, kind)]

    async def drop_idle_connections(self) -> bool:
        """Who answered may be a primary that was replaced and does not know it yet; whether that is possible here.

        What is asked next goes over new connections.
        """
        await self._client.drop_idle_connections()
        return self._place.kind == "sentinel"

    async def open(self) -> None:
        """Check the server's settings and the marker, and write the marker into an empty store.

        Returns when the marker is as safe as a change that is acknowledged: a Redis that forgot it would be one without
        our store, for as long as this server runs.
        """
        await self._check_settings()
        found = await self.command("HMGET", MARKER, "store_id", "schema")
        if None in found:  # two servers may be here at once: the first value written stays
            await self._mark("schema", str(SCHEMA))
            await self._mark("store_id", uuid.uuid4().hex)
            found = await self.command("HMGET", MARKER, "store_id", "schema")
        store_id, schema = (value.decode() for value in found)
        if not schema.isdecimal() or int(schema) > SCHEMA:
            raise _refusals.newer_schema(schema, SCHEMA)
        if self.store_id and store_id != self.store_id:
            raise _refusals.replaced(f"the Redis at {self.address} holds another store than before")
        if not self.replicas:
            await self._written(scripts.MARKED, [MARKER, f"pv1:{{{MARKER}}}:none"], [store_id])
        self.store_id = store_id

    async def check_marker(self, *, counts: bool = True) -> None:
        """Raises Unavailable (STORE_REPLACED) when this is not the store that was opened.

        Asked wherever "there is nothing" would be the answer: a wiped Redis must not look like one without sessions.
        """
        found = await self.command("HGET", MARKER, "store_id", counts=counts)
        if not self.store_id:
            raise _refusals.unavailable("the store is not open")
        if found is None or found.decode() != self.store_id:
            if counts:
                self._on_error()
            raise _refusals.replaced(f"the Redis at {self.address} was emptied or replaced")

    async def ping(self) -> None:
        """Raises unless this is our store, none of its servers may evict, and each takes writes as turns make them."""
        await self.check_marker(counts=False)
        async with self._bounded(counts=False):
            keys = await self._client.beats()
            await gather_all(*(self._beat(key) for key in keys))
        await self._check_settings(counts=False)

    async def close(self) -> None:
        await self._client.close()

    async def _run(
        self, script: str, keys: list[str], args: list[Any], *, durably: bool = False
    ) -> list[Any]:
        known, rest = self._known(script), (len(keys), *keys, *args)
        try:
            reply: list[Any] = await self._sent(keys[0], ("EVALSHA", known.sha, *rest), durably=durably)
        except exceptions.NoScriptError:
            reply = await self._sent(keys[0], ("EVAL", known.source, *rest), durably=durably)
        return reply

    async def _sent(self, key: str, words: Command, *, durably: bool) -> Any:
        """``durably``: as far as replicas have to have it."""
        return await (self._replicated(key, words) if durably and self.replicas else self._client.run(*words))

    async def _mark(self, field: str, value: str) -> None:
        words = ("HSETNX", MARKER, field, value)
        async with self._bounded():
            await self._sent(MARKER, words, durably=True)

    async def _beat(self, key: str) -> None:
        await self._run(scripts.TRIAL, [f"pv1:trial:{{{key}}}:{name}" for name in "mql"], [], durably=True)

    async def _replicated(self, key: str, words: Command) -> Any:
        """The reply to a command on ``key`` once enough replicas have what it wrote."""
        reply, count = await self._client.pair(key, (words, ("WAIT", self.replicas, WAIT_MS)))
        for answer in (reply, count):
            if isinstance(answer, Exception):
                raise answer
        if int(count) < self.replicas:
            await self._client.drop_idle_connections()
            raise _refusals.unavailable(
                f"Redis at {self.address}: {int(count)} of {self.replicas} replicas have the change: its outcome is open"
            )
        return reply

    async def _on_connect(self, connection: Any) -> None:
        """A new connection may be to a Redis that was restarted on nothing, or on something else."""
        # Not ``on_connect``: it pings before it says who we are, and a ping that fails connects anew, without end.
        await connection.on_connect_check_health(check_health=False)
        if not self.store_id:
            return
        await connection.send_command("HGET", MARKER, "store_id", check_health=False)
        found = await connection.read_response(disable_decoding=True)
        if found is None or found.decode() != self.store_id:
            raise StoreReplacedError(self.address)

    async def _check_settings(self, *, counts: bool = True) -> None:
        """Refuse a Redis that may evict; learn how durable an acknowledged write is. ``counts``: see ``command``."""
        if self._settings_are_secret:
            return
        try:
            async with self._bounded(counts=counts):
                raw = await self._client.run_on_all(
                    "CONFIG GET", "maxmemory-policy", "appendonly", "appendfsync", "save"
                )
        except FailedPrecondition as error:
            if error.reason != "STORE_FORBIDDEN":
                raise
            log.warning(
                "Redis at %s: CONFIG GET is not allowed, durability is unknown: %s", self.address, error
            )
            self._settings_are_secret = True
            weakest = "unknown"
        else:
            if raw == self._settings:
                return
            self._settings = None  # what may evict is told of each time
            weakest = weakest_of(raw, self.address)
            self._settings = raw
            if weakest == "local" and not await self._tells_of_its_buffer():
                weakest = "unknown"
        self.durability = f"replicated({self.replicas})" if self.replicas else weakest

    async def _tells_of_its_buffer(self) -> bool:
        """Whether ``confirm`` can know that a change has left Redis' memory."""
        try:
            async with self._bounded():
                await self._client.run_on_all("INFO", "persistence")
        except FailedPrecondition as error:
            if error.reason != "STORE_FORBIDDEN":
                raise
            log.warning("Redis at %s: INFO is not allowed, durability is unknown: %s", self.address, error)
            return False
        return True

    @asynccontextmanager
    async def _bounded(self, *, counts: bool = True) -> AsyncIterator[None]:
        """Bounds what is done inside in time and in number, and translates its errors. ``counts``: see ``command``."""
        limit = SUSPECT_LIMIT_S if self._hangs else CALL_LIMIT_S
        try:
            with translate_errors(self.address):
                async with asyncio.timeout(limit), self._calls:
                    yield
        except TimeoutError as error:
            self._hangs = True
            if counts:
                self._on_error()
            raise _refusals.unavailable(f"Redis at {self.address}: no answer in {limit:g} s") from error
        except Unavailable as error:
            self._hangs = isinstance(error.__cause__, exceptions.TimeoutError)
            if counts:
                self._on_error()
            raise
        self._hangs = False
