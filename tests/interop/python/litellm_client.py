"""What LiteLLM sees at the HTTP door, as a provider of OpenAI's kind and of Anthropic's: a tool loop of three turns.

python litellm_client.py URL KEY MODEL; prints JSON.
"""

import json
import sys
from typing import Any

import litellm

litellm.suppress_debug_info = True  # it would print
URL, KEY, MODEL = sys.argv[1:4]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
PROVIDERS = {"openai": f"{URL}/v1", "anthropic": URL}


def loop(provider: str, streamed: bool) -> dict[str, Any]:
    """A question, its call, its result and the answer, then one more question."""
    said: list[Any] = [{"role": "user", "content": f"How is it in Rome, {provider} {streamed}?"}]
    answers, cached = [], []
    for _ in range(3):
        answer = litellm.completion(
            model=f"{provider}/{MODEL}",
            api_base=PROVIDERS[provider],
            api_key=KEY,
            messages=said,
            tools=[TOOL],
            max_tokens=50,
            stream=streamed,
            stream_options={"include_usage": True} if streamed else None,
            num_retries=0,
        )
        if streamed:
            answer = litellm.stream_chunk_builder(list(answer), messages=said)
        message = answer.choices[0].message
        said.append(message.model_dump(exclude_none=True))
        answers.append(message.content)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens / answer.usage.prompt_tokens)
        for call in message.tool_calls or ():
            said.append({"role": "tool", "tool_call_id": call.id, "content": "blue skies"})
        if not message.tool_calls:
            said.append({"role": "user", "content": "Thanks"})
    return {"answers": answers, "cached": cached}


print(
    json.dumps(
        {f"{name} {streamed}": loop(name, streamed) for name in PROVIDERS for streamed in (False, True)}
    )
)
