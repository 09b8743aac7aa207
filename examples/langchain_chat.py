"""LangChain, with the history at the server: each call carries the id of the answer before, and what is new.

OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none MODEL=demo python examples/langchain_chat.py
"""

import os

from langchain_core.messages import AnyMessage, HumanMessage
from langchain_openai import ChatOpenAI

chat = ChatOpenAI(model=os.environ["MODEL"], use_responses_api=True, use_previous_response_id=True)
said: list[AnyMessage] = [HumanMessage("My name is Ada and I live in Lisbon.")]
said += [chat.invoke(said), HumanMessage("What's my name?")]
for chunk in chat.stream(said):
    print(chunk.text, end="", flush=True)
print()
