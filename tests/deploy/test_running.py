"""What ``deploy/`` describes, running: two servers on one Redis, HAProxy, a gateway and Prometheus. On demand.

Each runs from the file that is deployed, and its ports are those of the file; only addresses differ. A name is looked
up at a name server, as in Kubernetes; it says that pensieve-0 and pensieve-1 have an address of loopback each.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from pensieve.client import Client, Session
from pensieve.debug import child_environment
from pensieve.options.serve import resolve
from pensieve.spawn import read_metric
from support.deploy.demand import on_demand, program
from support.deploy.names import name_server
from support.service.certificates import authority, signed
from support.service.server_process import ServerProcess, launched
from support.store.redis_server import free_port, redis_server

DEPLOY = Path(__file__).parents[2] / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
HOMES = {"pensieve-0": "127.0.0.2", "pensieve-1": "127.0.0.3"}
DOMAIN = ".pensieve-servers.somewhere.svc.cluster.local."
PROXY, GATEWAY, ENVOY = "127.0.0.4", "127.0.0.5", "127.0.0.6"
LIMIT_S = 60.0
SESSIONS = 6
TURNS = 3

pytestmark = on_demand


@dataclass
class Deployed:
    """What runs, by the addresses that callers use."""

    servers: dict[str, ServerProcess]
    authority: Path = Path()
    """Who has signed the proxy's certificate."""

    def turns(self) -> dict[str, float]:
        """How many each server has answered."""
        return {name: read_metric(one.admin, "pensieve_turns_total") for name, one in self.servers.items()}


