"""The deployment files start the server with options that exist, and stop it later than it drains."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from pensieve.cli.main import cli
from pensieve.options.serve import ServeOptions

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def dockerfile_command() -> list[str]:
    last = re.findall(r"^CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)[-1]
    return list(json.loads(last))


def compose() -> dict[str, dict[str, object]]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"])


def compose_command() -> list[str]:
    return [str(word) for word in compose()["pensieve"]["command"]]  # type: ignore[attr-defined]


def unit(key: str) -> str:
    found = re.search(rf"^{key}=(.*)$", (DEPLOY / "pensieve.service").read_text(), re.MULTILINE)
    assert found, key
    return found[1]


def unit_command(config: Path) -> list[str]:
    words = shlex.split(unit("ExecStart"))
    assert words[0] == "/opt/pensieve/bin/pensieve"
    return [str(config) if word == "/etc/pensieve/server.toml" else word for word in words[1:]]


@pytest.mark.parametrize("source", ["Dockerfile", "compose", "unit"])
def test_command_is_understood(source: str, tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text("")
    commands = {
        "Dockerfile": dockerfile_command(),
        "compose": compose_command(),
        "unit": unit_command(config),
    }
    result = CliRunner().invoke(cli, [*commands[source], "--print-config"])
    assert result.exit_code == 0, result.output


def test_supervisors_wait_longer_than_the_drain() -> None:
    drain = ServeOptions().drain_grace_s
    assert float(unit("TimeoutStopSec")) > drain
    assert float(str(compose()["pensieve"]["stop_grace_period"]).removesuffix("s")) > drain


def test_compose_publishes_on_loopback_only() -> None:
    ports = [str(port) for service in compose().values() for port in service.get("ports", [])]  # type: ignore[attr-defined]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_health_check_asks_the_admin_port_that_is_served() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert "127.0.0.1:9090/readyz" in text
    assert "0.0.0.0:9090" in dockerfile_command()
    assert "--admin=0.0.0.0:9090" in compose_command()
