"""The files of ``deploy/`` are taken by the programs that they are for, or meet the schemas of those. On demand."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from support.deploy.demand import on_demand, program

DEPLOY = Path(__file__).parents[2] / "deploy"
OVERLAYS = DEPLOY / "kubernetes" / "overlays"
MOST_EXPOSED = 2.5
"""What `systemd-analyze security` may say of a unit, from 0 to 10."""

pytestmark = on_demand


def run(*command: str, folder: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.parametrize("overlay", sorted(path.name for path in OVERLAYS.iterdir()))
def test_what_kustomize_makes_meets_the_schemas_of_kubernetes(overlay: str, tmp_path: Path) -> None:
    rendered = run(program("kubectl"), "kustomize", str(OVERLAYS / overlay))
    (tmp_path / "all.yaml").write_text(rendered)
    told = run(program("kubernetes-validate"), "--strict", str(tmp_path / "all.yaml"))
    assert told.count(" passed for resource ") == rendered.count("\nkind: ") + rendered.startswith("kind: ")
    # No selector of ours means a pod of somebody else's.
    selected = re.findall(r"(?:matchLabels|selector):\n((?: +app\.kubernetes\.io/\S+: \S+\n)+)", rendered)
    assert len(selected) > 10
    assert [labels for labels in selected if "name: pensieve" not in labels] == []


def test_the_monitors_can_be_added(tmp_path: Path) -> None:
    run("cp", "-r", str(DEPLOY / "kubernetes"), str(tmp_path))
    path = tmp_path / "kubernetes/overlays/gpu/kustomization.yaml"
    text, changed = re.subn(r"# (- ../../components/monitoring)", r"\1", path.read_text())
    assert changed == 1
    path.write_text(text)
    rendered = run(program("kubectl"), "kustomize", str(path.parent))
    assert {"kind: ServiceMonitor", "kind: PodMonitor"} <= set(rendered.splitlines())


@pytest.mark.parametrize("more", [[], ["compose.gpu.yaml"], ["compose.public.yaml"]], ids=str)
def test_compose_takes_its_files(more: list[str], tmp_path: Path) -> None:
    for name in ("keys", "certificate"):
        (tmp_path / name).touch()
    files = [part for name in ["compose.yaml", *more] for part in ("-f", str(DEPLOY / name))]
    told = run(
        *(program("docker-compose"), *files, "config"),
        PENSIEVE_KEYS_FILE=str(tmp_path / "keys"),
        PENSIEVE_CERTIFICATE_FILE=str(tmp_path / "certificate"),
    )
    sources = re.findall(r"type: bind\n +source: (\S+)", told)
    assert len(sources) >= 4
    assert [source for source in sources if not Path(source).exists()] == []
    # Loopback, unless it was asked for.
    published = re.findall(r"host_ip: (\S+)\n", told)
    assert len(published) == told.count("published:") - (2 if more == ["compose.public.yaml"] else 0)
    assert set(published) == {"127.0.0.1"}


def test_envoy_takes_its_configuration() -> None:
    assert "OK" in run(program("envoy"), "--mode", "validate", "-c", str(DEPLOY / "envoy.yaml"))


@pytest.mark.parametrize("unit", sorted(DEPLOY.glob("*.service")), ids=lambda path: path.name)
def test_systemd_takes_its_units(unit: Path, tmp_path: Path) -> None:
    """With another program in place of the one that is not installed here."""
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/pensieve/bin/pensieve", "/bin/true"))
    assert run(program("systemd-analyze"), "verify", str(copy)) == ""
    told = run(program("systemd-analyze"), "security", "--offline=true", "--no-pager", str(copy))
    (exposed,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", told)
    assert float(exposed) <= MOST_EXPOSED
