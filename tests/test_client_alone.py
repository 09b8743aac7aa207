"""A client is a client: without an extra there is the SDK, chat, replay, simulate, and no torch.

They run here in an environment that has what ``pip install pensieve`` brings and nothing else: links to just these
distributions, as they lie in the environment of the tests.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from pensieve.extras import EXTRAS, missing_extra, require
from support.service.fake_server import FakeServerThread
from support.sources import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MOST_BYTES = 150_000_000
PARTS = (
    "pensieve.client",
    "pensieve.cli.chat",
    "pensieve.cli.main",
    "pensieve.cli.gateway",
    "pensieve.cli.admin",
    "pensieve.cli.sessions",
    "pensieve.cli.top.command",
    "pensieve.replay.command",
    "pensieve.replay.targets.grpc_target",
    "pensieve.simulate.command",
)


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_what_they_need(names: set[str]) -> dict[str, Distribution]:
    """Distributions by their names, and all that they need here without extras of their own."""
    found: dict[str, Distribution] = {}
    todo = [normal(name) for name in names]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        needed = [line for line in found[name].requires or [] if "extra ==" not in line]
        # A marker names another Python or another system where its distribution is not here.
        todo += [
            one for one in (normal(name_of(line)) for line in needed if ";" not in line or installed(line))
        ]
    return found


def installed(requirement: str) -> bool:
    try:
        importlib.metadata.distribution(name_of(requirement))
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def tops(distribution: Distribution) -> set[str]:
    """What it puts beside others: packages, modules, its metadata. Programs lie elsewhere."""
    return {
        str(file) if file.parts[0] == "google" else file.parts[0]
        for file in distribution.files or []
        if file.parts[0] != ".." and "__pycache__" not in file.parts
    }


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH."""
    site = tmp_path_factory.mktemp("site")
    (site / "pensieve").symlink_to(ROOT / "pensieve")
    for distribution in with_what_they_need({name_of(line) for line in PROJECT["dependencies"]}).values():
        for top in tops(distribution):
            link = site / top  # `google` belongs to several: file by file
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to(str(distribution.locate_file(top)))
    return site


def run(site: Path, *arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
    """Python without its site-packages (-S) and without the working folder (-P)."""
    return subprocess.run(
        [sys.executable, "-S", "-P", *arguments], env=os.environ | {"PYTHONPATH": str(site), "COLUMNS": "200"},
        input=said, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_a_client_is_small(environment: Path) -> None:
    size = 0
    for folder, _, names in os.walk(environment, followlinks=True):
        if "__pycache__" not in folder and f"{environment}/pensieve" not in folder:
            size += sum((Path(folder) / name).stat().st_size for name in names)
    assert size < MOST_BYTES
    assert not {"torch", "transformers", "triton", "redis", "starlette"} & {
        path.name for path in environment.iterdir()
    }


def test_it_imports_what_a_client_has(environment: Path) -> None:
    script = f"import importlib, sys\nfor name in {PARTS!r}: importlib.import_module(name)\n"
    script += "from pensieve import Client, AsyncClient\n"
    result = run(environment, "-c", script)
    assert result.returncode == 0, result.stderr


def test_a_conversation_without_extras(environment: Path) -> None:
    with FakeServerThread() as server:
        chat = run(environment, "-m", "pensieve", "chat", "--target", server.target, said="hello\n/quit\n")
        assert chat.returncode == 0 and chat.stdout.strip(), chat.stderr
        sdk = (
            f"from pensieve import Client\nprint(Client({server.target!r}).create_session().send('hi').text)"
        )
        told = run(environment, "-c", sdk)
        assert told.returncode == 0 and told.stdout.strip(), told.stderr


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("serve",), "server"),
        (("chat",), "server"),
        (("demo",), "server"),
        (("profile",), "server"),
        (("store", "check", "--store", "redis://127.0.0.1:1/0"), "server"),
        (("gateway", "--target", "127.0.0.1:1"), "http"),
        (("replay", "sharegpt", "--target", "http://127.0.0.1:1"), "replay"),
        (("replay", "sharegpt", "--target", "pensieve://127.0.0.1:1", "--html", "page.html"), "plots"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_what_needs_more_says_how_to_get_it(
    environment: Path, arguments: tuple[str, ...], extra: str
) -> None:
    result = run(environment, "-m", "pensieve", *arguments)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert result.stderr.startswith("pensieve"), result.stderr
    assert f"pip install 'pensieve[{extra}]'" in result.stderr and result.stderr.count("\n") == 1, (
        result.stderr
    )


def test_the_table_of_extras_is_that_of_the_project() -> None:
    declared = {
        extra: {normal(name_of(line)) for line in lines}
        for extra, lines in PROJECT["optional-dependencies"].items()
    }
    owners = importlib.metadata.packages_distributions()
    for extra, modules in EXTRAS.items():
        for module in modules:
            provided = {normal(name) for name in owners.get(module, [])}
            assert provided & declared[extra], f"{module} is not in the extra {extra}"
    base = {normal(name_of(line)) for line in PROJECT["dependencies"]}
    for extra in ("server", "http", "plots", "replay"):
        told = {
            normal(one) for module in (*EXTRAS[extra], *EXTRAS["server"]) for one in owners.get(module, [])
        }
        assert declared[extra] - told - base - {"pensieve"} == set(), (
            f"extra {extra}: nobody would be told of these"
        )


def test_only_what_is_missing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    require("server")
    assert missing_extra(ImportError("cannot import name 'x' from 'torch'", name="torch")) is None
    assert missing_extra(ModuleNotFoundError("No module named 'pensieve.x'", name="pensieve.x")) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="torch") as caught:
        require("server")
    assert missing_extra(caught.value) == "torch is not installed: pip install 'pensieve[server]'"
