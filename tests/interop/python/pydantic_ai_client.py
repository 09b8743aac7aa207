"""What Pydantic AI sees at the HTTP door: chat completions and responses; whole, streamed, with a history.

python pydantic_ai_client.py URL KEY MODEL; prints JSON.
"""

import asyncio
import json
import sys
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel, OpenAIResponsesModelSettings
from pydantic_ai.providers.openai import OpenAIProvider


async def talk(agent: Agent[None, str], **settings: Any) -> dict[str, Any]:
    """Two turns and a streamed one."""
    first = await agent.run("hi")
    second = await agent.run("again", message_history=first.all_messages(), **settings)
    pieces = []
    async with agent.run_stream("more", message_history=second.all_messages(), **settings) as stream:
        async for piece in stream.stream_text(delta=True, debounce_by=None):
            pieces.append(piece)
        usage = stream.usage
    return {
        "answers": [first.output, second.output],
        "streamed": "".join(pieces),
        "tokens": [second.usage.input_tokens, usage.input_tokens],
        "ids": [one.all_messages()[-1].provider_response_id for one in (first, second)],
    }


async def main() -> dict[str, Any]:
    """The client resends the history; then only the new turn travels."""
    provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key=sys.argv[2])
    chained = OpenAIResponsesModelSettings(openai_previous_response_id="auto")
    return {
        "chat": await talk(Agent(OpenAIChatModel(sys.argv[3], provider=provider), instructions="Be brief.")),
        "responses": await talk(
            Agent(OpenAIResponsesModel(sys.argv[3], provider=provider)), model_settings=chained
        ),
    }


print(json.dumps(asyncio.run(main())))
