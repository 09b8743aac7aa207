"""A server that is killed in mid-answer and started again, seen from a chat on a terminal. Real server processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pensieve.cli.output import clean
from pensieve.client import Client
from support.engine.fake_engine import Script
from support.service.server_process import launched
from support.store.redis_server import free_port
from support.terminal import chat_program

pytestmark = pytest.mark.timeout(200)


def test_the_answer_goes_on_by_itself(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    store = f"sqlite:///{tmp_path / 'history.sqlite3'}"
    # The first life says a part and then no more: it is in mid-answer whenever it is killed.
    half = Script(hang_at_step=80, only_in_life=str(tmp_path / "first"))
    with (
        launched(tmp_path / "server", half, listen=address, store=store) as server,
        chat_program(address, tmp_path, "--max-tokens", "100", "--plain") as chat,
    ):
        chat.prompt()
        chat.enter("Tell me all of it.")
        chat.expect("ABC")
        server.process.kill()
        server.process.wait()
        chat.expect("reconnecting…")
        with launched(tmp_path / "server", listen=address, store=store), Client(address) as client:
            chat.expect("tokens of context")
            chat.prompt()
            (found,) = client.sessions()
            question, answer = client.session(found.name).items()
            chat.enter("/bye")
            end = chat.finish()
    assert question.text == "Tell me all of it."
    assert clean(answer.text) in end.replace("\r\n", "\n")
    assert f"to continue: pensieve chat --target {address} --session {found.id}" in end
    assert not list((tmp_path / "pensieve/chat/unsent").iterdir())
