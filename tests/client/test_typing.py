"""A program in a folder of its own, as users have theirs: a type checker finds the package and sees every option."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio
from pensieve import AsyncClient, Client
from pensieve.client import FinishReason, Role, Turn

with Client("x", retry_for=5) as client:
    session = client.create_session(temperature=0.5, overflow="drop_oldest")
    turn: Turn = session.send("hi", max_output_tokens=3, stop=["a"], expected_revision=session.revision)
    cut: bool = turn.finish_reason == "length" or turn.finish_reason is FinishReason.LENGTH
    numbers = FinishReason(4), FinishReason("length"), turn.finish_reason == 4
    for piece in session.stream(items=[("user", "a"), (Role.TOOL, "b")], on_disconnect="finish"):
        text: str = piece.text

async def main() -> None:
    async with AsyncClient("x") as client:
        session = await client.create_session()
        async with session.stream("hi", request_id="one") as stream:
            async for piece in stream:
                text: str = piece.text
            await stream.close()
        stream.close()

asyncio.run(main())
"""
WRONG = {
    'session.send("hi", max_tokens=3)': 'Unexpected keyword argument "max_tokens" for "send" of "Session"',
    'session.send("hi", max_output_tokens="3")': 'has incompatible type "str"; expected "int"',
    'session.stream("hi", on_disconnect="stay")': "has incompatible type \"Literal['stay']\"",
    "session.update(ttl=[])": 'expected "float"',
    "session.send('hi').texts": '"Turn" has no attribute "texts"',
}


def test_mypy_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    lines = ['from pensieve import Client\n\nsession = Client("x").session("s")', *WRONG]
    (tmp_path / "wrong.py").write_text("\n".join(lines))
    command = [
        sys.executable,
        "-P",
        "-m",
        "mypy",
        "--strict",
        "--cache-dir",
        "cache",
        "program.py",
        "wrong.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    said = done.stdout + done.stderr
    assert "Cannot find implementation" not in said, (
        f"{said}: `make setup` leads type checkers to the package"
    )
    assert "program.py" not in said, said
    for number, (line, error) in enumerate(WRONG.items(), 4):
        assert any(f"wrong.py:{number}: error" in one and error in one for one in said.splitlines()), (
            line,
            said,
        )
