"""Every program in ``examples/`` does what its page says: most of them against one server with the demo model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import runpy
import shutil
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from pensieve.spawn import ServerProcess
from support.faults.fault_server import FaultServer
from support.http.tool_rig import ROME, speaker, spoken
from support.page.browser_tab import browser_tab
from support.service.scripted_link import ScriptedGeneration
from support.service.server_process import launched
from support.service.service_rig import serving
from support.sources import ROOT, files
from support.store.redis_server import free_port

EXAMPLES = ROOT / "examples"
ELSEWHERE = {
    "openai_responses.py": "README.md",
    "openai_responses.js": "tests/support/service/node_client.py",
    "langchain_chat.py": "tests/interop/test_frameworks.py",
    "anthropic_tools.py": "tests/http/test_messages.py",
}
"""Examples that other tests run, because they have what these need."""
MOST_LINES = 60

SAYS = {
    "streaming.py": ["eos, 10 tokens; of 54 tokens of context 45 were kept, 9 are new", "history: 'Your name is Ada."],
    "async_many.py": ["Ada      Your name is Ada.", "Ken      Your name is Ken."],
    "edit.py": ["5 assistant: Your name is Ada.", "9 assistant: Your name is Grace.", "refused: REVISION_MISMATCH"],
    "fork.py": ["You live in Oslo.", "You live in Lisbon.", "I don't know your favourite colour yet."],
    "candidates.py": ["* 0: ", "in history: True", "beams:  'Your name is Ada.'", "best:   'Your name is Ada.'"],
    "tools.py": ["has no place for tools"],
    "formats.py": ["{'name': '", "\n1"],
    "warm_hints.py": ["taken: (2.0, 5.0) ignored: ()", "Your dog's name is Rex.", "= 45 cached + 0 swapped in + 0"],
}  # fmt: skip

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    options = ("--model", "demo", "--store", "memory:", "--threads", "1", "--http", "127.0.0.1:0")
    with ServerProcess(*options) as running:
        yield running


def run(name: str, *arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What an example prints, run as a program in this process: it costs no start of Python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [name, *arguments])
        with contextlib.suppress(SystemExit):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("name", SAYS)
def test_with_the_demo_model(name: str, server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(name, server.target, capsys=capsys)
    for expected in SAYS[name]:
        assert expected in printed, printed


def test_a_model_with_tools(capsys: pytest.CaptureFixture[str]) -> None:
    left = [ROME, "Warm and clear."]

    def script(_: ScriptedGeneration) -> Sequence[int]:
        return spoken(left.pop(0), "qwen")

    async def play() -> str:
        speaks = speaker("qwen")
        options: dict[str, Any] = {"speaks": speaks, "vocab_size": speaks.vocab_size, "context_limit": 2048}
        async with serving(answer="", **options) as rig:
            rig.link.answer = script
            return await asyncio.to_thread(run, "tools.py", rig.target, capsys=capsys)

    assert asyncio.run(play()) == 'weather({"town": "Rome"})\nWarm and clear.\n'


def test_a_server_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an engine of the tests behind its servers: they start sooner, and answer slowly enough to be met."""
    started: list[FaultServer] = []

    class Server:
        """Stands in for ``pensieve.spawn.ServerProcess``."""

        def __init__(self, *options: str, listen: str = "") -> None:
            folder = tmp_path / str(len(started))
            folder.mkdir()
            listen = listen or f"127.0.0.1:{free_port()}"
            store = options[options.index("--store") + 1]
            server = FaultServer(folder, store, pace_s=0.01, listen=listen, device_cache="1024tokens")
            started.append(server)
            server.start()
            self.target, self.kill, self.stop = server.grpc, server.kill, server.close

    monkeypatch.setattr("pensieve.spawn.ServerProcess", Server)
    try:
        printed = run("retry_and_resume.py", capsys=capsys)
    finally:
        for server in started:
            server.close()
    assert len(started) == 2 and "[killed]" in printed
    assert "in history once: 4 items" in printed
    assert "the same turn: True - items: 4" in printed and "attached: True" in printed


def test_users_with_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with launched(tmp_path, api_keys=str(EXAMPLES / "users.toml")) as server:
        printed = run("users.py", server.grpc, capsys=capsys)
        again = run("users.py", server.grpc, capsys=capsys)
    assert "ada: 2 items, the first says 'My name is Ada.'" in printed
    assert "grace: 2 items, the first says 'My name is Grace.'" in printed
    assert "grace asks for ada's: SESSION_NOT_FOUND" in printed
    assert "reader sees: My name is Ada." in printed and "reader writes: SCOPE_MISSING" in printed
    assert "a wrong key: CREDENTIAL_INVALID" in printed
    assert "ada: 4 items, the first says 'My name is Ada.'" in again


