"""``pensieve memory`` against whole servers: answers, refusals in one line, exit codes and keys."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pensieve.cli import main as cli
from support.engine.fake_engine import Script
from support.page.feeds import FeedStub
from support.service.server_process import ServerProcess, launched

MIB = 1 << 20
SECRET = "secret"
KEYS = """
[[key]]
id = "u"
sha256 = "{digest}"
tenant = "acme"
[[key]]
id = "ops"
sha256 = "{digest}"
tenant = "ops"
scopes = ["admin"]
"""

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def memory(capsys: pytest.CaptureFixture[str]) -> Command:
    """Exit code, stdout, stderr of the command, run in here."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["memory", *arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a range and with keys."""
    folder = tmp_path_factory.mktemp("elastic")
    keys = folder / "keys.toml"
    keys.write_text(KEYS.format(digest=hashlib.sha256(SECRET.encode()).hexdigest()))
    with launched(folder / "server", api_keys=str(keys), device_cache="4MiB..16MiB") as running:
        yield running


@pytest.fixture
def as_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSIEVE_API_KEY", f"ck_ops_{SECRET}")


def sizes(out: str) -> tuple[int, ...]:
    document = json.loads(out)
    assert list(document) == ["device"] and list(document["device"]) == ["held", "wanted", "floor", "ceiling"]
    assert out.count("\n") == 1
    return tuple(document["device"].values())


def refusal(answer: tuple[int, str, str], code: int) -> str:
    assert answer[:2] == (code, "") and answer[2].count("\n") == 1, answer
    return answer[2]


def read(server: ServerProcess, path: str) -> str:
    request = urllib.request.Request(
        f"http://{server.admin}{path}", headers={"Authorization": f"Bearer ck_ops_{SECRET}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


@pytest.mark.usefixtures("as_ops")
def test_the_size_is_shown_set_and_seen_everywhere(
    memory: Command, server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ("--admin", server.admin)
    assert memory("16MiB", *at)[0] == 0
    assert sizes(memory(*at, "--json")[1])[1:] == (16 * MIB, 4 * MIB, 16 * MIB)
    held, *others = sizes(memory("6MiB", *at, "--json")[1])
    assert held in (16 * MIB, 6 * MIB) and others == [6 * MIB, 4 * MIB, 16 * MIB]
    code, out, err = memory(*at)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "held      6.00 MiB",
        "wanted    6.00 MiB",
        "floor     4.00 MiB",
        "ceiling  16.00 MiB",
    ]
    for _ in range(200):  # the engine's figures come with its next report
        gauges = dict(
            re.findall(r"^pensieve_device_cache_(\w+)_bytes (\S+)$", read(server, "/metrics"), re.MULTILINE)
        )
        if float(gauges["wanted"]) == 6 * MIB == float(gauges["held"]):
            break
        time.sleep(0.05)
    assert {name: float(value) for name, value in gauges.items()} == {
        "held": 6 * MIB,
        "wanted": 6 * MIB,
        "floor": 4 * MIB,
        "ceiling": 16 * MIB,
    }
    told = json.loads(read(server, "/state.json"))["device_memory"]
    assert told == {"held": 6 * MIB, "wanted": 6 * MIB, "floor": 4 * MIB, "ceiling": 16 * MIB}
    with pytest.raises(SystemExit):
        cli.main(["top", *at])
    assert "wanted 6.00 MiB" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("as_ops")
@pytest.mark.parametrize(
    ("size", "said"),
    [
        ("3MiB", "SIZE 3MiB: must be from 4MiB to 16MiB"),
        ("16777217B", "must be from 4MiB to 16MiB"),
        ("1GiB", "must be from 4MiB to 16MiB"),
        ("0", "must be from 4MiB to 16MiB"),
        ("lots", "40GiB"),
        ("6MB", "40GiB"),
        ("auto", "40GiB"),
        ("4MiB..6MiB", "40GiB"),
        ("", "40GiB"),
        ("6\nMiB\x1b[2J", "40GiB"),
        ("-5MiB", "No such option"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_other_sizes_are_refused(
    memory: Command, server: ServerProcess, size: str, said: str, more: tuple[str, ...]
) -> None:
    at = ("--admin", server.admin)
    before = sizes(memory(*at, "--json")[1])[1]
    err = refusal(memory(size, *at, *more), 2)
    assert said in err and "\x1b" not in err
    assert sizes(memory(*at, "--json")[1])[1] == before


def test_only_keys_with_the_scope_admin(memory: Command, server: ServerProcess) -> None:
    at = ("--admin", server.admin)
    for size in ([], ["8MiB"]):
        assert "requires an API key with the scope admin" in refusal(memory(*size, *at), 1)
        user = refusal(memory(*size, *at, "--api-key", f"ck_u_{SECRET}"), 1)
        assert "SCOPE_MISSING" in user
        wrong = refusal(memory(*size, *at, "--api-key", "ck_ops_wrong"), 1)
        assert "CREDENTIAL_INVALID" in wrong and "wrong" not in wrong
        assert memory(*size, *at, "--api-key", f"ck_ops_{SECRET}")[0] == 0
    assert "printable ASCII" in refusal(memory(*at, "--api-key", "kéy"), 2)


@pytest.mark.parametrize(
    ("device_cache", "why"),
    [
        ("16MiB", "the device tier has one size"),
        ("4MiB..16MiB", "this driver cannot map memory"),
    ],
)
def test_a_tier_of_one_size_says_why(memory: Command, tmp_path: Path, device_cache: str, why: str) -> None:
    script = Script(elastic_refusal="this driver cannot map memory" if ".." in device_cache else "")
    with launched(tmp_path, script, device_cache=device_cache) as fixed:
        at = ("--admin", fixed.admin)
        for more in ((), ("--json",)):
            assert f"SIZE 6MiB: {why}" in refusal(memory("6MiB", *at, *more), 2)
        held, wanted, floor, ceiling = sizes(memory(*at, "--json")[1])
        assert held == wanted == floor == ceiling > 0
        assert ("does not grow or shrink: this driver" in fixed.stderr) == (".." in device_cache)


def test_other_addresses(memory: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = f"127.0.0.1:{server.getsockname()[1]}"
    assert "cannot connect" in refusal(memory("--admin", gone, "--json"), 1)
    with FeedStub() as stub:
        assert "is not an admin port of pensieve" in refusal(memory("--admin", stub.address), 1)
    for wrong in ("nowhere", "127.0.0.1:0", "127.0.0.1:x"):
        assert "--admin" in refusal(memory("--admin", wrong), 2)


def test_it_needs_no_torch() -> None:
    program = (
        "import sys; import pensieve.cli.admin; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'redis')))"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=60)
