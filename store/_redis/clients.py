"""One client interface over a single Redis server, a primary behind Sentinels, and a Cluster."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple, Protocol

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff

from pensieve.store._redis.address import RedisAddress

log = logging.getLogger(__name__)


async def gather_all(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run all calls to their end, then return their results or raise the first error, in their order.

    ``asyncio.gather`` would leave calls running that open connections after the store is closed.
    """

    async def outcome(call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await call
        except Exception as error:  # raised below, after all calls
            return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(outcome(call)) for call in calls]
    results = []
    for task in tasks:
        result = task.result()
        if isinstance(result, Exception):
            raise result
        results.append(result)
    return results


Command = tuple[Any, ...]

MAX_CONNECTIONS = 64
"""Per server; ``RedisLink`` allows fewer concurrent calls."""
HEALTH_CHECK_S = 30
SENTINEL_TIMEOUT_S = 0.5
ASK_AGAIN_S = 0.5
"""Age from which the Sentinels' answer is asked for again, beside the calls."""
OLDEST_S = 1.0
"""Age from which a change waits for a new answer. A fail-over takes longer: the primary must have been away for
``down-after-milliseconds`` first."""
BEAT = "pv1:beat"
BEATS = 4096
"""Keys tried to find one on a given server of a Cluster."""
LINK_SLACK_MS = 3000
"""A Sentinel hears of its replicas' links once in a second or so while they are broken."""
_REDIRECTS = (exceptions.MovedError, exceptions.AskError, exceptions.TryAgainError)


Address = tuple[str, int]


