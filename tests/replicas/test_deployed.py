"""The files in ``deploy/`` that route to several servers say the same, and what SDK and server say."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pensieve.client._transport import ROUTE_KEY
from support.replicas.haproxy import CONFIGURATION, haproxy, require_haproxy

ENVOY = Path(__file__).parents[2] / "deploy" / "envoy.yaml"


@pytest.mark.haproxy
def test_haproxy_takes_its_configuration_as_it_is() -> None:
    command = [require_haproxy(), "-c", "-f", str(CONFIGURATION)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0 and "WARNING" not in checked.stderr, checked.stderr


@pytest.mark.fault(36)
@pytest.mark.haproxy
async def test_an_address_holds_so_many_connections_and_no_more(tmp_path: Path) -> None:
    """One that wants more is refused by the proxy, whatever is behind it; another is answered."""
    greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + bytes(5)
    open_now: list[asyncio.StreamWriter] = []

    async def greeted(address: str) -> bool:
        """Whether the proxy answers a further connection from there."""
        host, _, port = proxy.address.rpartition(":")
        try:
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=(address, 0))
            open_now.append(writer)
            writer.write(greeting)
            return bool(await asyncio.wait_for(reader.read(9), 30))
        except ConnectionError:
            return False

    with haproxy(tmp_path, [("127.0.0.1:1", "127.0.0.1:2")]) as proxy:
        await asyncio.to_thread(proxy.wait_for, a="")
        answers = [await greeted("127.0.0.2") for _ in range(260)]
        assert answers == [True] * 256 + [False] * 4
        assert await greeted("127.0.0.3")
        for writer in open_now:
            writer.close()


def _manager(envoy: dict[str, Any]) -> dict[str, Any]:
    (listener,) = envoy["static_resources"]["listeners"]
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def test_both_route_alike() -> None:
    haproxy, envoy = CONFIGURATION.read_text(), yaml.load(ENVOY.read_text(), yaml.CSafeLoader)
    (route,) = _manager(envoy)["route_config"]["virtual_hosts"][0]["routes"]
    (cluster,) = envoy["static_resources"]["clusters"]
    assert route["route"]["cluster"] == cluster["name"] == cluster["load_assignment"]["cluster_name"]
    assert route["route"]["hash_policy"] == [{"header": {"header_name": ROUTE_KEY}}]
    assert cluster["lb_policy"] == "RING_HASH" and f"req.hdr({ROUTE_KEY})" in haproxy
    endpoints = [one["endpoint"] for one in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]]
    behind = [
        (one["address"]["socket_address"]["port_value"], one["health_check_config"]["port_value"])
        for one in endpoints
    ]
    servers = re.findall(r"^    server \w+ \S+:(\d+) port (\d+)$", haproxy, flags=re.MULTILINE)
    assert behind == [(int(grpc), int(admin)) for grpc, admin in servers]
    assert cluster["health_checks"][0]["http_health_check"]["path"] == "/readyz" and "uri /readyz" in haproxy
