"""The files of ``deploy/`` fit together: with each other, with the options of the server and with what it needs."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from pensieve.cli.main import cli
from support.replicas.haproxy import CONFIGURATION, require_haproxy

DEPLOY = Path(__file__).parents[2] / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
BY_NAME = BASE / "haproxy.cfg"
UNITS = sorted(DEPLOY.glob("*.service"))
OPTIONS = tomllib.loads((BASE / "server.toml").read_text())
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.load((DEPLOY / "compose.yaml").read_text(), yaml.CSafeLoader)["services"]
STATE = "/var/lib/pensieve"


def seconds(text: str) -> int:
    found = re.fullmatch(r"(\d+)s?", text)
    assert found is not None, text
    return int(found[1])


def manifests() -> list[dict[str, Any]]:
    return [
        one
        for path in sorted((DEPLOY / "kubernetes").rglob("*.yaml"))
        for one in yaml.load_all(path.read_text(), yaml.CSafeLoader)
        if one["kind"] not in ("Kustomization", "Component")
    ]


def workloads() -> Iterator[tuple[str, dict[str, Any]]]:
    """Those that are complete; the overlays' patches are not."""
    for one in manifests():
        if one["kind"] in ("StatefulSet", "Deployment") and "replicas" in one["spec"]:
            yield one["metadata"]["name"], one


def instructions(word: str) -> list[str]:
    """What stands behind an instruction of the Dockerfile, each time that it is there."""
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    return re.findall(rf"^{word} (.*)$", joined, flags=re.MULTILINE)


def routing(path: Path) -> list[str]:
    """What HAProxy does with calls, without comments, addresses and names."""
    text = path.read_text()
    sections = re.findall(
        r"^(?:defaults|backend)\b.*\n(?:[ ]{4}.*\n|\n(?=[ ]{4}))*", text, flags=re.MULTILINE
    )
    lines = [line.strip() for section in sections for line in section.splitlines()]
    rules = [line for line in lines if line and not line.startswith(("#", "server "))]
    return [re.sub(r" port 9090 resolvers .*", "", line) for line in rules]


def test_both_configurations_of_haproxy_route_alike() -> None:
    assert routing(BY_NAME) == routing(CONFIGURATION)
    assert len(routing(BY_NAME)) > 20


@pytest.mark.haproxy
@pytest.mark.parametrize("domain", ["", ".pensieve-servers.somewhere.svc.cluster.local."])
def test_haproxy_takes_the_configuration_by_names(domain: str) -> None:
    command = [require_haproxy(), "-c", "-f", str(BY_NAME)]
    environment = {"SERVERS_DOMAIN": domain, "NAMESERVER": "127.0.0.1:53"}
    checked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0 and "WARNING" not in checked.stderr, checked.stderr


