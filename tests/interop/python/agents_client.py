"""What OpenAI's Agents SDK sees at the HTTP door: a tool loop, with its history in each of the places it knows.

python agents_client.py URL KEY MODEL; prints JSON.
"""

import asyncio
import json
import sys
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIConversationsSession,
    OpenAIResponsesCompactionSession,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

URL, KEY, MODEL = sys.argv[1:4]
CLIENT = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


@function_tool
def weather(town: str) -> str:
    """Tells the weather."""
    return f"blue skies in {town}"


def agent(kind: str) -> Agent[Any]:
    model = OpenAIChatCompletionsModel if kind == "chat" else OpenAIResponsesModel
    return Agent(
        name="A", instructions="Be brief.", model=model(model=MODEL, openai_client=CLIENT), tools=[weather]
    )


async def talk(kind: str, **options: Any) -> list[str]:
    """Two questions; the first one takes a call."""
    answers = []
    previous = None
    for question in (f"How is it in Rome, {kind}?", "Thanks"):
        if kind == "chained":
            options["previous_response_id"] = previous
        found = await Runner.run(agent(kind), question, **options)
        previous = found.last_response_id
        answers.append(str(found.final_output))
    return answers


async def streamed() -> list[str]:
    running = Runner.run_streamed(agent("responses"), "How is it in Rome, streamed?")
    kinds = [event.type async for event in running.stream_events()]
    return [str(running.final_output), str("raw_response_event" in kinds)]


async def main() -> None:
    set_tracing_disabled(True)
    seen = {
        "chat": await talk("chat", session=SQLiteSession("chat")),
        "responses": await talk("responses", session=SQLiteSession("responses")),
        "conversation": await talk("conversation", session=OpenAIConversationsSession(openai_client=CLIENT)),
        "chained": await talk("chained"),
        "streamed": await streamed(),
    }
    # After each question, the client has its history compacted.
    compacted = OpenAIResponsesCompactionSession(
        "compacted",
        SQLiteSession("compacted"),
        client=CLIENT,
        model=MODEL,
        should_trigger_compaction=lambda _: True,
    )
    seen["compacted"] = await talk("compacted", session=compacted)
    seen["items"] = [str(item.get("type")) for item in await compacted.get_items()]
    print(json.dumps(seen))


asyncio.run(main())