def get(url: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and text; (0, why) while nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def until(what: Callable[[], bool], otherwise: Callable[[], object]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < limit, otherwise()
        time.sleep(0.1)


@contextmanager
def process(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """One that runs until the end."""
    with log.open("wb") as output:
        started = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def options(address: str, store: str) -> dict[str, Any]:
    """Those of the deployed file, at an address of its own."""
    resolved = resolve({"store": store}, BASE / "server.toml").options
    values: dict[str, Any] = msgspec.to_builtins(resolved, enc_hook=str)
    for name in ("listen", "admin"):
        values[name] = values[name].replace("0.0.0.0", address)
    del values["model"]
    return values


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployed]:
    with ExitStack() as stack:
        store = stack.enter_context(redis_server()).url
        servers = {
            name: stack.enter_context(launched(tmp_path / name, **options(address, store)))
            for name, address in HOMES.items()
        }
        known = {f"{name}{DOMAIN}".rstrip("."): address for name, address in HOMES.items()}
        names = stack.enter_context(name_server(known))
        ca = authority(tmp_path, "authority")
        certificate, _ = signed(tmp_path, ca, "tls", "/CN=pensieve", f"IP:{PROXY}")
        environment = {"LISTEN": PROXY, "SERVERS_DOMAIN": DOMAIN, "NAMESERVER": names}
        environment["PROXY_CERTIFICATE"] = str(certificate)
        command = [program("haproxy"), "-db", "-f", str(BASE / "haproxy.cfg")]
        stack.enter_context(process(command, tmp_path / "haproxy", environment))
        up = 'haproxy_backend_active_servers{proxy="servers"} 2'
        until(lambda: up in get(f"http://{PROXY}:8404/metrics")[1], (tmp_path / "haproxy").read_text)
        yield Deployed(servers, ca)


def talk(client: Client, deployed: Deployed) -> tuple[Session, str]:
    """Sessions of some turns, each answered by one server; the last session, and the name of its server."""
    homes = []
    for _ in range(SESSIONS):
        before = deployed.turns()
        chat = client.create_session()
        for _ in range(TURNS):
            chat.send("hello", max_output_tokens=4)
        took = {name: count - before[name] for name, count in deployed.turns().items()}
        assert sorted(took.values()) == [0, TURNS], took
        homes += [name for name, count in took.items() if count]
    assert set(homes) == set(deployed.servers)
    return chat, homes[-1]


@pytest.mark.redis
@pytest.mark.haproxy
def test_each_session_stays_with_one_server(deployed: Deployed) -> None:
    assert get(f"http://{PROXY}:8404/healthz")[0] == get(f"http://{PROXY}:8404/readyz")[0] == 200
    with Client(f"{PROXY}:50050") as client:
        chat, gone = talk(client, deployed)
        # Its server drains and ends; the session goes on at the other one.
        deployed.servers[gone].terminate()
        assert deployed.servers[gone].finish()[0] == 0
        assert chat.send("and now?", max_output_tokens=4).usage.output_tokens == 4
    roots = grpc.ssl_channel_credentials(deployed.authority.read_bytes())
    with Client(f"{PROXY}:50443", credentials=roots) as client:
        assert client.session(chat.name).send("over TLS", max_output_tokens=4).usage.output_tokens == 4
        assert get(f"http://{PROXY}:8404/readyz")[0] == 200


@pytest.mark.redis
@pytest.mark.haproxy
def test_a_gateway_stands_before_the_proxy(deployed: Deployed, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", "from pensieve.cli.main import main; main()", "gateway"]
    command += ["--target", f"{PROXY}:50050", "--listen", f"{GATEWAY}:8080"]
    with process(command, tmp_path / "gateway", child_environment()):
        until(lambda: get(f"http://{GATEWAY}:8080/ready")[0] == 200, (tmp_path / "gateway").read_text)
        said: list[dict[str, str]] = []
        before = deployed.turns()
        for text in ("one", "two", "three"):
            said.append({"role": "user", "content": text})
            status, answer = get(
                f"http://{GATEWAY}:8080/v1/chat/completions",
                {"model": "model", "messages": said, "max_completion_tokens": 4},
            )
            assert status == 200, answer
            said.append(json.loads(answer)["choices"][0]["message"])
        took = {name: count - before[name] for name, count in deployed.turns().items()}
        assert sorted(took.values()) == [0, 3], took


@pytest.mark.redis
def test_envoy_keeps_sessions_at_their_server_as_well(tmp_path: Path) -> None:
    with ExitStack() as stack:
        store = stack.enter_context(redis_server()).url
        ports = {"a": ("50051", "9090"), "b": ("50052", "9091")}
        servers = {
            name: stack.enter_context(
                launched(
                    tmp_path / name,
                    **options(ENVOY, store) | {"listen": f"{ENVOY}:{data}", "admin": f"{ENVOY}:{admin}"},
                )
            )
            for name, (data, admin) in ports.items()
        }
        (tmp_path / "envoy.yaml").write_text((DEPLOY / "envoy.yaml").read_text().replace("127.0.0.1", ENVOY))
        command = [
            program("envoy"),
            "-c",
            str(tmp_path / "envoy.yaml"),
            "--concurrency",
            "1",
            "--disable-hot-restart",
        ]
        stack.enter_context(process(command, tmp_path / "envoy.log", {}))
        healthy = "cluster.servers.membership_healthy: 2"
        until(lambda: healthy in get(f"http://{ENVOY}:9901/stats")[1], (tmp_path / "envoy.log").read_text)
        with Client(f"{ENVOY}:50050") as client:
            talk(client, Deployed(servers))


@pytest.mark.redis
@pytest.mark.haproxy
def test_prometheus_sees_both_servers(deployed: Deployed, tmp_path: Path) -> None:
    folder = tmp_path / "prometheus"
    shutil.copytree(DEPLOY / "prometheus", folder)
    (folder / "prometheus.yml").write_text((folder / "prometheus.yml").read_text().replace(" 15s", " 1s"))
    targets = (folder / "targets/servers.yml").read_text()
    for name, address in HOMES.items():
        assert f"{name}:9090" in targets
        targets = targets.replace(name, address)
    (folder / "targets/servers.yml").write_text(targets)
    address = f"127.0.0.1:{free_port()}"
    command = [program("prometheus"), f"--config.file={folder}/prometheus.yml"]
    command += [f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address={address}"]
    with process(command, tmp_path / "prometheus.log", {}):

        def up() -> dict[str, str]:
            status, answer = get(f"http://{address}/api/v1/query?query=up%7Bjob%3D%22pensieve%22%7D")
            found = json.loads(answer)["data"]["result"] if status == 200 else []
            return {one["metric"]["instance"]: one["value"][1] for one in found}

        both = {f"{home}:9090": "1" for home in HOMES.values()}
        until(lambda: up() == both, lambda: f"{up()}\n{(tmp_path / 'prometheus.log').read_text()}")