def test_names_and_ports_are_those_that_the_proxy_looks_for() -> None:
    named = dict(
        re.findall(r'^    server (\d) "(\S+)\$\{SERVERS_DOMAIN\}:50051"$', BY_NAME.read_text(), re.MULTILINE)
    )
    assert named == {str(number): f"pensieve-{number}" for number in range(8)}
    grpc, admin = (OPTIONS[name].rpartition(":")[2] for name in ("listen", "admin"))
    assert (grpc, admin) == ("50051", "9090")
    assert f" port {admin} " in BY_NAME.read_text()
    assert {grpc, admin} <= set(" ".join(instructions("EXPOSE")).split())
    assert {f"0.0.0.0:{grpc}", f"0.0.0.0:{admin}"} <= set(re.findall(r'"([^"]+)"', instructions("CMD")[-1]))
    servers = dict(workloads())["pensieve"]
    ports = {one["containerPort"] for one in servers["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert ports == {int(grpc), int(admin)}
    assert servers["spec"]["replicas"] <= len(named)
    assert {name for name in COMPOSE if name.startswith("pensieve-")} <= set(named.values())


def test_compose_publishes_on_loopback_only_and_asks_the_admin_port() -> None:
    ports = [str(port) for service in COMPOSE.values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)
    (command,) = instructions("ENTRYPOINT")
    assert "127.0.0.1:9090/readyz" in DOCKERFILE and "pensieve" in command
    assert any("0.0.0.0:9090" in given for given in instructions("CMD"))


def test_a_drain_ends_before_patience_does() -> None:
    needed = seconds(OPTIONS["drain-grace"]) + 10  # the last answers, the engine, the store
    assert all(seconds(COMPOSE[name]["stop_grace_period"]) >= needed for name in ("pensieve-0", "pensieve-1"))
    servers = dict(workloads())["pensieve"]["spec"]["template"]["spec"]
    assert servers["terminationGracePeriodSeconds"] >= needed
    for unit in UNITS:
        (limit,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit.read_text(), re.MULTILINE)
        assert int(limit) >= needed


@pytest.mark.parametrize(
    ("name", "workload"), list(workloads()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_pods_have_no_rights_that_they_do_not_need(name: str, workload: dict[str, Any]) -> None:
    spec = workload["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    # They would begin with PENSIEVE_, as options in the environment do.
    assert spec["enableServiceLinks"] is False
    for container in spec["containers"]:
        rights = container["securityContext"]
        assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert {"requests", "limits"} <= set(container["resources"]) and "readinessProbe" in container
    policies = [one["spec"]["podSelector"] for one in manifests() if one["kind"] == "NetworkPolicy"]
    assert workload["spec"]["selector"] in policies
    if workload["spec"]["replicas"] > 1:
        budgets = [one["spec"]["selector"] for one in manifests() if one["kind"] == "PodDisruptionBudget"]
        assert workload["spec"]["selector"] in budgets


def test_all_that_is_written_lies_in_the_volume() -> None:
    assert instructions("VOLUME") == [STATE] and instructions("WORKDIR") == [STATE]
    image = dict(word.split("=", 1) for word in shlex.split(" ".join(instructions("ENV"))))
    unit = dict(
        word.split("=", 1)
        for line in re.findall(r"^Environment=(.*)$", (DEPLOY / "pensieve.service").read_text(), re.MULTILINE)
        for word in line.split()
    )
    places = {"HOME", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"}
    for environment in (image, unit):
        assert environment["XDG_STATE_HOME"] == "/var/lib"
        assert {name for name in places if Path(environment[name]).is_relative_to(STATE)} == places
    servers = dict(workloads())["pensieve"]["spec"]["template"]["spec"]
    assert {"/tmp", STATE} <= {mount["mountPath"] for mount in servers["containers"][0]["volumeMounts"]}
    for name in ("pensieve-0", "pensieve-1"):
        assert COMPOSE[name]["read_only"] and COMPOSE[name]["tmpfs"][0].startswith("/tmp")
        assert any(volume.endswith(f":{STATE}") for volume in COMPOSE[name]["volumes"])


def test_the_image_runs_as_nobody_in_particular_and_can_compile() -> None:
    (made,) = re.findall(r"useradd --uid (\d+) --gid \1", DOCKERFILE)
    assert instructions("USER")[0] == instructions("USER")[-1] == f"{made}:{made}"
    pod = dict(workloads())["pensieve"]["spec"]["template"]["spec"]["securityContext"]
    assert {pod["runAsUser"], pod["runAsGroup"], pod["fsGroup"]} == {int(made)}
    cuda = DOCKERFILE.partition("AS cuda")[2]
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(cuda.split())
    assert instructions("FROM")[-1] == "server AS cpu"
    assert instructions("STOPSIGNAL") == ["SIGTERM"] and "tini" in instructions("ENTRYPOINT")[-1]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command line of Pensieve in these files."""
    yield "Dockerfile", re.findall(r'"([^"]+)"', instructions("CMD")[-1])
    for path in ("compose.yaml", "compose.public.yaml"):
        text = re.sub(r"!override ", "", (DEPLOY / path).read_text())
        for name, service in yaml.load(text, yaml.CSafeLoader)["services"].items():
            if name.startswith("pensieve-") or name == "gateway":
                yield f"{path} {name}", service["command"]
    for name, workload in workloads():
        for container in workload["spec"]["template"]["spec"]["containers"]:
            if container["image"] == "pensieve":
                yield name, container["args"]
    for unit in UNITS:
        (command,) = re.findall(r"^ExecStart=\S+/pensieve (.*)$", unit.read_text(), re.MULTILINE)
        yield unit.name, command.split()


@pytest.mark.parametrize(
    ("where", "command"), list(commands()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_command_lines_are_understood(where: str, command: list[str], tmp_path: Path) -> None:
    """``--print-config`` for servers; a gateway gets as far as its target, which is not there."""
    known = {
        "/etc/pensieve/server.toml": BASE / "server.toml",
        "$(STORE_URL)": "redis://redis:6379/0",
        "$(MODEL)": "demo",
        "${PENSIEVE_MODEL:-demo}": "demo",
    }
    for path in ("/etc/pensieve/keys.toml", "/run/secrets/keys", "/run/secrets/certificate"):
        known[path] = tmp_path / "a file"
    (tmp_path / "a file").touch()
    for name, value in known.items():
        command = [part.replace(name, str(value)) for part in command]
    if command[0] == "serve":
        told = CliRunner().invoke(cli, [*command, "--print-config"])
        assert told.exit_code == 0, told.output
        assert re.search(r"^listen = ", told.output, re.MULTILINE)
    else:
        assert CliRunner().invoke(cli, [*command, "--help"]).exit_code == 0
        flags = {part.partition("=")[0] for part in command if part.startswith("--")}
        assert flags <= {"--target", "--listen", "--tls-cert", "--tls-key"} and "--target" in flags