class RedisClient(Protocol):
    """Commands to the servers that accept writes. Raises redis-py's errors."""

    async def run(self, *words: Any) -> Any:
        """Send one command."""
        ...

    async def batch(self, commands: Iterable[Command]) -> list[Any]:
        """Send several commands in one round trip, in order; others' may run between. Return replies or errors."""
        ...

    async def pair(self, key: str, commands: tuple[Command, Command]) -> list[Any]:
        """Send two commands on one connection to the server that holds ``key``; return replies or errors."""
        ...

    async def servers_of(self, keys: Sequence[str]) -> list[str]:
        """Return the name of each key's server."""
        ...

    async def batch_on_one_server(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        """Send commands, each with its key, to one server in one round trip; return replies or errors."""
        ...

    async def run_on_all(self, *words: Any) -> list[Any]:
        """Send one command to every server that holds keys."""
        ...

    @property
    def primary(self) -> Address | None:
        """The primary that the Sentinels named last; None without Sentinels."""
        ...

    async def has_moved(self, before: Address | None) -> bool:
        """Ask the Sentinels whether another primary than ``before`` is in charge."""
        ...

    async def replicas_needed(self, least: int, key: str) -> int:
        """Return how many replicas must have a change of ``key`` so that it survives a fail-over: ``least`` or more."""
        ...

    async def beats(self) -> list[str]:
        """Return a key for a probe write on each server that holds keys now."""
        ...

    async def names(self, pattern: str, kind: str) -> list[bytes]:
        """Return the matching keys of one type, some of them twice. One that is there all the while is among them."""
        ...

    async def close(self) -> None: ...


def make_client(place: RedisAddress, *, timeout_s: float, retries: int, on_connect: OnConnect) -> RedisClient:
    """``on_connect`` prepares each connection; not in a Cluster, where a server may not hold its key."""
    options = {
        **place.options,
        "protocol": 3,
        "decode_responses": False,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "health_check_interval": HEALTH_CHECK_S,
    }

    def retry() -> Retry:
        return Retry(ExponentialWithJitterBackoff(cap=0.25, base=0.02), retries)

    if place.kind == "cluster":
        return ClusterClient(place, options, retry())
    return ServerClient(place, {**options, "retry": retry(), "redis_connect_func": on_connect})


OnConnect = Callable[[Any], Awaitable[None]]


async def _walk(pool: Any, pattern: str, kind: str) -> list[bytes]:
    """Return the matching keys of one type of one server.

    On one connection, since SCAN's place means nothing to a server that was started anew or has taken over: going on
    there would leave keys out. Raises ConnectionError instead.
    """
    connection = await pool.get_connection()
    found, place = list[bytes](), b"0"
    try:
        while True:
            words = ("SCAN", place, "MATCH", pattern, "COUNT", 1000, "TYPE", kind)
            await connection.send_command(*words, check_health=False)  # a failed check would connect again
            place, some = await connection.read_response(disable_decoding=True)
            found += some
            if place == b"0":
                return found
    finally:
        await pool.release(connection)


async def _ignore(error: Exception) -> None:
    """``fail`` of redis-py's ``Retry``."""


class _BoundToPrimary(SentinelManagedConnection):
    """A connection that gives no answer of a primary that was replaced, as far as its pool knows.

    A paused or isolated primary takes itself for the primary, and accepts writes, until its Sentinels demote
    it: some ten seconds after they have named another.
    """

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        """As redis-py's, which connects to the last address again when it repeats a command."""
        await self.connect()  # type: ignore[no-untyped-call]
        await super().send_packed_command(*args, **options)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """As redis-py's. Raises ConnectionError for such an answer, and the command is sent again."""
        response = await super().read_response(*args, **options)
        if (self.host, self.port) != self.connection_pool.master_address:
            await self.disconnect()
            raise exceptions.ConnectionError("the primary was replaced before it answered")
        return response


class _BoundToPrimarySSL(_BoundToPrimary, SentinelManagedSSLConnection):
    pass


class _Sentinels(Sentinel):
    """Finds the newest primary that any Sentinel names.

    redis-py believes the first that answers. Sentinels hear of a fail-over up to 2 s after the one that leads
    it, and that one lists the old primary as its service's until all replicas follow the new one.
    """

    following = 0
    """How many replicas may take the place of the primary that was found last. One of them may follow another replica,
    as after two fail-overs in a row: ``WAIT`` counts it only when the Sentinels have corrected that."""
    asked_s = -math.inf
    """When it was found, by the event loop's clock."""
    _found: Address | None = None

    async def discover_master(self, service_name: str) -> Address:
        """As redis-py's; takes up to ``SENTINEL_TIMEOUT_S`` if one does not answer. Raises MasterNotFoundError, and
        NoPermissionError if a Sentinel's user may not ask."""
        now = asyncio.get_running_loop().time()
        answers = await gather_all(*(self._named_by(one, service_name) for one in self.sentinels))
        found: list[_Named] = [answer for answer in answers if answer is not None]
        newest = max(found, default=None)
        if newest is None or not newest.is_up:
            raise MasterNotFoundError(
                f"{len(found)} of {len(self.sentinels)} Sentinels know {service_name!r}, and none a primary that is up"
            )
        following = max(one.following for one in found if one.address == newest.address)
        if newest.address == self._found and 2 * len(found) <= len(self.sentinels):
            # The others may be cut off from us, and replace the primary by a replica that these do not reach.
            following = max(following, self.following)
        self._found, self.following, self.asked_s = newest.address, following, now
        return newest.address

    async def aclose(self) -> None:
        """As redis-py's, which has it from 8.1 on."""
        await gather_all(*(one.aclose() for one in self.sentinels))

    async def _named_by(self, sentinel: Any, service_name: str) -> _Named | None:
        try:
            states = await sentinel.sentinel_masters()
            named = await sentinel.sentinel_get_master_addr_by_name(service_name)
            replicas = await sentinel.sentinel_slaves(service_name) if named is not None else []
        except (exceptions.ConnectionError, exceptions.TimeoutError):
            return None
        state = states.get(service_name)
        if state is None or named is None:
            return None
        address = named[0].decode() if isinstance(named[0], bytes) else named[0], named[1]
        promoted = address != (state["ip"], state["port"])
        is_up = promoted or self.check_master_state(state, service_name)
        following = 0 if promoted else _following(state, replicas)
        return _Named(state["config-epoch"], promoted, is_up, address, following)


def _following(state: Mapping[str, Any], replicas: Collection[Mapping[str, Any]]) -> int:
    """Return how many of its replicas a Sentinel may let take their primary's place: see Sentinel's own
    ``sentinelSelectSlave``. ``state``: of the service.

    It looks at no link: one that lost its primary a while ago, as each does when the primary is started anew, is
    promoted while the others go on to confirm changes.
    """
    downs = ("is_sdown", "is_odown", "is_disconnected")
    up = [
        one
        for one in replicas
        if one.get("role-reported") == "slave" and not any(one[is_down] for is_down in downs)
    ]
    linked = [one for one in up if one["master-link-status"] == "ok"]
    first = min((one["slave-priority"] for one in linked), default=0)

    def may_come_first(replica: Mapping[str, Any]) -> bool:
        priority = replica["slave-priority"]
        if replica["slave-repl-offset"] <= 1:  # as while it copies its primary: who has more comes first
            return bool(0 < priority < first)
        limit_ms = 10 * state["down-after-milliseconds"] + LINK_SLACK_MS
        return bool(priority and (state["is_sdown"] or replica["master-link-down-time"] <= limit_ms))

    return len(linked) + sum(may_come_first(one) for one in up if one not in linked)


class _Named(NamedTuple):
    """A Sentinel's answer, in the order of age."""

    epoch: int
    """Number of the service's configuration."""
    promoted: bool
    """Whether a fail-over is under way that has promoted this primary."""
    is_up: bool
    address: Address
    following: int
    """See ``_Sentinels.following``; 0 while replicas leave the old primary for the promoted one."""


class ServerClient:
    """One server, or the primary that Sentinels name."""

    def __init__(self, place: RedisAddress, options: dict[str, Any]) -> None:
        self._sentinel: Any = None
        self._retry: Retry = options["retry"]
        self._asking: asyncio.Task[None] | None = None
        self._client: Any
        if place.kind == "sentinel":
            self._sentinel = _Sentinels(  # type: ignore[no-untyped-call]
                place.nodes,
                sentinel_kwargs={
                    **(place.sentinel_options or {}),
                    "socket_timeout": SENTINEL_TIMEOUT_S,
                    "socket_connect_timeout": SENTINEL_TIMEOUT_S,
                    "retry": Retry(NoBackoff(), 0),
                },
            )
            # redis-py's default connection classes differ in this one thing.
            secure = options.pop("ssl", False)
            options["connection_class"] = _BoundToPrimarySSL if secure else _BoundToPrimary
            self._client = self._sentinel.master_for(
                place.service, max_connections=MAX_CONNECTIONS, **options
            )
        else:
            ((host, port),) = place.nodes
            if options.pop("ssl", False):
                options["connection_class"] = SSLConnection
            pool = ConnectionPool(host=host, port=port, max_connections=MAX_CONNECTIONS, **options)
            self._client = Redis.from_pool(pool)

    async def run(self, *words: Any) -> Any:
        self._ask_again()
        try:
            return await self._client.execute_command(*words)
        except exceptions.ReadOnlyError:
            # The server was a primary when we connected; the next connection may find the present primary.
            await self._client.connection_pool.disconnect(inuse_connections=False)
            raise

    async def batch(self, commands: Iterable[Command]) -> list[Any]:
        self._ask_again()
        # Never MULTI: a Redis whose memory is full refuses even reads inside it.
        async with self._client.pipeline(transaction=False) as pipeline:
            for words in commands:
                pipeline.execute_command(*words)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            return replies

    async def pair(self, key: str, commands: tuple[Command, Command]) -> list[Any]:
        return await self.batch(commands)

    async def servers_of(self, keys: Sequence[str]) -> list[str]:
        return [""] * len(keys)

    async def batch_on_one_server(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        return await self.batch(words for _, words in commands)

    async def run_on_all(self, *words: Any) -> list[Any]:
        return [await self.run(*words)]

    @property
    def primary(self) -> Address | None:
        return None if self._sentinel is None else self._pool.master_address

    async def has_moved(self, before: Address | None) -> bool:
        if self._sentinel is None:
            return False
        return bool(await self._pool.get_master_address() != before)

    async def replicas_needed(self, least: int, key: str) -> int:
        # Sentinels promote a replica without asking the others. If a change is not on each that may be promoted, a
        # primary that stood still loses it: its other replicas still confirm what comes after the promotion.
        if self._sentinel is None:
            return least
        asking = self._ask_again()
        if asking is not None and self._age() > OLDEST_S:
            await asyncio.wait({asking})
        return max(least, int(self._sentinel.following))

    def _age(self) -> float:
        """Seconds since the Sentinels were asked."""
        return float(asyncio.get_running_loop().time() - self._sentinel.asked_s)

    def _ask_again(self) -> asyncio.Task[None] | None:
        """Ask the Sentinels if their answer is old; return the task that asks now. So a server that did not see a
        fail-over reads from the old primary for a moment only."""
        if self._sentinel is not None and self._asking is None and self._age() > ASK_AGAIN_S:
            self._asking = asyncio.create_task(self._ask(), name="sentinels")
        return self._asking

    async def _ask(self) -> None:
        try:
            await self._pool.get_master_address()
        except exceptions.RedisError as error:
            # Calls go on with the last answer, and show themselves whether the primary is there.
            log.debug("no Sentinel names a primary: %s", error)
            self._sentinel.asked_s = asyncio.get_running_loop().time()
        finally:
            self._asking = None

    @property
    def _pool(self) -> Any:
        return self._client.connection_pool

    async def beats(self) -> list[str]:
        if self._sentinel is not None:
            # Drops idle connections to a former primary, even if it still accepts writes.
            await self._pool.get_master_address()
        return [BEAT]

    async def names(self, pattern: str, kind: str) -> list[bytes]:
        return await self._retry.call_with_retry(lambda: _walk(self._pool, pattern, kind), _ignore)

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})
        await self._client.aclose(close_connection_pool=True)
        if self._sentinel is not None:
            await self._sentinel.aclose()


