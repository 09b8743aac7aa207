"""Personal data through the SDK, both clients, and through ``pensieve sessions``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pensieve import AsyncClient, Client, InvalidArgument, NotFound
from pensieve.cli import main as cli
from pensieve.client import ErasedSession
from pensieve.client._exports import LineJoiner, divide
from pensieve.store import Key
from support.service.service_rig import ANSWER, serving

ADA = "ada@example.com"


async def test_both_clients() -> None:
    async with serving() as rig:
        async with AsyncClient(rig.target) as client:
            chat = await client.create_session(subject=ADA, session_id="hers")
            await chat.send("hi")
            await chat.fork(session_id="fork")
            assert chat.info is not None and chat.info.subject == ADA
            of_person = [line async for line in client.export_subject(ADA)]
            of_session = [line async for line in chat.export()]
            items = await chat.items(include_tokens=True)
            assert [json.loads(line)["line"] for line in of_session] == [
                *("session", "record", "record", "session-end", "end")
            ]
            left = client.export_subject(ADA)
            assert await anext(left) and await left.aclose() is None  # type: ignore[attr-defined]

        def blocking() -> None:
            with Client(rig.target) as client:
                assert list(client.export_subject(ADA)) == of_person
                assert list(client.session("hers").export()) == of_session
                assert next(client.export_subject(ADA)) == of_person[0]
                with pytest.raises(NotFound):
                    next(client.session("sessions/nowhere").export())
                erased = list[ErasedSession]()
                done = client.erase_subject(ADA, on_session=erased.append)
                assert {one.name for one in done.sessions} == {"sessions/hers", "sessions/fork"}
                assert done.sessions == tuple(erased) and (done.replica, done.undecided) == ("r1", ())
                with pytest.raises(NotFound, match="deleted"):
                    client.import_sessions(of_person)
                first, second = client.import_sessions(of_person, new_ids=True)
                assert client.import_sessions(of_person, new_ids=True)[0].id == first.id != second.id
                (mine,) = client.import_sessions(of_session, session_id="mine")
                assert mine.id == "mine" and mine.items(include_tokens=True) == items
                with pytest.raises(InvalidArgument, match="for one session"):
                    client.import_sessions(of_person, session_id="mine")
                session = client.session("mine")
                assert session.update(subject="").subject == ""

        await asyncio.to_thread(blocking)


@pytest.mark.parametrize("cut", [1, 2, 5])
async def test_a_cut_export_imports_nothing(cut: int) -> None:
    async with serving() as rig, AsyncClient(rig.target) as client:
        for _ in range(2):
            await client.create_session(subject=ADA)
        lines = [line async for line in client.export_subject(ADA)]
        with pytest.raises(InvalidArgument, match="one whole export"):
            await client.import_sessions(lines[:-cut], new_ids=True)
        assert len(await client.sessions()) == 2


def test_lines_are_put_together_and_divided() -> None:
    joiner, text = LineJoiner(), b"one\ntwo\n\nthree\n"
    for size in (1, 2, 5, 100):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert b"".join(line for piece in pieces for line in joiner.feed(piece)) == text
    one = [b'{"line":"session","x":1}\n', b'{"line":"session-end","records":0}\n']
    end = b'{"line":"end","sessions":2}\n'
    assert divide([*one, *one, end]) == [b"".join(one)] * 2
    assert divide([b'{"line":"end","sessions":0}\n']) == []
    for wrong in (
        [],
        one,
        [*one, end],
        [*one, *one, end, end],
        [*one, *one, b'{"line":"end",\n'],
        [one[0], *one, end],
    ):
        with pytest.raises(InvalidArgument):
            divide(wrong)


def pensieve(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of the command, run in here."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


async def test_the_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    async with serving() as rig:

        async def run(*arguments: str) -> tuple[int, str, str]:
            return await asyncio.to_thread(pensieve, capsys, "sessions", *arguments, "--target", rig.target)

        async with AsyncClient(rig.target) as client:
            chat = await client.create_session(subject=ADA, session_id="hers")
            await chat.send("hi")
            await chat.fork(session_id="fork")
            damaged = await client.create_session(session_id="damaged")
        file = tmp_path / "ada.jsonl"
        assert (await run("export", "--subject", ADA, "--out", str(file)))[0] == 0
        assert file.stat().st_mode & 0o777 == 0o600 and ANSWER in file.read_text()
        code, _, err = await run("export", "hers", "--out", str(file))
        assert code == 1 and "exists" in err and list(tmp_path.iterdir()) == [file]
        assert (await run("export"))[0] == 2
        assert (await run("show", "hers"))[1].count(ADA) == 1
        code, _, err = await run("erase", "--subject", ADA)
        assert code == 2 and "--yes" in err
        code, out, err = await run("erase", "--subject", ADA, "--yes")
        assert (
            code == 0 and "erased fork: fork of hers, 0 turns, 2 items" in out and "2 sessions erased" in out
        )
        assert (await run("import", str(file), "--new-ids"))[1].count("imported ") == 2
        await rig.store.mark_damaged(Key("acme", damaged.id))
        code, out, err = await run("erase", "--subject", ADA, "--yes", "--json")
        assert code == 1 and "left: damaged" in err and len(json.loads(out)["sessions"]) == 2
        file.write_bytes(file.read_bytes()[:-5])
        code, _, err = await run("import", str(file))
        assert code == 1 and "one whole export" in err
