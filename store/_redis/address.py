"""Where a history in Redis is, from its URL: a server, Sentinels and their service, or a Cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis.asyncio.connection import Connection, SSLConnection, parse_url

Kind = Literal["server", "sentinel", "cluster"]

_KINDS: Final[dict[str, Kind]] = {"": "server", "sentinel": "sentinel", "cluster": "cluster"}
_PORTS: Final[dict[Kind, int]] = {"server": 6379, "sentinel": 26379, "cluster": 6379}
MAX_REPLICAS = 16


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A Redis server, the primary of a service that Sentinels watch, or a Cluster."""

    kind: Kind
    nodes: tuple[tuple[str, int], ...]
    """Host and port of the server, of Sentinels, or of some of the Cluster's servers."""
    options: dict[str, Any]
    """redis-py's options for a connection to a server: user, password, database, TLS."""
    service: str = ""
    sentinel_options: dict[str, Any] | None = None
    replicas: int = 0
    """Number of replicas that must have a change before it is acknowledged."""

    def __str__(self) -> str:
        """Name the servers without the URL's credentials."""
        where = ",".join(f"{host}:{port}" for host, port in self.nodes)
        return f"{where}/{self.service}" if self.service else where


def parse_address(url: str) -> RedisAddress:
    """Parse a URL of one of these forms; raises ValueError on others::

        redis://[USER:PASSWORD@]HOST[:PORT][/DB]
        redis+sentinel://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT],…/SERVICE[/DB]
        redis+cluster://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT],…

    ``rediss`` instead of ``redis``: over TLS. After ``?``: ``replicas=N``, with Sentinels ``sentinel_username`` and
    ``sentinel_password``, and redis-py's options of a connection (``ssl_ca_certs=PATH``, …).
    """
    parts = urlsplit(url)
    protocol, _, word = parts.scheme.partition("+")
    kind = _KINDS.get(word)
    if kind is None or protocol not in ("redis", "rediss"):
        raise ValueError(f"unknown kind of Redis {parts.scheme!r}")
    user, at, hosts = parts.netloc.rpartition("@")
    query = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    replicas = _replicas(query.pop("replicas", "0"))
    sentinel = {name: query.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    service, database = _path(kind, parts.path)
    nodes = tuple(_node(host, _PORTS[kind]) for host in hosts.split(","))
    if kind == "server" and len(nodes) > 1:
        raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
    options: dict[str, Any] = dict(parse_url(f"{protocol}://{user}{at}host/{database}?{urlencode(query)}"))
    for word in ("host", "port", "connection_class"):
        options.pop(word, None)
    try:
        (SSLConnection if protocol == "rediss" else Connection)(**options)
    except TypeError as error:  # redis-py would raise it at the first call
        raise ValueError(f"unknown option {str(error).rpartition(' ')[2]} after '?'") from None
    if protocol == "rediss":
        options["ssl"] = True
    tls = {name: value for name, value in options.items() if name.startswith("ssl")}
    known = {name: value for name, value in sentinel.items() if value is not None}
    return RedisAddress(kind, nodes, options, service, {**tls, **known}, replicas)


def _replicas(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_REPLICAS:
        raise ValueError(f"replicas={text}: expected a number from 0 to {MAX_REPLICAS}")
    return int(text)


def _path(kind: Kind, path: str) -> tuple[str, str]:
    words = [word for word in path.split("/") if word]
    service = words.pop(0) if kind == "sentinel" and words else ""
    if kind == "sentinel" and not service:
        raise ValueError("the path must name the service that the Sentinels watch: …/SERVICE")
    database = words.pop(0) if words else "0"
    if words or not database.isdecimal() or (kind == "cluster" and database != "0"):
        raise ValueError(f"unexpected path {path!r}")
    return service, database


def _node(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.port == 0:
        raise ValueError(f"expected HOST[:PORT], got {text!r}")
    return parts.hostname, parts.port or default_port
