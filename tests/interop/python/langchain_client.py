"""What LangChain sees at the HTTP door: chat completions and responses; whole, streamed, in batches, chained.

python langchain_client.py URL KEY MODEL; prints JSON.
"""

import asyncio
import json
import sys
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI


def model(**options: Any) -> ChatOpenAI:
    """The door, as LangChain calls it."""
    return ChatOpenAI(
        base_url=f"{sys.argv[1]}/v1",
        api_key=sys.argv[2],
        model=sys.argv[3],
        max_retries=0,
        timeout=60,
        **options,
    )


def chat() -> dict[str, Any]:
    """The client resends the history."""
    talking = model(stream_usage=True)
    said = [SystemMessage("Be brief."), HumanMessage("hi")]
    first = talking.invoke(said)
    second = talking.invoke([*said, first, HumanMessage("again")])
    chunks = list(talking.stream(said))
    whole = sum(chunks[1:], chunks[0])
    return {
        "first": first.text,
        "second": second.text,
        "reason": first.response_metadata["finish_reason"],
        "tokens": [one.usage_metadata["input_tokens"] for one in (first, second)],
        "streamed": whole.text,
        "streamed_tokens": whole.usage_metadata["output_tokens"],
        "batch": [one.text for one in talking.batch(["hi", "ho", "he"])],
    }


def responses() -> dict[str, Any]:
    """Only the new turn travels: LangChain looks for the newest answer with the id of a response."""
    talking = model(use_responses_api=True, use_previous_response_id=True)
    said: list[Any] = [HumanMessage("hi")]
    answers: list[AIMessage] = []
    for text in ("again", "more", ""):
        answers.append(talking.invoke(said))
        said += [answers[-1], HumanMessage(text)]
    said.pop()
    chunks = list(talking.stream([*said, HumanMessage("streamed")]))
    whole = sum(chunks[1:], chunks[0])
    return {
        "answers": [one.text for one in answers],
        "ids": [one.response_metadata["id"] for one in answers],
        "tokens": [one.usage_metadata["input_tokens"] for one in answers],
        "streamed": whole.text,
        "streamed_id": whole.response_metadata["id"],
        "streamed_tokens": whole.usage_metadata["input_tokens"],
        "batch": [one.text for one in talking.batch(["hi", "ho"])],
    }


async def at_once() -> list[str]:
    """Its asynchronous side."""
    talking = model(use_responses_api=True)
    answers = await asyncio.gather(*(talking.ainvoke(text) for text in ("hi", "ho")))
    streamed = [chunk.text async for chunk in talking.astream("hi")]
    return [*(answer.text for answer in answers), "".join(streamed)]


print(json.dumps({"chat": chat(), "responses": responses(), "async": asyncio.run(at_once())}))
