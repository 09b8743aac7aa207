"""Several real redis-servers as one store: a primary with replicas and Sentinels, and a Cluster."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import redis

from support.store.redis_server import RedisServer, free_port, require_redis_server, server_folder

SERVICE = "history"
DOWN_AFTER_MS = 500
LIMIT_S = 20.0
SLOTS = 16384
NODE_TIMEOUT_MS = 15_000
"""As Redis has it: no test ends a server of a Cluster, and one that stood still on a busy machine must not be taken for
dead, since the whole Cluster is down then.
"""


def until(met: Callable[[], bool], what: str) -> None:
    """Waits for a condition; errors of servers that are not there yet count as no."""
    limit = time.monotonic() + LIMIT_S
    while True:
        with contextlib.suppress(redis.RedisError):
            if met():
                return
        if time.monotonic() > limit:
            raise RuntimeError(f"not within {LIMIT_S:g} s: {what}")
        time.sleep(0.05)


class SentinelGroup:
    """A primary, its replicas and three Sentinels, on loopback."""

    def __init__(self, folder: Path, *, replicas: int = 2) -> None:
        self._folder = folder
        self._sentinels: list[subprocess.Popen[bytes]] = []
        self.sentinel_ports: list[int] = []
        self.servers: list[RedisServer] = []
        for number in range(1 + replicas):
            options = ("--repl-diskless-sync-delay", "0", "--repl-timeout", "5")
            if self.servers:
                options += ("--replicaof", f"127.0.0.1 {self.servers[0].port}")
            place = folder / f"server{number}"
            place.mkdir()
            self.servers.append(RedisServer(place, options=options))

    def url(self, *, replicas: int = 0) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinel_ports)
        return f"redis+sentinel://{hosts}/{SERVICE}?replicas={replicas}"

    def primary(self) -> RedisServer:
        """Whom the first Sentinel names."""
        with contextlib.closing(redis.Redis(port=self.sentinel_ports[0], socket_timeout=2)) as sentinel:
            _, port = sentinel.sentinel_get_master_addr_by_name(SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    def is_failing_over(self) -> bool:
        """Whether a Sentinel replaces the primary now."""
        for port in self.sentinel_ports:
            with contextlib.closing(redis.Redis(port=port, socket_timeout=2)) as sentinel:
                if "failover_in_progress" in sentinel.sentinel_masters()[SERVICE]["flags"]:
                    return True
        return False

    def start(self) -> None:
        for server in self.servers:
            server.start()
        with contextlib.closing(self.servers[0].client()) as plain:
            until(
                lambda: (
                    sum(plain.info("replication")[f"slave{n}"]["state"] == "online" for n in (0, 1)) == 2
                    if plain.info("replication")["connected_slaves"] == 2
                    else False
                ),
                "the replicas follow",
            )
        for number in range(3):
            self._start_sentinel(number)
        for port in self.sentinel_ports:
            with contextlib.closing(redis.Redis(port=port, socket_timeout=2)) as sentinel:
                until(lambda sentinel=sentinel: self._is_ready(sentinel), "the Sentinels know each other")

    def stop(self) -> None:
        for process in self._sentinels:
            process.kill()
            process.wait()
        for server in self.servers:
            server.resume()
            server.kill()

    def _is_ready(self, sentinel: redis.Redis) -> bool:
        state = sentinel.sentinel_masters()[SERVICE]
        return bool(state["num-other-sentinels"] == 2 and state["num-slaves"] == len(self.servers) - 1)

    def _start_sentinel(self, number: int) -> None:
        port = free_port()
        config = self._folder / f"sentinel{number}.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {self._folder}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.servers[0].port} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {SERVICE} 3000\n"
        )
        with (self._folder / f"sentinel{number}.log").open("ab") as log:
            self._sentinels.append(
                subprocess.Popen(
                    [require_redis_server(), str(config), "--sentinel"],
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        self.sentinel_ports.append(port)


@contextlib.contextmanager
def sentinel_group() -> Iterator[SentinelGroup]:
    with server_folder() as folder:
        group = SentinelGroup(folder)
        try:
            group.start()
            yield group
        finally:
            group.stop()


async def replace_primary(group: SentinelGroup) -> RedisServer:
    """Fail over to another primary; return the old one, which does not hear of it and still accepts writes."""
    old = group.primary()
    with contextlib.closing(old.client()) as plain:
        # The Sentinels cannot demote it, so that no test depends on their pace.
        plain.execute_command("ACL", "SETUSER", "default", "-replicaof", "-slaveof")
    with contextlib.closing(redis.Redis(port=group.sentinel_ports[0], socket_timeout=5)) as sentinel:
        sentinel.execute_command("SENTINEL", "FAILOVER", SERVICE)
    await asyncio.to_thread(until, lambda: group.primary() is not old, "another primary is named")
    with contextlib.closing(old.client()) as plain:
        await asyncio.to_thread(
            until, lambda: not plain.info("replication").get("connected_slaves"), "its replicas have left"
        )
    return old


class ClusterGroup:
    """Three servers that share the slots, and replicas of the first."""

    def __init__(self, folder: Path, *, replicas: int = 0, node_timeout_ms: int = NODE_TIMEOUT_MS) -> None:
        self._buses: list[int] = []
        self.servers: list[RedisServer] = []
        self.replicas: list[RedisServer] = []
        for number in range(3 + replicas):
            place = folder / f"server{number}"
            place.mkdir()
            bus = free_port()
            options = ("--cluster-enabled", "yes", "--cluster-port", str(bus))
            options += ("--cluster-node-timeout", str(node_timeout_ms))
            options += ("--repl-diskless-sync-delay", "0")
            self._buses.append(bus)
            (self.servers if number < 3 else self.replicas).append(RedisServer(place, options=options))

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def start(self) -> None:
        clients, everyone = [], [*self.servers, *self.replicas]
        for server in everyone:
            server.start()
            clients.append(server.client())
        share = SLOTS // len(self.servers) + 1
        for number, client in enumerate(clients[: len(self.servers)]):
            first = number * share
            client.execute_command("CLUSTER ADDSLOTSRANGE", first, min(first + share, SLOTS) - 1)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for server, bus in zip(everyone[1:], self._buses[1:], strict=True):
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", server.port, bus)
        for client in clients:
            until(lambda client=client: _is_whole(client, len(everyone)), "the Cluster is whole")
        first = clients[0].execute_command("CLUSTER MYID")
        for client in clients[len(self.servers) :]:
            client.execute_command("CLUSTER REPLICATE", first)
        until(lambda: self._replicates(clients), "replicas follow, and all servers know it")
        for client in clients:
            client.close()

    def _replicates(self, clients: list[redis.Redis]) -> bool:
        """Whether all replicas follow the first server, and every server knows it."""
        count = len(self.replicas)
        online = clients[0].info("replication").get("connected_slaves") == count
        views = [client.execute_command("CLUSTER NODES").values() for client in clients]
        return online and all(sum("slave" in node["flags"] for node in view) == count for view in views)

    def client(self) -> redis.RedisCluster:
        """A plain client for looking behind the store's back."""
        return redis.RedisCluster(host="127.0.0.1", port=self.servers[0].port)

    def move_slot(self, slot: int) -> None:
        """Give a slot and its keys to the next server."""
        clients = [server.client() for server in self.servers]
        names = [client.execute_command("CLUSTER MYID").decode() for client in clients]
        owners = [client.execute_command("CLUSTER COUNTKEYSINSLOT", slot) > 0 for client in clients]
        source = owners.index(True)
        target = (source + 1) % len(clients)
        clients[target].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", names[source])
        clients[source].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", names[target])
        keys = clients[source].execute_command("CLUSTER GETKEYSINSLOT", slot, 1000)
        clients[source].execute_command(
            *("MIGRATE", "127.0.0.1", self.servers[target].port, "", 0, 5000, "KEYS", *keys)
        )
        for client in clients:
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", names[target])
            client.close()

    def stop(self) -> None:
        for server in [*self.servers, *self.replicas]:
            server.resume()
            server.kill()


def _is_whole(client: redis.Redis, nodes: int) -> bool:
    info = client.execute_command("CLUSTER INFO")
    text = (
        info
        if isinstance(info, dict)
        else dict(line.split(":", 1) for line in info.decode().split() if ":" in line)
    )
    return text["cluster_state"] == "ok" and int(text["cluster_known_nodes"]) == nodes


@contextlib.contextmanager
def cluster_group(*, replicas: int = 0, node_timeout_ms: int = NODE_TIMEOUT_MS) -> Iterator[ClusterGroup]:
    with server_folder() as folder:
        group = ClusterGroup(folder, replicas=replicas, node_timeout_ms=node_timeout_ms)
        try:
            group.start()
            yield group
        finally:
            group.stop()
