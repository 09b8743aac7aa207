"""Answers in a form: JSON of a schema, a choice, and a regular expression.

python examples/formats.py [HOST:PORT]
"""

import json
import sys

from pensieve import Client
from pensieve.client import FinishReason

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["old", "young"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

with Client(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051") as client:
    session = client.create_session(default_sampling={"max_output_tokens": 100})
    turn = session.send("My name is Ada, and I am 36 years old. Tell me about me in JSON.", schema=PERSON)
    if turn.finish_reason == FinishReason.EOS:  # the limit may cut an answer
        print(json.loads(turn.text))
    print(session.send("Is that old?", choice=["yes", "no"]).text)
    # With keys, this needs one with the scope "grammars".
    print(session.send("In which year was I born?", regex="1[0-9]{3}").text)
    session.delete()
