"""Functions that the model calls: the program runs them and gives back what they say, until an answer comes.

python examples/tools.py [HOST:PORT]    # needs a model with tools in its chat template: Qwen, Llama 3, Mistral
"""

import json
import sys

from pensieve import Client
from pensieve.client import ToolResult
from pensieve.speech import read

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather in a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


def weather(town: str) -> str:
    return f"21 degrees and clear in {town}"


with Client(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051") as client:
    form = client.server_info().speech
    if form.calls is None:
        print("The model of this server has no place for tools in its chat template.")
        sys.exit()
    session = client.create_session(tools=[TOOL], max_output_tokens=200)
    turn = session.send("How is the weather in Rome?")
    for _ in range(5):  # a model may go on calling: the client sets the limit
        said = read(turn.text, form)
        if not said.calls:
            break
        results = []
        for call in said.calls:
            print(f"{call.name}({call.arguments})")
            results.append(ToolResult(weather(**json.loads(call.arguments)), call.id))
        turn = session.send(items=results)
    print(said.words)
    session.delete()