def _electable(nodes: Collection[Mapping[str, Any]]) -> int:
    """Return how many replicas of the server that listed ``nodes`` may take its place. One that others took for failed
    may not."""
    own = next(node["node_id"] for node in nodes if "myself" in node["flags"])
    replicas = [node["flags"].split(",") for node in nodes if node["master_id"] == own]
    return sum("fail" not in flags for flags in replicas)


class ClusterClient:
    """Redis Cluster. A command goes to the server of its key; a command without a key goes to any server."""

    def __init__(self, place: RedisAddress, options: dict[str, Any], retry: Retry) -> None:
        nodes = [ClusterNode(host, port) for host, port in place.nodes]
        self._retry = retry
        self._client: Any = RedisCluster(
            startup_nodes=nodes, retry=retry, max_connections=MAX_CONNECTIONS, **options
        )
        self._options = {name: value for name, value in options.items() if name != "db"}
        if self._options.pop("ssl", False):
            self._options["connection_class"] = SSLConnection
        self._servers: dict[tuple[str, int], Any] = {}
        self._beats: dict[str, str] = {}
        self._replicas: dict[str, tuple[float, int]] = {}
        """When each primary was asked for its replicas that may be promoted, and their number."""

    async def run(self, *words: Any) -> Any:
        return await self._client.execute_command(*words)

    async def batch(self, commands: Iterable[Command]) -> list[Any]:
        async with self._client.pipeline() as pipeline:
            for words in commands:
                pipeline.execute_command(*words)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            return replies

    async def pair(self, key: str, commands: tuple[Command, Command]) -> list[Any]:
        """Use a connection of our own: the Cluster client does not say which one it takes."""
        await self._client.initialize()
        node = self._client.get_node_from_key(key)
        replies = await self._piped(node.host, node.port, commands)
        moved = replies[0]
        if isinstance(moved, exceptions.MovedError):
            await self._client.nodes_manager.move_slot(moved)
            replies = await self._piped(moved.host, moved.port, commands)
        return replies

    async def servers_of(self, keys: Sequence[str]) -> list[str]:
        await self._client.initialize()
        return [self._client.get_node_from_key(key).name for key in keys]

    async def batch_on_one_server(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        await self._client.initialize()
        node = self._client.get_node_from_key(commands[0][0])
        replies = await self._piped(node.host, node.port, [words for _, words in commands])
        return [
            await self._run_redirected(words) if isinstance(reply, _REDIRECTS) else reply
            for (_, words), reply in zip(commands, replies, strict=True)
        ]

    async def run_on_all(self, *words: Any) -> list[Any]:
        await self._client.initialize()
        primaries = self._client.get_primaries()
        return await gather_all(
            *(self._client.execute_command(*words, target_nodes=node) for node in primaries)
        )

    @property
    def primary(self) -> Address | None:
        return None

    async def has_moved(self, before: Address | None) -> bool:
        """False: the client learns of changes from its servers' answers."""
        return False

    async def replicas_needed(self, least: int, key: str) -> int:
        # As with Sentinels: each replica of the primary may take its place, also one that is behind.
        await self._client.initialize()
        node = self._client.get_node_from_key(key)
        now = asyncio.get_running_loop().time()
        asked_s, count = self._replicas.get(node.name, (-math.inf, 0))
        if now - asked_s > ASK_AGAIN_S:
            if node.name in self._replicas:
                self._replicas[node.name] = now, count  # other calls need not ask as well
            nodes = await self._client.execute_command("CLUSTER NODES", target_nodes=node)
            count = _electable(nodes.values())
            self._replicas[node.name] = now, count
        return max(least, count)

    async def beats(self) -> list[str]:
        await self._client.initialize()
        keys = [self._beat_key(node.name) for node in self._client.get_primaries()]
        return [key for key in keys if key]

    async def names(self, pattern: str, kind: str) -> list[bytes]:
        async def walk() -> list[bytes]:
            slots = await self._slots()
            pools = [
                self._server(node.host, node.port).connection_pool for node in self._client.get_primaries()
            ]
            found = await gather_all(*(_walk(pool, pattern, kind) for pool in pools))
            if any(migrations for *_, migrations in slots) or await self._slots() != slots:
                raise exceptions.ConnectionError("slots are being moved between the Cluster's servers")
            return [name for some in found for name in some]

        async def learn_anew(error: Exception) -> None:
            await self._client.aclose()

        return await self._retry.call_with_retry(walk, learn_anew)

    async def _slots(self) -> list[tuple[str, Any, Any]]:
        """Return for each primary its name, the slots that it has, and those that it gives away or gets."""
        await self._client.initialize()
        views = await self.run_on_all("CLUSTER NODES")
        owns = [next(node for node in view.values() if "myself" in node["flags"]) for view in views]
        return sorted((own["node_id"], own["slots"], own["migrations"]) for own in owns)

    async def close(self) -> None:
        await self._client.aclose()
        for server in self._servers.values():
            await server.aclose(close_connection_pool=True)

    def _beat_key(self, node: str) -> str:
        """Return a key on that server, "" if it holds none."""
        known = self._beats.get(node)
        if known is None or self._client.get_node_from_key(known).name != node:
            found = (f"{BEAT}:{number}" for number in range(BEATS))
            known = next((key for key in found if self._client.get_node_from_key(key).name == node), "")
            self._beats[node] = known
        return known

    async def _run_redirected(self, words: Command) -> Any:
        try:
            return await self.run(*words)
        except (exceptions.RedisError, exceptions.RedisClusterException) as error:
            return error

    def _server(self, host: str, port: int) -> Any:
        server = self._servers.get((host, port))
        if server is None:
            retry = Retry(NoBackoff(), 1)
            pool = ConnectionPool(
                host=host, port=port, max_connections=MAX_CONNECTIONS, retry=retry, **self._options
            )
            server = self._servers[host, port] = Redis.from_pool(pool)
        return server

    async def _piped(self, host: str, port: int, commands: Sequence[Command]) -> list[Any]:
        try:
            async with self._server(host, port).pipeline(transaction=False) as pipeline:
                for words in commands:
                    pipeline.execute_command(*words)
                replies: list[Any] = await pipeline.execute(raise_on_error=False)
                return replies
        except (exceptions.ConnectionError, exceptions.TimeoutError):
            await self._client.aclose()  # it then learns the slot map anew
            raise
