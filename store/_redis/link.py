"""The connection under ``redis_store``: bounded calls with the store's errors, and checks of the store's identity."""

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
from pensieve.store._redis.address import parse_address
from pensieve.store._redis.clients import Address, Command, gather_all, make_client

log = logging.getLogger(__name__)

SCHEMA = 1
MARKER = "pv1:store"
"""HASH store_id, schema: written once, never expires. If it is missing later, the data were lost."""

SOCKET_TIMEOUT_S = 1.5
"""Without one byte of a reply."""
CALL_LIMIT_S = 3.0
"""For any call, retries included."""
SUSPECT_LIMIT_S = 1.0
"""As CALL_LIMIT_S while the last call got no answer: a turn waits for a hanging Redis once, not at each call."""
RETRIES = 3
"""Commands are resent after a lost reply; every script allows that."""
CALLS_AT_ONCE = 32
WAIT_MS = 1000
BUFFER_LIMIT_S = 5.0
"""How long Redis may keep a change out of its append-only file; it intends at most 2 s."""
BUFFER_POLL_S = 0.01
SECRET_S = 60.0
"""After a user without the right to read Redis' settings, how long until they are asked for again: rights change."""

_SETTINGS = ("maxmemory-policy", "appendonly", "appendfsync", "no-appendfsync-on-rewrite", "save")
_LEVELS = {"always": "fsync", "everysec": "local"}
_REFUSES_WRITES = ("MISCONF", "OOM")
_FORBIDDEN = ("unknown command", "ACL failure in script", "can't run this command")
_PASSING = (
    *("BUSY", "NOREPLICAS", "LOADING", "MASTERDOWN", "READONLY", "TRYAGAIN", "CLUSTERDOWN", "ASK"),
    "DB index is out of range",  # Redis was started again with fewer databases
    # The primary became a replica before WAIT, or while it waited.
    *("WAIT cannot be used with replica", "UNBLOCKED"),
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
    """The connected Redis does not hold our store."""


def is_wrong_type(error: Exception) -> bool:
    """Whether a key has another type than the store writes to it."""
    return str(error).startswith("WRONGTYPE")


@contextmanager
def translate_errors(place: str) -> Iterator[None]:
    """Raise the store's errors for Redis' errors; one that can only be our bug passes unchanged."""
    try:
        yield
    except (exceptions.RedisError, exceptions.RedisClusterException) as error:
        meaning = _store_error_for(error, place)
        if meaning is None:
            raise
        raise meaning from error


def to_store_error(error: Exception, place: str) -> PensieveError:
    """Return the store's error for an error in a reply's place. Raises it if it can only be our bug."""
    meaning = _store_error_for(error, place)
    if meaning is None:
        raise error
    return meaning


def _store_error_for(error: Exception, place: str) -> PensieveError | None:
    text = str(error)
    problem = f"Redis at {place}: {text}"
    if isinstance(error, StoreReplacedError):
        return _refusals.replaced(f"the Redis at {place} was emptied or replaced")
    if isinstance(error, exceptions.OutOfMemoryError) or text.startswith(_REFUSES_WRITES):
        return _refusals.full(problem)
    if isinstance(error, exceptions.NoPermissionError) or any(words in text for words in _FORBIDDEN):
        return FailedPrecondition(f"history store: {problem}", reason="STORE_FORBIDDEN")
    if is_wrong_type(error):
        return DataLoss(f"a session's key has another type: {problem}", reason="HISTORY_CORRUPT")
    if isinstance(error, exceptions.MovedError | exceptions.ClusterCrossSlotError):
        return FailedPrecondition(
            f"the Redis at {place} is part of a Cluster: use redis+cluster://", reason="STORE_UNSAFE"
        )
    if isinstance(error, _PASSING_TYPES) or text.startswith(_PASSING):
        return _refusals.unavailable(problem)
    return None


def weakest_durability(replies: Iterable[Any], place: str) -> str:
    """Return the least that a change survives: ``none``, ``local`` or ``fsync``.

    ``replies``: every server's to CONFIG GET. Raises FailedPrecondition (STORE_UNSAFE) if a server may evict.
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
    """Return the durability of one server's writes; warn if they do not survive its end."""
    if settings.get("appendonly") == "yes":
        level = _LEVELS.get(settings.get("appendfsync", ""), "none")
        if level == "none" or settings.get("no-appendfsync-on-rewrite") != "yes":
            return level
        log.warning(
            "Redis at %s flushes nothing while it rewrites its file or saves a snapshot, and a power cut takes what "
            "came since: set no-appendfsync-on-rewrite no",
            place,
        )
        return "local"
    kept = "only snapshots, which lack the latest changes," if settings.get("save") else "nothing"
    log.warning(
        "Redis at %s has no append-only file and keeps %s when it ends. Conversations WILL be lost: "
        "set appendonly yes",
        *(place, kept),
    )
    return "none"


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _pairs(reply: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(reply, dict):
        items: Iterable[tuple[Any, Any]] = reply.items()
        return items
    return zip(reply[::2], reply[1::2], strict=True)


class _Script(NamedTuple):
    """Called by its hash; sent whole to a server that does not know it."""

    source: str
    sha: str


class RedisLink:
    """One client with its connections. Every call raises the store's errors."""

    def __init__(
        self,
        url: str,
        *,
        retries: int = RETRIES,
        socket_timeout_s: float = SOCKET_TIMEOUT_S,
        on_error: Callable[[], None] = lambda: None,
    ) -> None:
        """Raise ValueError on a bad URL. Connects later. ``on_error``: see ``open_store``."""
        self._on_error = on_error
        self._place = parse_address(url)
        self.address = str(self._place)
        self.replicas = self._place.replicas
        self.is_one_log = self._place.kind != "cluster"
        """Whether one server holds all keys and keeps their changes in one order."""
        self.store_id = ""
        self.durability = "unknown"
        self._calls = asyncio.Semaphore(CALLS_AT_ONCE)
        self._hangs = False
        self._replaced = False
        self._settings: list[Any] | None = None
        self._secret_until_s: float | None = None
        """When to ask for the settings again, by the event loop's clock. None: the last answer was one."""
        self._scripts: dict[str, _Script] = {}
        self._client = make_client(
            self._place, timeout_s=socket_timeout_s, retries=retries, on_connect=self._on_connect
        )

    def _prepared(self, script: str) -> _Script:
        found = self._scripts.get(script)
        if found is None:
            whole = f"local replicas = {self.replicas}\n{script}"
            sha = hashlib.sha1(whole.encode(), usedforsecurity=False).hexdigest()
            found = self._scripts[script] = _Script(whole, sha)
        return found

    async def call(self, script: str, keys: list[str], args: list[Any]) -> list[Any]:
        """Return the script's reply: an outcome name (bytes), then its values."""
        async with self._limited():
            return await self._run(script, keys, args)

    async def calls(
        self, script: str, many: Sequence[tuple[list[str], list[Any]]]
    ) -> list[list[Any] | PensieveError]:
        """``call`` for many keys and arguments on one server in one round trip; return replies or errors.

        Raises Unavailable if the server answers none.
        """
        known = self._prepared(script)
        commands = [(keys[0], ("EVALSHA", known.sha, len(keys), *keys, *args)) for keys, args in many]
        async with self._limited():
            replies = await self._client.batch_on_one_server(commands)
            if any(isinstance(reply, exceptions.NoScriptError) for reply in replies):
                # Scripts that ran already run again, which every script allows.
                await self._client.run_on_all("SCRIPT LOAD", known.source)
                replies = await self._client.batch_on_one_server(commands)
        return [
            to_store_error(reply, self.address) if isinstance(reply, Exception) else reply
            for reply in replies
        ]

    async def servers_of(self, keys: Sequence[str]) -> list[str]:
        async with self._limited():
            return await self._client.servers_of(keys)

    async def call_durably(self, script: str, keys: list[str], args: list[Any]) -> list[Any]:
        """As ``call``, for a change to acknowledge: return when enough replicas have it, else raise Unavailable.

        The change may be made all the same; resending finds it and waits for the replicas. WAIT covers its
        connection's last write. So both commands are one pipeline, and a script that finds its change made
        still writes something.
        """
        async with self._limited():
            return await self._run(script, keys, args, durably=True)

    async def confirm(self, keys: list[str], revision: int, head_hash: str, *, reading: bool = False) -> bool:
        """Return when that written revision of a session (0: its deletion) would survive Redis' process.

        With a ``head_hash``, 0 is the removal of the session with that head. ``reading``: the revision was
        only read, so a disk that takes no writes returns False at once.

        Raises Unavailable if the revision may be lost. STORE_FULL: Redis acknowledges the write that fills
        the disk and refuses only the next, even an empty one. STORE_UNAVAILABLE: Redis does not write its
        file, or restarted without the change. With ``appendfsync everysec`` Redis answers without writing to
        the file while an earlier flush runs, for up to 2 s (``flushAppendOnlyFile`` in its aof.c); if it is
        killed then, acknowledged changes are lost.
        """
        args = [revision, head_hash, int(reading)]
        return await self._wait_until_written(
            scripts.BUFFERED, [*keys, f"{keys[0]}:none"], args, reading=reading
        )

    async def _wait_until_written(
        self, script: str, keys: list[str], args: list[Any], *, reading: bool = False
    ) -> bool:
        limit = asyncio.get_running_loop().time() + BUFFER_LIMIT_S
        written = False
        while True:
            reply = await self.call(script, keys, [*args, int(written)])
            there, size, flushes, failing = map(int, reply)
            if not there:
                raise _refusals.unavailable(
                    f"Redis at {self.address} has lost a change: its outcome is unknown"
                )
            if reading and failing:
                return False
            if written or not size:
                return True
            # The buffer may hold other clients' new changes: unless a flush is under way, Redis writes all of
            # it before it answers. The next poll finds out whether that succeeded.
            written = not flushes
            if not written:
                if asyncio.get_running_loop().time() > limit:
                    raise _refusals.unavailable(
                        f"Redis at {self.address} does not write its append-only file: a change's outcome is unknown"
                    )
                await asyncio.sleep(BUFFER_POLL_S)

    async def command(self, *words: Any, count_errors: bool = True) -> Any:
        """``count_errors``: whether a failure calls ``on_error``."""
        async with self._limited(count_errors=count_errors):
            return await self._client.run(*words)

    async def commands(self, batch: Iterable[Command]) -> list[Any]:
        """Send several commands in one round trip, in order; others' commands may run between.

        The reply to a command on a key of another type is that error.
        """
        async with self._limited():
            replies = await self._client.batch(batch)
            for reply in replies:
                if isinstance(reply, Exception) and not is_wrong_type(reply):
                    raise reply
            return replies

    async def names(self, pattern: str, kind: str) -> list[bytes]:
        """Return the matching keys of one type, some of them twice. Has no time limit."""
        with translate_errors(self.address):
            return await self._client.names(pattern, kind)

    @property
    def primary(self) -> Address | None:
        """The primary that the Sentinels named last; None without Sentinels."""
        return self._client.primary

    async def has_moved(self, before: Address | None) -> bool:
        """Ask the Sentinels whether another primary than ``before``, taken before a call, is in charge.

        If so, the call may have been answered by a primary that was replaced; the next goes to the new one.
        """
        async with self._limited():
            return await self._client.has_moved(before)

    async def confirm_primary(self) -> None:
        """Raise Unavailable if the required replicas do not follow the server that answers."""
        if self.replicas and self._place.kind == "sentinel":
            async with self._limited():
                await gather_all(*map(self._beat, await self._client.beats()))

    async def open(self) -> None:
        """Check the servers' settings and the marker; write the marker into an empty store and make it durable."""
        await self._check_settings()
        found = await self.command("HMGET", MARKER, "store_id", "schema")
        if None in found:  # two servers may do this at once: the first value stays
            await self._mark("schema", str(SCHEMA))
            await self._mark("store_id", uuid.uuid4().hex)
            found = await self.command("HMGET", MARKER, "store_id", "schema")
        store_id, schema = (value.decode() for value in found)
        if not schema.isdecimal() or int(schema) > SCHEMA:
            raise _refusals.newer_schema(schema, SCHEMA)
        if self.store_id and store_id != self.store_id:
            raise _refusals.replaced(f"the Redis at {self.address} holds another store than before")
        keys = [MARKER, f"pv1:{{{MARKER}}}:none", *self._elsewhere]
        await self._wait_until_written(scripts.MARKED, keys, [store_id])
        self.store_id = store_id

    async def check_marker(self, *, count_errors: bool = True) -> None:
        """Raise Unavailable (STORE_REPLACED) if this is not the store that was opened.

        Called before every answer "there is nothing": a wiped Redis must not look like an empty store. All other
        calls are refused from then on, until a call of this finds the store again. An emptied Redis keeps its
        connections, so the check of new ones does not notice it.
        """
        async with self._limited(count_errors=count_errors, refuse=False):
            found = await self._client.run("HGET", MARKER, "store_id")
        if not self.store_id:
            raise _refusals.unavailable("the store is not open")
        self._replaced = found is None or found.decode() != self.store_id
        if self._replaced:
            if count_errors:
                self._on_error()
            raise _refusals.replaced(f"the Redis at {self.address} was emptied or replaced")

    async def ping(self) -> None:
        """Raise unless this is our store, no server may evict, and each accepts a turn's writes."""
        await self.check_marker(count_errors=False)
        async with self._limited(count_errors=False):
            keys = await self._client.beats()
            await gather_all(*(self._beat(key) for key in keys))
        await self._check_settings(count_errors=False)

    async def close(self) -> None:
        await self._client.close()

    async def _run(
        self, script: str, keys: list[str], args: list[Any], *, durably: bool = False
    ) -> list[Any]:
        known, rest = self._prepared(script), (len(keys), *keys, *args)
        try:
            reply: list[Any] = await self._send(keys[0], ("EVALSHA", known.sha, *rest), durably=durably)
        except exceptions.NoScriptError:
            reply = await self._send(keys[0], ("EVAL", known.source, *rest), durably=durably)
        return reply

    async def _send(self, key: str, words: Command, *, durably: bool) -> Any:
        return await (self._replicated(key, words) if durably and self.replicas else self._client.run(*words))

    async def _mark(self, field: str, value: str) -> None:
        words = ("HSETNX", MARKER, field, value)
        async with self._limited():
            await self._send(MARKER, words, durably=True)

    async def _beat(self, key: str) -> None:
        keys = [f"pv1:trial:{{{key}}}:{name}" for name in "mql"]
        await self._run(scripts.TRIAL, [*keys, *self._elsewhere], [], durably=True)

    @property
    def _elsewhere(self) -> list[str]:
        """A key in another slot, as a change has: the only server of a Cluster refuses it, and nothing else."""
        return ["pv1:mark:none"] if self.is_one_log else []

    async def _replicated(self, key: str, words: Command) -> Any:
        """Return the reply once enough replicas have the command's write."""
        needed = await self._client.replicas_needed(self.replicas, key)
        reply, count = await self._client.pair(key, (words, ("WAIT", needed, WAIT_MS)))
        for answer in (reply, count):
            if isinstance(answer, Exception):
                raise answer
        if int(count) < needed:
            await self._client.has_moved(None)  # the next call goes to the primary that is named now
            raise _refusals.unavailable(
                f"Redis at {self.address}: {int(count)} of {needed} replicas have the change: its outcome "
                "is unknown"
            )
        return reply

    async def _on_connect(self, connection: Any) -> None:
        """Check the marker: a restarted Redis may be empty or hold another store."""
        # Not ``on_connect``: it pings before it authenticates, and a failed ping reconnects, without end.
        await connection.on_connect_check_health(check_health=False)
        if not self.store_id:
            return
        await connection.send_command("HGET", MARKER, "store_id", check_health=False)
        found = await connection.read_response(disable_decoding=True)
        if found is None or found.decode() != self.store_id:
            raise StoreReplacedError(self.address)

    async def _check_settings(self, *, count_errors: bool = True) -> None:
        """Refuse a Redis that may evict; find out the durability of acknowledged writes."""
        now_s = asyncio.get_running_loop().time()
        if self._secret_until_s is not None and now_s < self._secret_until_s:
            return
        try:
            async with self._limited(count_errors=count_errors):
                raw = await self._client.run_on_all("CONFIG GET", *_SETTINGS)
        except FailedPrecondition as error:
            if error.reason != "STORE_FORBIDDEN":
                raise
            if self._secret_until_s is None:
                log.warning(
                    "Redis at %s: CONFIG GET is not allowed, durability is unknown: %s", self.address, error
                )
            self._settings, self._secret_until_s = None, now_s + SECRET_S
            weakest = "unknown"
        else:
            self._secret_until_s = None
            if raw == self._settings:
                return
            self._settings = None  # an unsafe setting is reported every time
            weakest = weakest_durability(raw, self.address)
            self._settings = raw
            if weakest == "local" and not await self._reports_buffer():
                weakest = "unknown"
        self.durability = f"replicated({self.replicas})" if self.replicas else weakest

    async def _reports_buffer(self) -> bool:
        try:
            async with self._limited():
                await self._client.run_on_all("INFO", "persistence")
        except FailedPrecondition as error:
            if error.reason != "STORE_FORBIDDEN":
                raise
            log.warning("Redis at %s: INFO is not allowed, durability is unknown: %s", self.address, error)
            return False
        return True

    @asynccontextmanager
    async def _limited(self, *, count_errors: bool = True, refuse: bool = True) -> AsyncIterator[None]:
        """Limit the time and number of calls, and translate their errors. ``refuse``: none in a replaced store."""
        limit = SUSPECT_LIMIT_S if self._hangs else CALL_LIMIT_S
        try:
            with translate_errors(self.address):
                if self._replaced and refuse:
                    raise StoreReplacedError(self.address)
                async with asyncio.timeout(limit), self._calls:
                    yield
        except TimeoutError as error:
            self._hangs = True
            if count_errors:
                self._on_error()
            raise _refusals.unavailable(f"Redis at {self.address}: no answer in {limit:g} s") from error
        except Unavailable as error:
            self._hangs = isinstance(error.__cause__, exceptions.TimeoutError)
            if count_errors:
                self._on_error()
            raise
        self._hangs = False
