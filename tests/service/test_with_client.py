"""The client library against this service: what the README shows, for real."""

from __future__ import annotations

import pytest

from pensieve import AsyncClient, NotFound
from support.service.service_rig import ANSWER, serving


async def test_the_first_example() -> None:
    async with serving() as rig:
        target = rig.target
        async with AsyncClient(target) as client:
            chat = await client.create_session(system_prompt="Be brief.")
            pieces = [piece.text async for piece in chat.stream("My name is Ada.")]
            assert "".join(pieces) == ANSWER
            turn = await chat.send("What is my name?")
            assert (turn.text, turn.revision) == (ANSWER, 3)
            assert turn.usage.context_tokens > 0
            again = await chat.regenerate()
            assert again.revision == 4
            branch = await chat.fork()
            await branch.send("elsewhere")
            await chat.rewind(to_item=2)
            items = await chat.items()
            assert [item.item for item in items] == [1, 2]
            reopened = client.session(chat.name)
            assert (await reopened.send("hello again")).text == ANSWER
            await chat.delete()
            with pytest.raises(NotFound):
                await chat.send("gone")
