"""A tool loop with Anthropic's client, over HTTP. It needs a model with tools.

ANTHROPIC_BASE_URL=http://127.0.0.1:8080 ANTHROPIC_API_KEY=none python examples/anthropic_tools.py
"""

from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam, ToolResultBlockParam

TOOL: ToolParam = {
    "name": "weather",
    "description": "Tells the weather of a town.",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}

with Anthropic() as client:
    model = client.models.list().data[0].id
    history: list[MessageParam] = [{"role": "user", "content": "How is it in Rome?"}]
    while True:
        # The client resends everything. The server finds the conversation and computes what is new.
        message = client.messages.create(model=model, max_tokens=500, tools=[TOOL], messages=history)
        read, written = message.usage.cache_read_input_tokens, message.usage.cache_creation_input_tokens
        print(f"{read} tokens read from the cache, {written} computed")
        history.append(message.to_param())
        if message.stop_reason != "tool_use":
            break
        results: list[ToolResultBlockParam] = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "Warm and clear."}
            for block in message.content
            if block.type == "tool_use"
        ]
        history.append({"role": "user", "content": results})
    print("".join(block.text for block in message.content if block.type == "text"))