def _ask(url: str, body: str | None = None) -> str:
    data = None if body is None else body.encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as response:
        text: str = response.read().decode()
    return text


@contextlib.asynccontextmanager
async def _web(app: Any) -> AsyncIterator[str]:
    """The address of this application, served in this loop."""
    port = free_port()
    web = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", ws="none"))
    serving = asyncio.create_task(web.serve())
    try:
        while not web.started:
            await asyncio.sleep(0.01)
            assert not serving.done()
        yield f"http://127.0.0.1:{port}"
    finally:
        web.should_exit = True
        await serving


async def test_the_web_backend(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["web_backend.py", server.target])
    app = runpy.run_path(str(EXAMPLES / "web_backend.py"))["app"]
    async with _web(app) as address:
        chat = f"{address}/chats/" + json.loads(await asyncio.to_thread(_ask, f"{address}/chats", ""))["chat"]
        for _ in range(2):  # the page was loaded anew, and asks for the same turn again
            said = await asyncio.to_thread(_ask, f"{chat}/turns/1", "My name is Ada.")
            parts = re.findall(r"event: (\w+)\ndata: (.*)\n\n", said)
            text = "".join(json.loads(data) for kind, data in parts if kind == "piece")
            assert text == "Got it, your name is Ada." and parts[-1] == ("done", '"eos"')
        items = json.loads(await asyncio.to_thread(_ask, chat))
        assert [one["role"] for one in items] == ["user", "assistant"]
        lost = await asyncio.to_thread(_ask, f"{address}/chats/nowhere/turns/1", "x")
        assert lost == 'event: failed\ndata: "SESSION_NOT_FOUND"\n\n'


@pytest.mark.chromium
async def test_the_web_page(server: ServerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """web_page.html: a talk with a server that is away at first, and a message whose page was closed before its answer
    came.
    """
    monkeypatch.setattr("sys.argv", ["web_backend.py", server.target])
    app = runpy.run_path(str(EXAMPLES / "web_backend.py"))["app"]
    async with _web(app) as address, browser_tab(tmp_path) as tab:
        await tab.open("about:blank")
        await tab.call("Page.navigate", url=f"{address}/")
        await tab.until("location.hash && !(document.querySelector('form') ?? {inert: true}).inert")
        for said, wanted in (("My name is Ada.", "Got it, your name is Ada."), ("<b>", "")):
            await tab.value(f"input = document.querySelector('input'), input.value = {json.dumps(said)}")
            await tab.value("real = fetch, fetch = (...all) => (fetch = real, Promise.reject(Error('away')))")
            await tab.value("document.querySelector('form').requestSubmit()")
            await tab.until(
                f"localStorage.length === 0 && document.body.innerText.includes({json.dumps(wanted)})"
            )
        assert await tab.value("document.querySelectorAll('p').length") == 4
        chat = await tab.value("location.href")
        for _ in range(2):  # the second time its turn is in the history already
            await tab.value(
                """localStorage[location.hash.slice(1)] = '{"name": "t3", "text": "what is my name?"}'"""
            )
            for url in ("about:blank", chat):
                await tab.call("Page.navigate", url=url)
            await tab.until("localStorage.length === 0 && document.querySelectorAll('p').length === 6")
        assert await tab.value("[...document.querySelectorAll('p')].at(-1).innerText") == "Your name is Ada."
        assert await tab.value("document.querySelector('b')") is None and tab.errors == []


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_by_hand(server: ServerProcess) -> None:
    environment = {**os.environ, "OPENAI_BASE_URL": f"http://{server.http}/v1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        ["sh", str(EXAMPLES / "curl.sh")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "Your name is Ada." in done.stdout
    environment["OPENAI_BASE_URL"] += "/elsewhere"
    wrong = subprocess.run(
        ["sh", str(EXAMPLES / "curl.sh")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert wrong.returncode == 1 and wrong.stdout.count("no such path") == 1, "the first answer is the last"


def test_the_page_names_all_of_them_and_all_are_run() -> None:
    here = {path.name for path in files() if path.parts[0] == "examples"}
    page = (EXAMPLES / "README.md").read_text()
    assert {target for target in re.findall(r"\]\((\w+\.\w+)\)", page)} == here - {"README.md"}
    for name in here - {"README.md"}:
        assert len((EXAMPLES / name).read_text().splitlines()) <= MOST_LINES, name
        where = ROOT / ELSEWHERE[name] if name in ELSEWHERE else Path(__file__)
        assert name in where.read_text(), f"no test runs {name}"
