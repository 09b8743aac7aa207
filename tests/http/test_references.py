"""Items that are named instead of resent are read from the caller's own sessions."""

from __future__ import annotations

from typing import Any

import pytest
from openai import NotFoundError

from support.http.http_rig import door
from support.http.tool_rig import ROME, tool_door
from support.service.service_rig import ANSWER


def named(item: Any) -> Any:
    return {"type": "item_reference", "id": item.id}


async def test_items_of_a_response_stand_for_themselves() -> None:
    async with door() as rig:
        create = rig.client.responses.create
        first = await create(model="tiny", input="hi")
        question = (await rig.client.responses.input_items.list(first.id)).data[0]
        said: Any = [named(question), named(first.output[0]), {"role": "user", "content": "again"}]
        await create(model="tiny", input=said)
        resent: Any = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": "again"},
        ]
        await create(model="tiny", input=resent)
        _, by_name, by_text = rig.service.link.generations
        assert by_name.tokens == by_text.tokens
        erased = await create(model="tiny", input="ho")
        await rig.client.responses.delete(erased.id)
        stranger = rig.client.with_options(api_key="another")
        for client, item in (
            (rig.client, erased.output[0]),
            (stranger, first.output[0]),
            (stranger, question),
        ):
            with pytest.raises(NotFoundError) as caught:
                await client.responses.create(model="tiny", input=[named(item), said[-1]])
            assert named(item)["id"] in caught.value.message and caught.value.param == "input[0]"


async def test_a_call_that_is_named_is_the_call() -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    async with tool_door(ROME, "Blue.") as rig:
        create = rig.client.responses.create
        first = await create(model="tiny", input="How is it in Rome?", tools=[tool])
        call: Any = first.output[0]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        question: Any = {"role": "user", "content": "How is it in Rome?"}
        by_name: Any = [question, named(call), result]
        answer = await create(model="tiny", input=by_name, tools=[tool])
        assert answer.output_text == "Blue."
        by_text = await create(model="tiny", input=[question, call.model_dump(), result], tools=[tool])
        assert by_text.output_text == "Blue."
        assert rig.service.link.generations[-1].tokens == rig.service.link.generations[-2].tokens
